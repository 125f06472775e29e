"""The progress bar fits its terminal, shows what is known, and costs the loop next to nothing."""

import time

import pytest
from support.terminal import on_terminal

from headway.runtime.output import standard_streams
from headway.runtime.status_line import StatusLine, columns
from headway.track.bar import bar_line
from headway.track.console import Console

RECORD = {
    "step": 120, "loss": 2.31234, "lr": 1e-3,
    "time": {"tokens_per_second": 12345.0, "mfu_causal": 0.412, "eta_seconds": 200.0, "mfu_full": 0.5},
}  # fmt: skip


def test_a_wide_line_has_everything_and_a_narrow_one_the_important() -> None:
    wide = bar_line(RECORD, 500, 2.5, 199, has_colour=False)
    assert (
        wide
        == "━" * 10 + "─" * 30 + " 120/500  loss 2.312  valid 2.5  12.3k tok/s  mfu 41%  eta 3m 20s"
    )
    narrow = bar_line(RECORD, 500, 2.5, 59, has_colour=False)
    assert narrow.endswith("120/500  loss 2.312  valid 2.5  eta 3m 20s")
    assert 20 < len(narrow) <= 59
    assert bar_line(RECORD, 500, 2.5, 32, has_colour=False) == "120/500  loss 2.312  eta 3m 20s"
    assert bar_line(RECORD, 500, 2.5, 20, has_colour=False) == "120/500  loss 2.312"
    for width in range(8, 201):
        assert columns(bar_line(RECORD, 500, 2.5, width)) <= width


def test_what_is_not_known_is_not_shown() -> None:
    bare = {
        "step": 3,
        "loss": float("nan"),
        "time": {"mfu_causal": None, "tokens_per_second": None, "eta_seconds": float("inf")},
    }
    assert bar_line(bare, None, None, 100) == "step 3"
    assert (
        bar_line(
            {"step": 5, "loss": 1.0, "time": {"eta_seconds": 0.0}},
            5,
            None,
            60,
            is_plain=True,
            has_colour=False,
        )
        == "#" * 40 + " 5/5  loss 1"
    )


def test_a_tick_takes_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of a fast loop takes milliseconds: the bar draws ten times a second and only remembers the steps between."""
    with on_terminal(monkeypatch) as terminal, standard_streams():
        console = Console(100_000, StatusLine.on_terminal())
        began = time.perf_counter()
        for step in range(1, 20_001):
            console.tick({**RECORD, "step": step})
        each = (time.perf_counter() - began) / 20_000
        console.close()
    assert each < 50e-6, f"{each * 1e6:.1f} microseconds per step"
    assert 1 <= terminal.text.count("100000") <= 20
