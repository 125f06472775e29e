"""A store that fails costs the saves it fails and nothing else: training goes on, the old checkpoint stays, the alert is told."""

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.runs import assert_same_run, deterministic, headway, make_stores, write_recipe

from headway.checkpoint import save as save_module
from headway.checkpoint.load import newest_good
from headway.config.load import load
from headway.train import train
from headway.train.config import Recipe

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="needs to mount a small file system")


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_stores(tmp_path_factory.mktemp("stores"))


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    folder.mkdir(parents=True)
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        check=False,
        capture_output=True,
    ).returncode:
        pytest.skip("this machine does not let us mount a small file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def alerts(folder: Path) -> tuple[str, Any]:
    """An alert tracker whose messages are kept in a file, and a function that reads them."""
    said = folder / "said.jsonl"
    script = folder / "say.sh"
    script.write_text(f"#!/bin/sh\ncat >> {said}; echo >> {said}\n")
    script.chmod(0o755)
    setting = f"track=[{{kind: alert, form: command, command: [{script}], events: [save_failure], every_seconds: 0}}]"
    return setting, lambda: [json.loads(line) for line in said.read_text().splitlines()]


@needs_mount
def test_a_full_disk_fails_the_saves_and_training_goes_on_with_the_old_checkpoint_kept(
    stores: list[Path], tmp_path: Path
) -> None:
    setting, said = alerts(tmp_path)
    with small_disk(tmp_path / "disk", "3m") as disk:
        recipe = write_recipe(tmp_path, stores, name="full", steps=60)
        wide = [
            "model.hidden_size=64",
            "model.ffn_size=128",
            "checkpoint.every=5",
            "checkpoint.keep_last=9",
            f"run.dir={disk}",
            setting,
        ]
        done = headway("train", str(recipe), *wide)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        assert "the last save failed" in done.stderr.splitlines()[-1]
        assert len(deterministic(disk / "full" / "metrics.jsonl")) == 60, (
            "training went on to its end"
        )
        kept = sorted((disk / "full" / "checkpoints").glob("step-*"))
        assert kept
        assert newest_good(disk / "full" / "checkpoints").path == kept[-1]
        told = said()
        assert len(told) == 12 - len(kept), "every failed save is told"
        assert all(
            alert["event"] == "save_failure" and "the disk is full" in alert["text"]
            for alert in told
        )
        assert "saves in a row" in told[-1]["text"]


@needs_mount
def test_a_store_that_turns_read_only_for_a_while_loses_nothing(
    stores: list[Path], tmp_path: Path
) -> None:
    setting, said = alerts(tmp_path)
    whole = write_recipe(tmp_path, stores, name="whole", steps=20)
    train(load(Recipe, whole))
    recipe = load(Recipe, write_recipe(tmp_path, stores, name="run", steps=20), [setting])
    with small_disk(tmp_path / "runs" / "run" / "checkpoints", "8m") as disk:

        def watch(run: Any) -> Any:
            def after_step(step: int) -> None:
                if step in (7, 13):
                    run.saver.wait()
                    subprocess.run(
                        ["mount", "-o", f"remount,{'ro' if step == 7 else 'rw'}", str(disk)],
                        check=True,
                    )

            run.on_step(after_step)
            return __import__("contextlib").nullcontext()

        train(recipe, hook=watch)
        assert_same_run(tmp_path / "runs" / "whole", tmp_path / "runs" / "run", 20)
        assert [path.name for path in sorted(disk.glob("step-*"))] == [
            "step-00000005",
            "step-00000015",
            "step-00000020",
        ]
    (told,) = said()
    assert told["step"] == 10
    assert "step 10 was not saved" in told["text"]
    assert "read-only" in told["text"]


def test_a_last_save_that_fails_ends_the_run_with_an_error_and_the_next_start_goes_on(
    stores: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load(Recipe, write_recipe(tmp_path, stores, name="run", steps=12))

    def breaks(descriptor: int) -> None:
        if (tmp_path / "runs" / "run" / "checkpoints" / "step-00000010").exists():
            raise OSError(errno.EIO, "Input/output error")
        os.fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "fsync_file", breaks)
        with pytest.raises(
            Exception, match=r"the last save failed: .*Input/output error.* is of step 10"
        ):
            train(recipe)
    assert not (tmp_path / "runs" / "run" / "summary.json").exists()
    assert train(recipe)["steps"] == 12
