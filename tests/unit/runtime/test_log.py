"""Lines reach the console and train.log, other libraries stay quiet, and long work says how far it is."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headway.errors import ConfigError
from headway.runtime import progress as progress_module
from headway.runtime.log import start_logging
from headway.runtime.progress import duration, progress, quantity

LOG = logging.getLogger("headway")


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    before = LOG.level, logging.getLogger().level
    yield
    LOG.setLevel(before[0])
    logging.getLogger().setLevel(before[1])


def test_lines_go_to_standard_error_and_to_the_run_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_logging(tmp_path, "INFO"):
        LOG.info("a line")
        LOG.debug("too much")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").warning("trouble")
    LOG.info("after the run")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "a line\nwarning: trouble\n"
    kept = (tmp_path / "train.log").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in kept] == ["INFO a line", "WARNING trouble"]
    assert kept[0][:2] == "20"


def test_a_resumed_run_continues_its_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("first", "second"):
        with start_logging(tmp_path, "INFO"):
            LOG.info(text)
    assert capsys.readouterr().err == "first\nsecond\n"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 2


def test_a_run_inside_other_work_does_not_double_its_lines_and_gives_the_log_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_logging(level="INFO"):
        with start_logging(tmp_path, "DEBUG"):
            LOG.debug("in the run")
        LOG.info("after the run")
        LOG.debug("too much")
    assert capsys.readouterr().err == "in the run\nafter the run\n"
    assert len((tmp_path / "train.log").read_text().splitlines()) == 1


def test_other_ranks_have_their_own_file_and_only_warn_on_the_console(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start_logging(tmp_path, "DEBUG", rank=3):
        LOG.debug("detail")
        LOG.warning("slow")
    assert capsys.readouterr().err == "warning: [rank 3] slow\n"
    assert len((tmp_path / "logs" / "rank-00003.log").read_text().splitlines()) == 2
    assert not (tmp_path / "train.log").exists()


@pytest.mark.parametrize("chosen", ["DEBUG", "WARNING"])
def test_a_level_chosen_by_basic_config_stays(chosen: str) -> None:
    LOG.setLevel(logging.NOTSET)
    before = list(logging.getLogger().handlers)
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(chosen)
    with start_logging():
        assert LOG.level == getattr(logging, chosen)
        assert handler not in logging.getLogger().handlers
    assert logging.getLogger().handlers == [*before, handler]
    logging.getLogger().removeHandler(handler)


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="'LOUD'; it must be one of DEBUG"):
        start_logging(level="LOUD")


def test_without_a_terminal_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(progress_module, "LINE_EVERY_SECONDS", 0.0)
    with (
        caplog.at_level(logging.INFO, "headway"),
        progress("tokenize", total=4000, unit="bytes") as advance,
    ):
        advance(1000)
        advance(3000)
    assert len(caplog.messages) == 3
    assert caplog.messages[0].startswith("tokenize: 1.0 kB/4.0 kB (25%)")
    assert caplog.messages[0].endswith(" left")
    assert caplog.messages[-1].startswith("tokenize: done, 4.0 kB")


def test_on_a_terminal_progress_is_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with progress("count", total=2, unit="files") as advance:
        advance(1)
        advance(1)
    assert "count" in capsys.readouterr().err


def test_numbers_and_times_read_well() -> None:
    assert [quantity(n, "bytes") for n in (0, 999, 1500, 2.5e9)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 GB",
    ]
    assert [quantity(n, "tokens") for n in (12, 65536, 1e12)] == [
        "12 tokens",
        "65.5k tokens",
        "1.0T tokens",
    ]
    assert [duration(s) for s in (0, 59.6, 245, 11220, 187200)] == [
        "0s",
        "1m 00s",
        "4m 05s",
        "3h 07m",
        "2d 04h",
    ]
