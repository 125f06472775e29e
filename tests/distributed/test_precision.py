"""fp16: the loss scale follows overflows by the rule, and all ranks decide alike."""

from typing import Any

import pytest
import torch
from support.engines import OPTIM, Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks

from headway.optim.groups import hypers
from headway.optim.scaler import ScalerConfig
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo

SCALE = ScalerConfig(initial=1024.0, growth_interval=3, hysteresis=2)
STRATEGIES = {"ddp": {"zero1": {"size": 1}}, "zero1": {}, "fsdp": {"strategy": "fsdp"}}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_overflow_on_one_rank_skips_the_step_on_all_and_lowers_the_scale(strategy: str) -> None:
    def steps(group: RankGroup) -> list[Any]:
        engine = make_engine(
            group, Setup(STRATEGIES[strategy], dtype=torch.float16, micro=2, loss_scale=SCALE)
        )
        seen = []
        for index in range(7):
            before = {name: value.clone() for name, value in engine.weights()}
            step = share_of_step(index, 2, group.rank, group.size)
            if index in (1, 2) and group.rank == 1:
                step.microbatches[0].loss_weight.mul_(1e9)
            engine.forward_backward(step, StepInfo(index, 20))
            update = engine.update(hypers(OPTIM, engine.groups, index, 20))
            moved = any(not torch.equal(before[name], value) for name, value in engine.weights())
            seen.append((float(update.loss_scale), float(update.skipped), moved))
        return [seen, engine.scalars()["skipped"], engine.scalars()["scaler"]]

    first, second = run_ranks(steps, 2)
    assert first == second
    seen, skipped, scaler = first
    # one overflow is forgiven (hysteresis 2), the second halves the scale; three good steps double it again
    assert [scale for scale, _, _ in seen] == [1024, 1024, 1024, 512, 512, 512, 1024]
    assert [skip for _, skip, _ in seen] == [0, 1, 1, 0, 0, 0, 0]
    assert [moved for _, _, moved in seen] == [True, False, False, True, True, True, True]
    assert skipped == 2
    assert scaler == {"scale": 1024.0, "good": 1, "overflows": 0}


def test_fp16_follows_fp32() -> None:
    def losses(group: RankGroup, dtype: torch.dtype) -> list[float]:
        engine = make_engine(group, Setup(dtype=dtype, micro=2, loss_scale=SCALE))
        return [loss for loss, _, _ in train_steps(engine, group, 2, 0, 8)]

    right = losses(RankGroup(), torch.float32)
    for seen in run_ranks(lambda group: losses(group, torch.float16), 2):
        assert seen == pytest.approx(right, rel=1e-2)


@pytest.mark.parametrize("reduce_dtype", ["fp32", "bf16"])
def test_gradients_may_be_added_up_in_the_compute_dtype(reduce_dtype: str) -> None:
    def losses(group: RankGroup, parallel: dict[str, Any]) -> list[float]:
        engine = make_engine(group, Setup(parallel, dtype=torch.bfloat16, micro=4))
        assert all(
            grad.dtype == torch.bfloat16 or not parallel
            for buffer in engine.buffers
            for grad in buffer.grads
        )
        return [loss for loss, _, _ in train_steps(engine, group, 4, 0, 8)]

    right = losses(RankGroup(), {})
    for seen in run_ranks(
        lambda group: losses(group, {"accumulate_dtype": "compute", "reduce_dtype": reduce_dtype}),
        2,
    ):
        assert seen == pytest.approx(right, rel=1e-2)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_may_be_exchanged_in_bf16(strategy: str) -> None:
    def losses(group: RankGroup, parallel: dict[str, Any]) -> list[float]:
        return [
            loss
            for loss, _, _ in train_steps(
                make_engine(group, Setup(parallel, micro=4)), group, 4, 0, 8
            )
        ]

    right = losses(RankGroup(), {})
    for seen in run_ranks(
        lambda group: losses(group, {**STRATEGIES[strategy], "reduce_dtype": "bf16"}), 4
    ):
        assert seen == pytest.approx(right, rel=2e-3)
        assert seen != pytest.approx(right, rel=1e-7)
