"""Updates on sampled answers on two ranks have TRL's losses, where rows, layers or the vocabulary are shared."""

import functools
from typing import Any

import pytest
from support.policy_steps import GOLDEN, SHIFT, answers_of, config_of, wave_engine
from support.ranks import run_ranks

from headway.kernels.policy_scores import DrawnFrom
from headway.parallel.collectives import RankGroup, form_groups
from headway.parallel.config import ParallelConfig
from headway.rollout.rows import StepRows, answer_step
from headway.tasks.base import StepInfo

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {},
    "fsdp": {"strategy": "fsdp"},
    "tensor": {"tensor": 2},
}


def losses(settings: dict[str, Any], group: RankGroup) -> list[float]:
    """Of every case, in two microbatches for each rank that reads different rows."""
    parallel = ParallelConfig.model_validate(settings)
    ranks = form_groups(parallel.mesh(group.rank, group.size), group)
    found: list[float] = []
    for entry in GOLDEN["cases"]:
        config = config_of(entry["case"])
        shift = SHIFT if config.beta else None
        drawn = DrawnFrom(GOLDEN["temperature"], None)
        engine = wave_engine(
            config, drawn, GOLDEN["longest"], shift, parallel=parallel, ranks=ranks
        )
        shape = StepRows(16, 3, 1, ranks.data.rank, ranks.data.size)
        step = answer_step(answers_of(entry), shape, 0).batch
        assert len(step.microbatches) > 1
        found.append(float(engine.forward_backward(step, StepInfo(0, 1)).loss))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_on_two_ranks_are_those_of_trl(layout: str) -> None:
    expected = [entry["loss"] for entry in GOLDEN["cases"]]
    for found in run_ranks(functools.partial(losses, LAYOUTS[layout]), 2, timeout=240):
        assert found == pytest.approx(expected, abs=1e-6)
