"""Signals: a terminal that closes saves a run; `train()` in a program of one's own does not swallow what stops it; the demo ends."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.foreground_signals import heeded_signals
from support.runs import make_stores, start_headway, tiny_settings, wait_for_step

from headway.config.load import load
from headway.errors import Interrupted
from headway.train import train
from headway.train.config import Recipe
from headway.train.run import Run
from headway.workflows.demo.run import run_demo


def soon(run: Path, step: int, act: Callable[[], object]) -> threading.Thread:
    """Do something once a run has come to a step."""

    def work() -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            if (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes().count(
                b"\n"
            ) >= step:
                act()
                return
            time.sleep(0.01)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def recipe(folder: Path) -> Recipe:
    make_stores(folder)
    return load(Recipe, None, [*tiny_settings(folder, "run"), "steps=100000"])


def saved(run: Path) -> bool:
    return (run / "checkpoints" / "latest" / "manifest.json").exists()


def test_ctrl_c_saves_and_then_raises(tmp_path: Path) -> None:
    soon(tmp_path / "run", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(Interrupted) as caught:
        train(recipe(tmp_path))
    assert saved(tmp_path / "run")
    assert isinstance(caught.value, KeyboardInterrupt)
    assert caught.value.run == str(tmp_path / "run")
    assert caught.value.summary["steps"] >= 2


def test_ctrl_c_that_comes_after_the_last_step_ends_a_sweep_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.train import loop

    def finish(run: Run, stopped_by: str | None) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGINT)
        return finish_as_usual(run, stopped_by)

    finish_as_usual = loop.finish
    monkeypatch.setattr(loop, "finish", finish)
    with pytest.raises(Interrupted, match="complete") as caught:
        train(recipe(tmp_path).model_copy(update={"steps": 2}))
    assert "stopped_by" not in caught.value.summary
    assert (tmp_path / "run" / "final").is_dir()


SWEEP = """
import sys
from headway.config.load import load
from headway.train import train
from headway.train.config import Recipe

for name in ("a", "b"):
    train(load(Recipe, None, [*sys.argv[1:], f"run.name={name}", "steps=100000"]))
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.drill)],
)
def test_a_signal_ends_a_whole_sweep(tmp_path: Path, number: signal.Signals, code: int) -> None:
    make_stores(tmp_path)
    (tmp_path / "sweep.py").write_text(SWEEP)
    command = [sys.executable, str(tmp_path / "sweep.py"), *tiny_settings(tmp_path, "run")]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    wait_for_step(tmp_path / "a" / "metrics.jsonl", 2, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert saved(tmp_path / "a")
    assert not (tmp_path / "b").exists()
    assert "Traceback" not in errors
    assert f"stopped by {number.name} after step" in errors


def test_sigterm_reaches_the_handler_that_was_there(tmp_path: Path) -> None:
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: got.append(number))
    try:
        soon(tmp_path / "run", 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        summary = train(recipe(tmp_path))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert got == [signal.SIGTERM]
    assert summary["stopped_by"] == "SIGTERM"
    assert saved(tmp_path / "run")


def test_ctrl_c_ends_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from headway.workflows.demo import run as demo

    stages: list[str] = []

    def pretrain(_: object) -> dict[str, object]:
        stages.append("pretrain")
        soon(tmp_path / "run", 2, lambda: os.kill(os.getpid(), signal.SIGINT))
        train(recipe(tmp_path))
        return {}

    for name in ("make_corpus", "make_tokenizer", "make_store", "make_instructions"):
        monkeypatch.setattr(demo, name, lambda _: {})
    monkeypatch.setattr(demo, "pretrain", pretrain)
    monkeypatch.setattr(demo, "evaluate", lambda _: stages.append("evaluate"))
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo")
    assert stages == ["pretrain"]


def test_a_terminal_that_closes_saves_the_run(tmp_path: Path) -> None:
    make_stores(tmp_path)
    with heeded_signals():  # which a process forked now inherits
        process = start_headway("train", *tiny_settings(tmp_path, "run"), "steps=100000")
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 2, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 128 + signal.SIGHUP
    assert saved(tmp_path / "run")


def test_nohup_keeps_a_run_from_stopping(tmp_path: Path) -> None:
    make_stores(tmp_path)
    # what a process forked now inherits, as from nohup
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = start_headway("train", *tiny_settings(tmp_path, "run"), "steps=40")
    finally:
        signal.signal(signal.SIGHUP, before)
    wait_for_step(tmp_path / "run" / "metrics.jsonl", 2, process)
    process.send_signal(signal.SIGHUP)
    assert process.wait() == 0


def test_every_start_keeps_its_command_and_a_healthy_run_has_no_crash(tmp_path: Path) -> None:
    from support.runs import headway

    make_stores(tmp_path)
    for steps in (2, 3):
        assert headway("train", *tiny_settings(tmp_path, "run"), f"steps={steps}").returncode == 0
    logs = tmp_path / "run" / "logs"
    commands = [(logs / "starts" / name / "command.txt").read_text() for name in ("0001", "0002")]
    assert "steps=2" in commands[0]
    assert "steps=3" in commands[1]
    assert (tmp_path / "run" / "command.txt").read_text() == commands[1]
    assert json.loads((logs / "starts" / "0001" / "environment.json").read_text())["packages"][
        "torch"
    ]
    assert not (logs / "crash.json").exists()
