"""A line that stays at the bottom: what is written goes above it; a resized or closed terminal harms nothing; plain ones have none."""

import logging
import os
import sys
import time

import pytest
from support.terminal import on_terminal

from headway.runtime.log import FILE_ONLY, start_logging
from headway.runtime.output import Lossy, standard_streams
from headway.runtime.status_line import StatusLine, columns, wants_colour


def settle() -> None:
    time.sleep(0.1)


def test_logs_warnings_and_prints_go_above_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch) as terminal, standard_streams():
        line = StatusLine.on_terminal()
        assert line is not None
        line.show(lambda width: "BAR 1")
        with start_logging(level="INFO"):
            logging.getLogger("headway").info("a log line")
            logging.getLogger("headway").info("in the file", extra=FILE_ONLY)
        sys.stderr.write("half a line, ")
        sys.stderr.write("and its end\n")
        line.show(lambda width: "BAR 2")
        settle()
        shown = terminal.screen()
        line.close()
        sys.stderr.write("after the end\n")
    assert shown == ["a log line", "half a line, and its end", "BAR 2"]
    assert terminal.screen()[-3:] == ["BAR 2", "after the end", ""]


def test_a_resized_window_is_right_with_the_next_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch, 80) as terminal, standard_streams():
        line = StatusLine.on_terminal()
        assert line is not None
        line.show(lambda width: "x" * width)
        settle()
        assert terminal.screen() == ["x" * 79]
        terminal.resize(30)
        line.show(lambda width: "y" * width)
        settle()
        assert terminal.text.endswith("\x1b[2A\r\x1b[J" + "y" * 29), (
            "the folded line is erased, all three rows of it"
        )
        terminal.resize(200)
        line.show(lambda width: "z" * width)
        line.close()
    assert terminal.screen()[-2] == "z" * 199


def test_a_closed_terminal_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal(monkeypatch), standard_streams():
        line = StatusLine.on_terminal()
        assert line is not None
        descriptor = sys.stderr.fileno()
        kept = os.dup(descriptor)
        full = os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, descriptor)
        for _ in range(3):
            line.show(lambda width: "BAR")
            sys.stderr.write("lost\n")
        line.close()
        os.dup2(kept, descriptor)
        os.close(kept)
        os.close(full)


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_erase_has_no_line(
    term: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_terminal(monkeypatch, term=term), standard_streams():
        assert StatusLine.on_terminal() is None


def test_a_pipe_has_no_line_and_neither_has_a_program_of_ones_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert StatusLine.on_terminal() is None
    with on_terminal(monkeypatch):
        assert StatusLine.on_terminal() is None, (
            "outside of the command line others own the terminal"
        )


def test_colours_follow_the_environment() -> None:
    assert wants_colour({"TERM": "xterm"})
    assert not wants_colour({"TERM": "xterm", "NO_COLOR": "1"})
    assert not wants_colour({"TERM": "dumb"})
    assert columns("\x1b[32mab\x1b[0mc漢") == 5
    assert Lossy(None).status is None
