"""Answers become rows: every number stands at the position that predicts its token, however rows are packed and shared by ranks."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.policy_steps import floats

from headway.data.batch import ADVANTAGE, ANSWERS, OLD, SAMPLED
from headway.errors import DataError
from headway.rollout.rows import AnswerStep, StepRows, TrainedAnswer, answer_step

SHAPES = [StepRows(24, 5, 1), StepRows(24, 2, 3), StepRows(64, 12, 2), StepRows(16, 3, 20)]


def answers(count: int = 9, *, with_old: bool = True) -> list[TrainedAnswer]:
    """Every token and every number of an answer is a number of its own."""
    draw = random.Random(count)
    listed: list[TrainedAnswer] = []
    for number in range(count):
        size = draw.randint(1, 6)
        logprobs = floats([-number - place / 16 for place in range(size)])
        listed.append(
            TrainedAnswer(
                tuple(1000 * number + place for place in range(draw.randint(1, 9))),
                tuple(1000 * number + 100 + place for place in range(size)),
                logprobs,
                number + 0.5,
                logprobs - 1 if with_old else None,
                has_loss=number != 2,
            )
        )
    return listed


def seen_tokens(step: AnswerStep) -> dict[int, tuple[float, float, float | None]]:
    """Target -> its numbers, of the positions that carry a loss."""
    seen: dict[int, tuple[float, float, float | None]] = {}
    for micro in step.batch.microbatches:
        for row, column in micro.loss_weight.nonzero().tolist():
            target = int(micro.targets[row, column])
            assert target not in seen
            old = None
            if OLD in micro.extra:
                old = float(micro.extra[OLD][row, column])
            seen[target] = (
                float(micro.extra[ADVANTAGE][row, column]),
                float(micro.extra[SAMPLED][row, column]),
                old,
            )
            # The token before it is the one that the answer, or its prompt, has there.
            before = int(micro.tokens[row, column])
            assert before // 1000 == target // 1000
    return seen


def expected_tokens(listed: list[TrainedAnswer]) -> dict[int, tuple[float, float, float | None]]:
    return {
        token: (
            answer.advantage,
            float(answer.logprobs[place]),
            None if answer.old is None else float(answer.old[place]),
        )
        for answer in listed
        if answer.has_loss
        for place, token in enumerate(answer.ids)
    }


@pytest.mark.parametrize("with_old", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_token_of_an_answer_has_its_numbers(shape: StepRows, with_old: bool) -> None:
    listed = answers(with_old=with_old)
    step = answer_step(listed, shape, 3)
    assert seen_tokens(step) == expected_tokens(listed)
    assert step.batch.totals["targets"] == len(expected_tokens(listed))
    assert step.batch.totals[ANSWERS] == 9
    assert step.batch.stats.epoch == 3
    assert step.batch.stats.documents == 9
    assert step.batch.stats.tokens == sum(len(a.prompt) + len(a.ids) for a in listed)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_places_lead_to_the_tokens_of_each_answer(shape: StepRows) -> None:
    listed = answers()
    step = answer_step(listed, shape, 0)
    seen: list[int] = []
    for micro, places in zip(step.batch.microbatches, step.places, strict=True):
        for answer, row, first in places:
            seen.append(answer)
            ids = listed[answer].ids
            assert micro.targets[row, first : first + len(ids)].tolist() == list(ids)
    assert sorted(seen) == list(range(9))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_share_the_rows_of_one_process(ranks: int) -> None:
    listed = answers()
    shapes = [StepRows(24, 5, 2, rank, ranks) for rank in range(ranks)]
    steps = [answer_step(listed, shape, 0) for shape in shapes]
    together: dict[int, tuple[float, float, float | None]] = {}
    for step in steps:
        seen = seen_tokens(step)
        assert not seen.keys() & together.keys()
        together |= seen
        assert step.batch.totals == steps[0].batch.totals
        assert len(step.batch.microbatches) == len(steps[0].batch.microbatches)
    assert together == expected_tokens(listed)


def test_rows_in_their_order_do_not_depend_on_the_number_of_ranks() -> None:
    listed = answers(14)
    alone = answer_step(listed, StepRows(24, 5, 2), 0).batch.microbatches
    shared = [
        micro
        for rank in range(2)
        for micro in answer_step(listed, StepRows(24, 5, 2, rank, 2), 0).batch.microbatches
    ]
    for number, micro in enumerate(alone):
        assert torch.equal(micro.tokens, shared[number].tokens)


def test_an_answer_longer_than_a_row_is_refused_in_one_line() -> None:
    long = TrainedAnswer((1,) * 20, (2,) * 5, floats([0.0] * 5), 1.0)
    with pytest.raises(DataError, match="25 tokens, and a row 24") as info:
        answer_step([long], StepRows(24, 5, 1), 0)
    assert "data.seq_len" in str(info.value)


def test_ids_that_the_policy_did_not_draw_carry_no_loss() -> None:
    """As those of a tool would be; totals count the others."""
    listed = [replace(answer, mask=np.arange(len(answer.ids)) % 2 == 0) for answer in answers()]
    step = answer_step(listed, SHAPES[0], epoch=0)
    expected = expected_tokens(answers())
    for answer in listed:
        for token in answer.ids[1::2]:
            expected.pop(token, None)
    assert seen_tokens(step) == expected
    assert step.batch.totals["targets"] == len(expected)
