"""Updates on sampled answers on ranks that share rows, layers or the vocabulary: those of one process on the same answers."""

import functools
import random
from typing import Any

import pytest
import torch
from support.engines import Setup, make_engine
from support.layout_trials import DORA, LORA, PLAIN, TRIAL_OPTIM
from support.policy_steps import floats
from support.ranks import run_ranks

from headway.model.adapter.config import AdapterConfig
from headway.optim.groups import hypers
from headway.parallel.collectives import RankGroup
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.tasks.answers import AnswerSampling
from headway.tasks.base import StepInfo
from headway.tasks.grpo import Config

STEPS = 4
SAMPLING = AnswerSampling(0.8, 60, 7)
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (2, {"zero1": {"size": 1}}),
    "zero1": (2, {}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "tensor": (2, {"tensor": 2}),
    "tensor, no sequence": (2, {"tensor": 2, "sequence": False}),
    "pipeline": (2, {"pipeline": 2}),
}
TASKS: dict[str, dict[str, Any]] = {
    "grpo": {"entropy": 0.1},
    "dapo": {"algorithm": "dapo"},
    "bnpo": {"algorithm": "bnpo"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "gspo": {"algorithm": "gspo", "clip_low": 0.05, "clip_high": 0.05, "importance": "sequence"},
    "rloo": {"algorithm": "rloo"},
    "cispo": {"algorithm": "cispo", "clip_high": 1.05},
}
Seen = tuple[list[tuple[float, float, dict[str, float]]], dict[str, torch.Tensor]]


def answers(step: int) -> list[TrainedAnswer]:
    """Answers of many lengths, with numbers near those that the model gives."""
    draw = random.Random(step)
    listed: list[TrainedAnswer] = []
    for number in range(11):
        size = draw.randint(1, 7)
        old = floats([-4.1 + draw.uniform(-0.4, 0.4) for _ in range(size)])
        listed.append(
            TrainedAnswer(
                tuple(draw.randrange(60) for _ in range(draw.randint(1, 6))),
                tuple(draw.randrange(60) for _ in range(size)),
                floats(old + floats([draw.uniform(-0.2, 0.2) for _ in range(size)])),
                draw.uniform(-1.5, 1.5),
                old,
                has_loss=number != 4,
            )
        )
    return listed


def trained(setup: Setup, micro_rows: int, group: RankGroup) -> Seen:
    engine = make_engine(group, setup)
    data = engine.ranks.data
    shape = StepRows(16, 4, micro_rows, data.rank, data.size)
    records = []
    for step in range(STEPS):
        result = engine.forward_backward(
            answer_step(answers(step), shape, 0).batch, StepInfo(step, STEPS)
        )
        update = engine.update(hypers(TRIAL_OPTIM, engine.groups, step, 20))
        assert not update.skipped
        metrics = {name: float(a) / float(b) for name, (a, b) in result.metrics.items()}
        records.append((float(result.loss), float(update.norm), metrics))
    return records, {name: value.clone() for name, value in engine.weights()}


def setup_of(task: str, parallel: dict[str, Any], adapter: AdapterConfig | None = None) -> Setup:
    objective = Config.model_validate(TASKS[task]).with_sampling(SAMPLING)
    return Setup(parallel, freeze=(), config=PLAIN, objective=objective, adapter=adapter)


@functools.cache
def alone(task: str, adapter: AdapterConfig | None) -> Seen:
    return trained(setup_of(task, {}, adapter), 2, RankGroup())


def assert_as_alone(
    layout: str, task: str, adapter: AdapterConfig | None = None, micro_rows: int = 2
) -> None:
    ranks, parallel = LAYOUTS[layout]
    setup = setup_of(task, parallel, adapter)
    expected, weights = alone(task, adapter)  # pyright: ignore[reportArgumentType]
    assert len({loss for loss, _, _ in expected}) == STEPS
    for records, got in run_ranks(functools.partial(trained, setup, micro_rows), ranks):
        for (loss, norm, metrics), (right_loss, right_norm, right) in zip(
            records, expected, strict=True
        ):
            assert loss == pytest.approx(right_loss, rel=1e-5, abs=2e-6)
            assert norm == pytest.approx(right_norm, rel=1e-4)
            assert metrics == pytest.approx(right, rel=1e-4, abs=1e-5)
        assert got.keys() == weights.keys()
        for name, value in weights.items():
            torch.testing.assert_close(got[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_trains_like_one_process(layout: str) -> None:
    assert_as_alone(layout, "grpo")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "fsdp", "tensor"])
@pytest.mark.parametrize("task", [task for task in TASKS if task != "grpo"])
def test_every_algorithm_trains_on_ranks_like_in_one_process(layout: str, task: str) -> None:
    assert_as_alone(layout, task)


@pytest.mark.parametrize("layout", ["zero1", "fsdp", "tensor"])
@pytest.mark.parametrize("adapter", [LORA, DORA], ids=["lora", "dora"])
def test_adapters_train_on_ranks_like_in_one_process(layout: str, adapter: AdapterConfig) -> None:
    assert_as_alone(layout, "grpo", adapter)


@pytest.mark.parametrize("micro_rows", [1, 16])
def test_the_rows_of_a_microbatch_change_nothing_on_ranks(micro_rows: int) -> None:
    """With 16, one rank has nothing but empty rows."""
    assert_as_alone("zero1", "grpo", micro_rows=micro_rows)


def scores_of_answers(setup: Setup, group: RankGroup) -> dict[int, list[float]]:
    """Of the tokens of every answer of this rank, before any update."""
    engine = make_engine(group, setup)
    data = engine.ranks.data
    step = answer_step(answers(0), StepRows(16, 4, 2, data.rank, data.size), 0)
    values = engine.token_log_probs(
        step.batch.microbatches, StepInfo(0, 1, training=False), SAMPLING.drawn
    )
    seen: dict[int, list[float]] = {}
    for micro, places in zip(values, step.places, strict=True):
        for answer, row, first in places:
            last = first + len(answers(0)[answer].ids)
            seen[answer] = micro[row, first:last].tolist()
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_of_answers_are_those_of_one_process_on_every_layout(layout: str) -> None:
    ranks, parallel = LAYOUTS[layout]
    expected = scores_of_answers(setup_of("grpo", {}), RankGroup())
    assert len(expected) == 11
    together: dict[int, list[float]] = {}
    for seen in run_ranks(functools.partial(scores_of_answers, setup_of("grpo", parallel)), ranks):
        together |= seen
    assert together.keys() == expected.keys()
    for answer, values in expected.items():
        assert together[answer] == pytest.approx(values, abs=1e-5)
