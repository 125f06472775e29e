"""A stop ends the whole command: no part follows the one that was stopped, and the same command continues where it was."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.config.load import load
from headway.errors import Terminated
from headway.train import train
from headway.train.config import Recipe
from headway.workflows.demo import run as demo
from headway.workflows.sparsify import SparsifyPlan, sparsify
from headway.workflows.stopping import stop_code

TINY = [
    "model={hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 24, max_seq_len: 64}",
    "data.seq_len=32",
    "batch.rows=2",
    "device=cpu",
]


def test_a_signal_at_the_end_of_a_stage_begins_no_next_one(tmp_path: Path) -> None:
    recipe = load(
        Recipe,
        None,
        [*TINY, f"run.dir={tmp_path}", "stages=[{name: one, steps: 2}, {name: two, steps: 2}]"],
    )

    @contextmanager
    def hook(run: Any) -> Iterator[None]:
        yield
        os.kill(os.getpid(), signal.SIGTERM)  # the stage has written its model

    with pytest.raises(Terminated) as stopped:
        train(recipe, hook=hook)
    assert stopped.value.exit_code == 143
    assert [path.name for path in (tmp_path / "run" / "stages").iterdir()] == ["01-one"], (
        "the second stage is not even prepared"
    )
    summary = train(recipe)
    assert summary["steps"] == 4
    assert (tmp_path / "run" / "stages" / "02-two").is_dir()


def test_headway_stop_ends_the_demo_and_not_only_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []
    for name in (
        "make_corpus",
        "make_tokenizer",
        "make_store",
        "make_instructions",
        "evaluate",
        "fine_tune",
    ):
        monkeypatch.setattr(demo, name, lambda _, name=name: begun.append(name) or {})
    monkeypatch.setattr(
        "headway.train.train",
        lambda recipe: {"run": str(recipe.run.folder), "stopped_by": "headway stop", "steps": 3},
    )
    assert main(["demo", "--out", str(tmp_path / "demo")]) == 143
    assert begun == ["make_corpus", "make_tokenizer", "make_store", "make_instructions"]
    assert "headway stop ended" in capsys.readouterr().err


def test_a_signal_at_the_very_end_of_training_ends_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [stop_code(summary) for summary in ({}, {"exit_code": 130}, {"signal_after_end": "SIGINT"}, {"signal_after_end": "SIGTERM"})] == [
        None, 130, 130, 143,
    ]  # fmt: skip
    recipe = load(Recipe, None, [*TINY, f"run.dir={tmp_path}"])
    monkeypatch.setattr("headway.workflows.sparsify.check", lambda *_: None)
    assert (
        sparsify(recipe, SparsifyPlan(), train=lambda _: {"signal_after_end": "SIGINT", "steps": 9})
        == 130
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.drill
def test_the_demo_stops_at_ctrl_c_and_at_sigterm_and_continues(tmp_path: Path) -> None:
    metrics = tmp_path / "demo" / "runs" / "pretrain" / "metrics.jsonl"
    seen = 0
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        command = [sys.executable, "-m", "headway", "demo", "--out", str(tmp_path / "demo")]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
            deadline = time.monotonic() + 300
            while time.monotonic() < deadline and process.poll() is None:
                if metrics.exists() and metrics.read_text().count("\n") > seen + 3:
                    break
                time.sleep(0.1)
            process.send_signal(number)
            _, said = process.communicate(timeout=120)
        assert process.returncode == code, said
        assert "[6/10]" not in said
        assert "Traceback" not in said
        steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
        assert steps == list(range(1, len(steps) + 1)) and len(steps) > seen, (
            "it continued, and each step is there once"
        )
        seen = len(steps)
