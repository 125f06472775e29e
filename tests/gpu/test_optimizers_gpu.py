"""On a CUDA device: the compiled updates and the batched bf16 Newton-Schulz do what the CPU does."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.optim.adafactor import Config as Adafactor
from headway.optim.base import Guard, MatrixOptimizer
from headway.optim.lion import Config as Lion
from headway.optim.muon import Config as Muon
from headway.optim.muon_update import orthogonalize
from headway.optim.schedule_free import Config as ScheduleFree
from headway.optim.state_storage import storage_of
from headway.parallel.update_rules import UpdateRule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPES = [(256, 512), (512, 256), (512, 256), (128, 1024), (64, 64)]


def updated(config: Any, device: str, copies: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and their copies after eight steps on a device, one of them skipped."""
    rule = UpdateRule(config.build(), storage_of(config.build()))
    generator = torch.Generator().manual_seed(0)
    flat = not isinstance(rule.optimizer, MatrixOptimizer)
    params = [(0.1 * torch.randn(shape, generator=generator)).to(device) for shape in SHAPES]
    held = [
        rule.storage.allocate(rule.optimizer.slots, param.numel(), param.device)
        if flat
        else rule.allocate_whole(tuple(param.shape), param.device)
        for param in params
    ]
    twins, steps = (
        [param.to(copies, copy=True) for param in params],
        [torch.zeros((), device=device) for _ in params],
    )
    view = (lambda tensor: tensor.view(-1)) if flat else (lambda tensor: tensor)
    for index in range(8):
        grads = [torch.randn(shape, generator=generator).to(device) for shape in SHAPES]
        state = {slot: [one[slot] for one in held] for slot in held[0]}
        guard = Guard(
            torch.tensor(2.0, device=device), torch.tensor(float(index == 3), device=device)
        )
        hyper = replace(config.hyper(index + 5, 20), lr=1e-2)
        rule.optimizer.update(
            [view(one) for one in params],
            [view(one) for one in grads],
            state,
            steps,
            hyper,
            guard,
            [view(one) for one in twins],
        )
    assert all(float(step) == 7 for step in steps)
    return [param.cpu() for param in params], [twin.cpu() for twin in twins]


@pytest.mark.parametrize(
    "config",
    [
        Muon(ns_dtype="fp32"),
        Lion(),
        Adafactor(),
        ScheduleFree(),
        Muon(ns_dtype="fp32", state_dtype="bf16"),
    ],
    ids=str,
)
def test_updates_are_those_of_the_cpu(config: Any) -> None:
    precise = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        ours, theirs = (
            updated(config, "cuda", torch.bfloat16),
            updated(config, "cpu", torch.bfloat16),
        )
    finally:
        torch.backends.cuda.matmul.allow_tf32 = precise
    loose = 50 if getattr(config, "state_dtype", "fp32") == "bf16" else 1
    for one, other in zip(ours[0], theirs[0], strict=True):
        if config.kind == "lion":  # where a mix is almost zero its sign may differ
            assert ((one - other).abs() > 1e-5).float().mean() < 1e-3
        else:
            torch.testing.assert_close(one, other, rtol=1e-4 * loose, atol=1e-5 * loose)


def test_bf16_newton_schulz_in_batches_is_close_to_fp32() -> None:
    matrices = torch.randn(
        4, 512, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
    )
    exact = torch.stack([orthogonalize(one, 5) for one in matrices.cpu()])
    for found in (
        orthogonalize(matrices.bfloat16(), 5),
        orthogonalize(matrices.mT.contiguous().bfloat16(), 5).mT,
    ):
        assert (found.float().cpu() - exact).norm() < 0.05 * exact.norm()
