"""Why gates and multipliers have little momentum: without a model, a constant pull of each head towards full attention in its place.

pytest -s tests/unit/tasks/test_head_sparsity_swing.py      prints the distance between sparsity and aim for both settings
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from headway.model.head_gates import sample
from headway.optim.schedule import Schedule
from headway.tasks.head_sparsity import Config

STEPS = 400
HEADS = (16, 8)
PULL = 0.02
Betas = tuple[float, float]


def distance(config: Config, mask_betas: Betas, reg_betas: Betas) -> float:
    """Root mean square of sparsity minus aim over the second half of a run."""
    pull = PULL * torch.rand(HEADS, generator=torch.Generator().manual_seed(0))
    log_alpha = torch.nn.Parameter(torch.full(HEADS, 4.0))
    lambdas = torch.nn.Parameter(torch.zeros(2))
    groups = [
        {"params": [log_alpha], "betas": mask_betas},
        {"params": [lambdas], "betas": reg_betas, "maximize": True},
    ]
    optimizer = torch.optim.AdamW(groups, weight_decay=config.mask_weight_decay)
    schedule = Schedule(warmup=0.1, floor=0.01)
    squares: list[float] = []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = config.mask_lr * schedule.factor(step, STEPS)
        optimizer.zero_grad()
        gaps = []
        for micro in range(2):
            z, slope = sample(log_alpha.detach(), 2 * step + micro)
            z = z + slope * (log_alpha - log_alpha.detach())
            gap = 1 - z.mean() - config.target_at(step, STEPS)
            ((lambdas[0] * gap + lambdas[1] * gap.square() - (pull * z).sum()) / 2).backward()
            gaps.append(float(gap.detach()))
        torch.nn.utils.clip_grad_norm_([log_alpha, lambdas], 1.0)
        optimizer.step()
        if step >= STEPS // 2:
            squares.append((sum(gaps) / 2) ** 2)
    return (sum(squares) / len(squares)) ** 0.5


def test_with_little_momentum_the_sparsity_stays_nearer_to_its_aim(
    record_property: Callable[[str, object], None],
) -> None:
    config = Config(target=0.7)
    ours = distance(config, config.mask_betas, config.reg_betas)
    with_momentum = distance(config, (0.9, 0.95), (0.9, 0.95))
    record_property(
        "distances", f"{ours:.3f} with the defaults, {with_momentum:.3f} with betas 0.9, 0.95"
    )
    assert ours < 0.6 * with_momentum
