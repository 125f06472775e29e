"""What a start says while it works."""

import time

import pytest

from headway.data.batch import Batch
from headway.train.start_progress import StartProgress


class FakeClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_a_line_says_what_is_done_and_how_long_the_rest_takes() -> None:
    clock = FakeClock()
    progress = StartProgress(clock)
    progress.begin("validation before training", 4, "microbatches")
    clock.seconds += 6
    assert progress.line() == "validation before training: 0/4 microbatches, 6s so far"
    progress.advance()
    assert progress.line() == (
        "validation before training: 1/4 microbatches, 6s so far, about 18s left"
    )
    # The time left goes down while the second one is computed. One that is late has none.
    clock.seconds += 4
    assert progress.line() == (
        "validation before training: 1/4 microbatches, 10s so far, about 14s left"
    )
    clock.seconds += 90
    assert progress.line() == ("validation before training: 1/4 microbatches, 1m 40s so far")
    # When all is taken, how long the last one lasts is not known.
    progress.advance(3)
    assert progress.line() == "validation before training: 1m 40s so far"


def test_short_work_says_nothing() -> None:
    clock = FakeClock()
    progress = StartProgress(clock)
    assert progress.line() is None
    clock.seconds += 60
    assert progress.line() is None, "no work has begun"
    progress.begin("first step")
    clock.seconds += 4.9
    assert progress.line() is None
    clock.seconds += 0.1
    assert progress.line() == "first step: 5s so far"


def test_microbatches_of_the_first_step_are_counted_when_the_next_one_is_asked_for() -> None:
    clock = FakeClock()
    progress = StartProgress(clock)
    # Objects that stand for batches: only their number and order matter.
    batches: tuple[Batch, ...] = tuple(object() for _ in range(3))  # type: ignore[assignment]
    assert progress.counted(batches) is batches, "closed: later steps are not followed"

    progress.is_open = True
    counted = progress.counted(batches)
    assert len(counted) == 3
    assert counted[1] is batches[1]
    lines: list[str | None] = []
    taken: list[Batch] = []
    for batch in counted:
        taken.append(batch)
        clock.seconds += 10
        lines.append(progress.line())
    assert taken == list(batches)
    assert lines == [
        "first step: 0/3 microbatches, 10s so far",
        "first step: 1/3 microbatches, 20s so far, about 10s left",
        "first step: 2/3 microbatches, 30s so far",
    ]


def test_lines_come_while_work_blocks_and_end_with_close(
    caplog: pytest.LogCaptureFixture,
) -> None:
    progress = StartProgress(every_seconds=0.02)
    with caplog.at_level("INFO", logger="headway"):
        progress.open()
        progress.begin("first step")
        time.sleep(0.2)
        progress.close()
        time.sleep(0.05)
        num_lines = len(caplog.messages)
        time.sleep(0.1)
    assert num_lines >= 2
    assert all(message.startswith("first step: ") for message in caplog.messages)
    assert len(caplog.messages) == num_lines
