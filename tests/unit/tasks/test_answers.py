"""What a task that learns from rollouts is asked, and what its loss reads of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.policy_steps import floats

from headway.data.batch import KEPT, OLD, SAMPLED, SCORED
from headway.errors import ConfigError
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.tasks.answers import (
    AGREEMENT,
    DIFFERING,
    AnswerGroup,
    AnswerSampling,
    SampledTokens,
    check_answers,
    rated,
)
from headway.tasks.base import TaskConfig, TaskNeeds
from headway.tasks.grpo import Config as GrpoConfig

GROUPS = (AnswerGroup((1.0, 0.0), (3, 5)), AnswerGroup((0.5, 0.5, 2.0), (1, 1, 4)))
Rate = Callable[[Sequence[AnswerGroup]], Any]


class Unfinished(TaskConfig):
    """Says that it learns from rollouts, and answers nothing else."""

    kind: str = "my_lab.unfinished"

    @property
    def needs(self) -> TaskNeeds:
        return TaskNeeds(rollouts=True)


class Rated(Unfinished):
    """Rates answers with a function of the test."""

    def advantages_of(self, groups: Sequence[AnswerGroup]) -> Any:
        return RATE[0](groups)


RATE: list[Rate] = []


def by_length(groups: Sequence[AnswerGroup]) -> list[list[float]]:
    return [[float(length) for length in group.lengths] for group in groups]


def test_advantages_come_from_rewards_and_lengths_of_all_prompts() -> None:
    RATE[:] = [by_length]
    assert rated(Rated(), GROUPS) == [(3.0, 5.0), (1.0, 1.0, 4.0)]
    grpo = GrpoConfig(algorithm="dr_grpo")
    assert rated(grpo, GROUPS) == [tuple(grpo.advantages(group.rewards)) for group in GROUPS]


def test_a_task_without_an_answer_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="Define advantages_of in its Config") as refusal:
        check_answers(Unfinished(), 4)
    assert len(str(refusal.value).splitlines()) == 1
    assert "my_lab.unfinished" in str(refusal.value)


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (lambda groups: by_length(groups)[:1], "gave 4 numbers for 8 answers to 2 prompts"),
        (lambda groups: [of[1:] for of in by_length(groups)], "gave 6 numbers for 8 answers"),
        (lambda groups: [[float("nan")] * 4] * 2, "a number that is not finite"),
        (lambda groups: [[1 / 0] * 4] * 2, "failed: ZeroDivisionError: division by zero"),
        (lambda groups: None, "failed: TypeError"),
    ],
)
def test_wrong_advantages_are_refused_in_one_line(rate: Rate, said: str) -> None:
    RATE[:] = [rate]
    with pytest.raises(ConfigError, match=r"objective my_lab.unfinished: advantages_of") as refusal:
        check_answers(Rated(), 4)
    assert said in str(refusal.value)
    assert len(str(refusal.value).splitlines()) == 1


@dataclass(frozen=True)
class Head:
    """A head whose log-probabilities are given."""

    log_prob: torch.Tensor

    def policy(self, targets: torch.Tensor, drawn: Any, kept: torch.Tensor | None) -> Any:
        assert tuple(drawn) == (0.7, 50)
        assert (kept is None) == (KEPT not in BATCH.extra)

        @dataclass(frozen=True)
        class Scores:
            log_prob: torch.Tensor
            entropy: torch.Tensor

        return Scores(self.log_prob, self.log_prob + 2)


@dataclass(frozen=True)
class Out:
    head: Head


ANSWERS = [
    TrainedAnswer((1, 2), (3, 4, 5), floats([-1.0, -2.0, -3.0]), 0.5),
    TrainedAnswer((6,), (7, 8), floats([-0.5, -0.25]), -1.5),
]
BATCH = answer_step(ANSWERS, StepRows(16, 4, 1), 0).batch.microbatches[0]
SAMPLING = AnswerSampling(0.7, 50, longest=3, exact=True)


def test_a_loss_reads_numbers_of_answers_and_zero_beside_them() -> None:
    given = torch.arange(16.0).view(1, 16) - 20
    tokens = SampledTokens.read(Out(Head(given)), BATCH, SAMPLING)  # pyright: ignore[reportArgumentType]
    is_target = BATCH.loss_weight > 0
    assert int(is_target.sum()) == 5
    assert torch.equal(tokens.log_prob, torch.where(is_target, given, 0.0))
    # There was no update on these answers yet.
    assert torch.equal(tokens.old, tokens.log_prob)
    assert not tokens.old.requires_grad
    assert tokens.scored is None
    assert sorted(tokens.advantage[is_target].tolist()) == [-1.5, -1.5, 0.5, 0.5, 0.5]

    BATCH.extra[OLD] = given - 1
    BATCH.extra[SCORED] = given + 1
    later = SampledTokens.read(Out(Head(given)), BATCH, SAMPLING)  # pyright: ignore[reportArgumentType]
    del BATCH.extra[OLD], BATCH.extra[SCORED]
    assert torch.equal(later.old, given - 1)
    assert later.scored is not None
    assert torch.equal(later.scored, torch.where(is_target, given + 1, 0.0))


def test_agreement_is_the_distance_of_trainer_and_sampler_on_drawn_tokens() -> None:
    shift = torch.zeros(1, 16)
    is_target = BATCH.loss_weight > 0
    first = int(is_target.nonzero()[0, 1])
    shift[0, first] = 0.5
    given = BATCH.extra[SAMPLED] + shift
    # Beside answers any difference counts for nothing.
    BATCH.extra[OLD] = torch.where(is_target, given, 9.0)
    tokens = SampledTokens.read(Out(Head(given)), BATCH, SAMPLING)  # pyright: ignore[reportArgumentType]
    del BATCH.extra[OLD]
    metrics = {name: float(a) / float(b) for name, (a, b) in tokens.agreement().items()}
    assert metrics == {
        AGREEMENT: pytest.approx(0.1),
        "agreement/max": pytest.approx(0.5),
        DIFFERING: pytest.approx(0.2),
    }


def test_numbers_of_answers_and_of_their_tokens_are_two_ways() -> None:
    ones = BATCH.loss_weight
    lengths = BATCH.sum_documents(ones)
    assert sorted(lengths[0].tolist())[-2:] == [2.0, 3.0]
    per_token = BATCH.per_token(lengths)
    assert sorted(per_token[ones > 0].tolist()) == [2.0, 2.0, 3.0, 3.0, 3.0]
