"""Gradient hooks: what they send may differ, what a rank trains on may not (or only within a stated bound)."""

from functools import partial
from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks

from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo

PLAIN: dict[str, Any] = {"zero1": {"size": 1}}
POWERSGD = {"kind": "powersgd", "rank": 2, "min_compression_rate": 0.0, "start_step": 1}
TORCH_POWERSGD = {
    "kind": "torch_style",
    "function": "torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook:powerSGD_hook",
    "state": "support.engines:torch_powersgd",
    "options": {
        "matrix_approximation_rank": 2,
        "start_powerSGD_iter": 2,
        "min_compression_rate": 0.0,
        "warm_start": True,
    },
}


def gradients(
    parallel: dict[str, Any], group: RankGroup, steps: int = 1
) -> list[dict[str, torch.Tensor]]:
    """The summed gradients of some steps without updates between them."""
    engine = make_engine(group, Setup(parallel, micro=2))
    results = []
    for index in range(steps):
        engine.forward_backward(
            share_of_step(index, 2, group.rank, group.size), StepInfo(index, 20)
        )
        results.append(
            {name: view.clone() for b in engine.buffers for name, view in b.gradients.items()}
        )
    return results


def on_two(parallel: dict[str, Any], steps: int = 1) -> list[dict[str, torch.Tensor]]:
    first, second = run_ranks(partial(gradients, parallel, steps=steps), 2)
    for result, other in zip(first, second, strict=True):
        assert all(torch.equal(result[name], other[name]) for name in result), (
            "all ranks have the same sum"
        )
    return first


@pytest.mark.parametrize(
    ("hook", "bound"),
    [
        ({"kind": "all_reduce"}, 1e-6),
        ({"kind": "compress", "dtype": "bf16"}, 1e-2),
        ({"kind": "compress", "dtype": "fp16"}, 2e-3),
        ({"kind": "torch_style"}, 1e-6),
        ({"kind": "support.my_lab.halves"}, 1e-6),
        ({"kind": "powersgd", "rank": 64, "min_compression_rate": 0.0, "start_step": 0}, 1e-5),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_hook_gives_the_sum_over_ranks(hook: dict[str, Any], bound: float) -> None:
    right = gradients({}, RankGroup())[0]
    for name, value in on_two({**PLAIN, "hook": hook})[0].items():
        assert (value - right[name]).norm() <= bound * right[name].norm() + 1e-9, name


def cut_losses(parallel: dict[str, Any], group: RankGroup) -> list[tuple[float, float, float]]:
    return train_steps(make_engine(group, Setup(parallel, micro=4)), group, 4, 0, 4)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "hook",
    [
        {"kind": "reduce_scatter"},
        {"kind": "compress"},
        {"kind": "powersgd", "rank": 64, "min_compression_rate": 0.0},
    ],
)
def test_hooks_serve_a_cut_optimizer_state(size: int, hook: dict[str, Any]) -> None:
    right = cut_losses({}, RankGroup())
    for seen in run_ranks(partial(cut_losses, {"zero1": {"size": size}, "hook": hook}), 4):
        assert [s[0] for s in seen] == pytest.approx([r[0] for r in right], rel=5e-4)


def test_powersgd_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same start, then four steps of error feedback and warm start: the same approximations."""

    def drawn(*shape: int, **_: Any) -> torch.Tensor:
        return torch.arange(1.0, 1 + torch.Size(shape).numel()).sin().view(shape)

    monkeypatch.setattr(torch, "randn", drawn)
    monkeypatch.setattr(
        "headway.parallel.hooks.powersgd.PowerSGD.draw",
        lambda self, name, shape, step: drawn(*shape),
    )
    steps = 6
    expected = on_two({**PLAIN, "bucket_bytes": 1 << 20, "hook": TORCH_POWERSGD}, steps)
    ours = on_two({**PLAIN, "bucket_bytes": 1 << 20, "hook": {**POWERSGD, "start_step": 2}}, steps)
    exact = on_two({**PLAIN, "bucket_bytes": 1 << 20}, steps)
    for step, (our, their) in enumerate(zip(ours, expected, strict=True)):
        for name in our:
            torch.testing.assert_close(
                our[name],
                their[name],
                rtol=2e-3,
                atol=2e-5,
                msg=lambda m: f"step {step}, {name}: {m}",  # noqa: B023
            )
    matrix = "model.layers.1.mlp.up_proj.weight"
    assert (ours[-1][matrix] - exact[-1][matrix]).norm() > 0.1 * exact[-1][matrix].norm(), (
        "it did compress"
    )


def test_error_feedback_loses_nothing_for_good() -> None:
    """Summed over steps, approximations plus what is still in the residuals are the true gradients."""

    def totals(group: RankGroup) -> tuple[Any, Any, Any]:
        engine = make_engine(group, Setup({**PLAIN, "hook": POWERSGD}, micro=2))
        exact = make_engine(group, Setup(PLAIN, micro=2))
        sums = []
        for an_engine in (engine, exact):
            total: dict[str, torch.Tensor] = {}
            for index in range(5):
                an_engine.forward_backward(
                    share_of_step(index, 2, group.rank, group.size), StepInfo(index, 20)
                )
                for buffer in an_engine.buffers:
                    for name, gradient in buffer.gradients.items():
                        total[name] = total.get(name, 0) + gradient
            sums.append(total)
        return sums[0], sums[1], engine.reducer.hook.residuals

    (got, right, mine), (_, _, others) = run_ranks(totals, 2)
    assert mine and any(not torch.equal(mine[name], others[name]) for name in mine), (
        "residuals differ between ranks"
    )
    for name in mine:
        torch.testing.assert_close(
            got[name] + mine[name] + others[name], right[name], rtol=1e-4, atol=1e-5
        )


def test_a_step_that_is_not_finite_leaves_nothing_in_the_residuals() -> None:
    """One rank alone overflows in the third step; the fourth is what it would be if the third had sent nothing."""

    def spoiled(group: RankGroup) -> tuple[Any, Any, Any]:
        engine = make_engine(group, Setup({**PLAIN, "hook": POWERSGD}, micro=2))
        exact = make_engine(group, Setup(PLAIN, micro=2))
        kept = {name: value.clone() for name, value in engine.masters.items()}
        for index in range(4):
            if index == 2 and group.rank == 0:
                engine.fill(
                    [("model.norm.weight", torch.full_like(kept["model.norm.weight"], torch.inf))]
                )
            engine.forward_backward(
                share_of_step(index, 2, group.rank, group.size), StepInfo(index, 20)
            )
            if index == 2:
                assert not all(
                    bool(g.isfinite().all()) for b in engine.buffers for g in b.gradients.values()
                )
                assert all(not value.any() for value in engine.reducer.hook.residuals.values())
                engine.fill(kept.items())
        exact.forward_backward(share_of_step(3, 2, group.rank, group.size), StepInfo(3, 20))
        got = {name: g.clone() for b in engine.buffers for name, g in b.gradients.items()}
        right = {name: g.clone() for b in exact.buffers for name, g in b.gradients.items()}
        return got, right, engine.reducer.hook.residuals

    (got, right, mine), (_, _, others) = run_ranks(spoiled, 2)
    assert mine
    for name in mine:
        torch.testing.assert_close(
            got[name] + mine[name] + others[name], right[name], rtol=1e-4, atol=1e-5
        )
