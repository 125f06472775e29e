"""The probe of batch.micro_rows=auto: what it tries, what it sends to its process, and what follows when that process fails."""

import logging
import pickle
from dataclasses import replace

import pytest
import torch
from support.batches import make_batch, make_step
from support.engines import CONFIG

from headway.data.batch import Batch
from headway.optim.adamw import Config as AdamW
from headway.parallel.engine import EngineSpec
from headway.parallel.memory_probe import largest_fitting, make_probe, rows_of, stack_rows
from headway.tasks.next_token import Config as NextToken
from headway.train.memory import _measure

SPEC = EngineSpec(CONFIG, NextToken(), AdamW())
ROWS = make_batch([[16], [7, 5], [3, 3, 3], [12]], seq_len=16, vocab=64)


@pytest.mark.parametrize(
    ("limit", "room", "answer", "tried"),
    [
        (100, 100, 8, [1, 2, 8]),  # 20 + 10 bytes a row
        (65, 100, 4, [1, 2, 4]),
        (100, 60, 4, [1, 2, 8, 4]),  # the line allows 8 rows, the device does not
        (100, 40, 2, [1, 2, 8, 4]),
        (35, 100, 1, [1, 2]),
        (100, 35, 1, [1, 2]),
        (100, 25, 1, [1]),  # nothing fits: the first step of the run says what is missing
    ],
)
def test_the_largest_size_that_fits_is_found_in_few_trials(
    limit: int, room: int, answer: int, tried: list[int]
) -> None:
    seen: list[int] = []

    def peak(rows: int) -> int | None:
        seen.append(rows)
        used = 20 + 10 * rows
        return used if used <= room else None

    assert largest_fitting([1, 2, 4, 8], limit, peak) == answer
    assert seen == tried


def test_one_size_is_tried_once() -> None:
    assert largest_fitting([1], 10, lambda rows: 5) == 1


def test_rows_are_repeated_up_to_the_largest_size() -> None:
    parts = [rows_of(ROWS, 0, 1), rows_of(ROWS, 1, 3)]
    batch = stack_rows(parts, 5)
    assert torch.equal(batch.tokens, ROWS.tokens[[0, 1, 2, 0, 1]])
    assert torch.equal(batch.bounds, ROWS.bounds[[0, 1, 2, 0, 1]])
    assert not stack_rows([replace(parts[0], single_document=True), parts[1]], 3).single_document
    assert (
        stack_rows(
            [replace(parts[0], max_length=16), replace(parts[1], max_length=7)], 3
        ).max_length
        == 16
    )


def test_a_probe_travels_to_another_process_with_the_columns_of_the_reference() -> None:
    def prepare(batch: Batch) -> Batch:
        assert batch.tokens.shape[0] == 1  # all rows at once may not fit
        return replace(batch, extra={**batch.extra, "reference": torch.ones(1, 3)})

    probe = make_probe(replace(SPEC, prepare=prepare), make_step(ROWS, 4), [1, 2, 4], 10)
    sent = pickle.loads(pickle.dumps(probe))
    assert sent.step.microbatches[0].extra["reference"].shape == (4, 3)
    assert torch.equal(sent.step.microbatches[0].tokens, ROWS.tokens)
    assert EngineSpec(**sent.settings).model == CONFIG


def test_a_probe_that_fails_leaves_the_smallest_microbatch_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    probe = make_probe(SPEC, make_step(ROWS, 4), [1, 2, 4], 10)
    before = torch.get_rng_state()
    with caplog.at_level(logging.WARNING, logger="headway"):
        assert _measure(probe, 240) == 1  # the process finds no CUDA device
    assert "measuring memory failed" in caplog.text
    assert "batch.micro_rows" in caplog.text
    assert torch.equal(torch.get_rng_state(), before)
