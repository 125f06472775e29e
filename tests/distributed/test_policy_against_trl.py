"""Updates on sampled answers on two ranks have TRL's losses, where rows, layers or the vocabulary are shared, and its gradients."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
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


GRADIENTS = json.loads(
    (Path(__file__).parents[1] / "golden" / "trl" / "policy_gradients.json").read_text()
)
"""Of one case, entry by entry."""


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


def gradients(settings: dict[str, Any], group: RankGroup) -> dict[str, torch.Tensor]:
    """The whole gradients that every rank has before it updates, of the case of the golden file."""
    (entry,) = [entry for entry in GOLDEN["cases"] if entry["case"] == GRADIENTS["case"]]
    parallel = ParallelConfig.model_validate(settings)
    ranks = form_groups(parallel.mesh(group.rank, group.size), group)
    drawn = DrawnFrom(GOLDEN["temperature"], None)
    engine = wave_engine(
        config_of(entry["case"]), drawn, GOLDEN["longest"], SHIFT, parallel=parallel, ranks=ranks
    )
    shape = StepRows(16, 3, 1, ranks.data.rank, ranks.data.size)
    step = answer_step(answers_of(entry), shape, 0).batch
    # Packed rows, accumulated on both ranks.
    assert len(step.microbatches) > 1
    engine.forward_backward(step, StepInfo(0, 1))
    return {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }


@pytest.mark.parametrize("world", [1, 2])
def test_every_entry_of_the_gradients_is_that_of_trl(world: int) -> None:
    settings = {"zero1": {"size": 1}}
    for found in run_ranks(functools.partial(gradients, settings), world, timeout=120):
        assert found.keys() == GRADIENTS["gradients"].keys()
        for name, values in GRADIENTS["gradients"].items():
            expected = torch.tensor(values).view_as(found[name])
            torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6, msg=name)
