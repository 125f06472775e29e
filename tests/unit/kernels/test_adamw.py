"""The AdamW kernel against torch's operator; the Triton form runs in Triton's interpreter, in a process of its own."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from headway.kernels.adamw import Numbers, Tensors, adamw_step_reference

INTERPRETED = """
import torch
from headway.kernels.adamw import Numbers, Tensors, _fused, adamw_step_reference

def made(seed):
    g = torch.Generator().manual_seed(seed)
    flat = [torch.randn(5000, generator=g) for _ in range(3)] + [torch.rand(5000, generator=g)]
    cut = lambda t: [t[:2048], t[2048:]]
    copies = flat[0].bfloat16()
    counts = torch.tensor([3.0, 3.0])
    return Tensors(*map(cut, flat), [counts[0], counts[1]], cut(copies) if seed else ())

for seed in (0, 1):
    for maximize in (False, True):
        for bad in (0.0, 1.0):
            ours, theirs = made(seed), made(seed)
            numbers, scale = Numbers(1e-2, 0.9, 0.999, 1e-8, 0.1, maximize), torch.tensor(2.5)
            _fused(ours, numbers, scale, torch.tensor(bad))
            adamw_step_reference(theirs, numbers, scale, torch.tensor(bad))
            for name, one, other in zip(Tensors._fields, ours, theirs):
                if name == "grads":
                    continue
                for a, b in zip(one, other):
                    torch.testing.assert_close(a, b, rtol=2e-6 if a.dtype == torch.float32 else 8e-3, atol=1e-7)
                    if bad and name != "copies":
                        assert torch.equal(a, b), name
print("agree")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_the_triton_form_agrees_with_torch_in_the_interpreter() -> None:
    import os

    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "1"}, check=False
    )
    assert done.stdout.strip() == "agree", done.stderr


def test_copies_follow_the_parameters() -> None:
    flat = [torch.randn(64) for _ in range(4)]
    flat[3].abs_()
    copy = torch.zeros(64, dtype=torch.bfloat16)
    tensors = Tensors(*([one] for one in flat), [torch.zeros(())], [copy])
    adamw_step_reference(tensors, Numbers(0.1, 0.9, 0.95, 1e-8, 0.1, False), torch.ones(()), torch.zeros(()))
    assert torch.equal(copy, flat[0].bfloat16())
