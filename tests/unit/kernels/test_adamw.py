"""The AdamW step of one process beside its narrow copy; the Triton form is in test_triton_forms.py."""

import torch

from headway.kernels.adamw import AdamWHyper, AdamWTensors, adamw_step_reference


def test_copies_follow_the_parameters() -> None:
    flat = [torch.randn(64) for _ in range(4)]
    flat[3].abs_()
    copy = torch.zeros(64, dtype=torch.bfloat16)
    tensors = AdamWTensors(*([tensor] for tensor in flat), [torch.zeros(())], [copy])
    adamw_step_reference(
        tensors, AdamWHyper(0.1, 0.9, 0.95, 1e-8, 0.1, False), torch.ones(()), torch.zeros(())
    )
    assert torch.equal(copy, flat[0].bfloat16())
