"""Shared by all tests: few threads, bf16 products that work, no waiting for disks, and no GPU unless its tests were asked for."""

import contextlib
import gc
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SLOW_COLLECTION_SECONDS = 0.02


class Freezer:
    """Every small run collects garbage; looking at what was imported since the last freeze takes longer than the run.

    A collection that took long asks for another freeze, which happens after the test, when only what stays is alive.
    """

    def __init__(self) -> None:
        self.began = 0.0
        self.is_due = False

    def notice(self, phase: str, info: dict[str, Any]) -> None:
        if phase == "start":
            self.began = time.perf_counter()
        elif info["generation"] == 2 and time.perf_counter() - self.began > SLOW_COLLECTION_SECONDS:
            self.is_due = True

    def freeze(self) -> None:
        gc.collect()
        gc.freeze()
        self.is_due = False


FREEZER = Freezer()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skipped-to",
        metavar="FILE",
        help="write the names of the tests that were skipped, one a line: pytest @FILE runs them",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Before any test uses torch."""
    # A shell starts background jobs with SIGINT ignored, and so would every process that a test starts and interrupts. SIGHUP stays as it
    # is: nohup protects the whole test run with it.
    if (
        signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        and threading.current_thread() is threading.main_thread()
    ):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if "not gpu" in config.option.markexpr:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from headway.runtime.device import avoid_broken_amx

    avoid_broken_amx()
    # Written pages outlive a killed process, so only a machine that loses power would see the difference. A test that watches or fails
    # this call puts its own in this place; fresh interpreters have the real one.
    os.fsync = lambda descriptor: None
    if not hasattr(config, "workerinput"):
        # Every run asks git whether files changed. In a fresh clone git reads all of them each time, until this has noted that none did.
        with contextlib.suppress(OSError):
            subprocess.run(
                ["git", "status", "--porcelain"],
                cwd=config.rootpath,
                capture_output=True,
                check=False,
            )


def pytest_collection_finish() -> None:
    """What was imported until here stays."""
    FREEZER.freeze()
    gc.callbacks.append(FREEZER.notice)


def pytest_runtest_logfinish() -> None:
    """After a test in which a collection was slow, when its fixtures are gone."""
    if FREEZER.is_due:
        FREEZER.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """For `--skipped-to`, in the one process that hears of all tests."""
    target = config.getoption("--skipped-to")
    if target is None:
        return
    names = {report.nodeid for report in terminalreporter.stats.get("skipped", [])}
    Path(target).write_text("".join(f"{name}\n" for name in sorted(names)), encoding="utf-8")
