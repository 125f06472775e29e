"""What a run has saved and does not find again is refused with the remedy; it never means a silent begin at step 0."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.runs import headway, make_stores, tiny_settings

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import newest_good, open_checkpoint, step_folders
from headway.checkpoint.retention import RunScope, retain
from headway.checkpoint.saver import SaveJob, Saver
from headway.config.load import load
from headway.track.metrics_file import read_metrics
from headway.train.config import Recipe
from headway.train.run import Run
from headway.train.run_folder import SAVED, read_save_record


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds stores and a run of 6 steps with checkpoints of 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("pieces")
    make_stores(folder)
    done = headway("train", *settings(folder), "steps=6")
    assert done.returncode == 0, done.stderr
    return folder


def settings(folder: Path) -> list[str]:
    return [
        *tiny_settings(folder, "run"),
        "checkpoint.every=2",
        "checkpoint.keep_last=3",
        "eval.every=null",
    ]


@pytest.fixture
def workspace(trained: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged; its data stays where it is."""
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=True)
    for name in ("store0", "store1"):
        (tmp_path / name).symlink_to(trained / name)
    return tmp_path


def begin_again(workspace: Path, *more: str, steps: int = 8) -> tuple[int, str]:
    of = [*settings(workspace), f"data.train=[{(workspace / 'store0').resolve()}]"]
    again = headway("train", *of, f"steps={steps}", *more)
    return again.returncode, again.stderr


def assert_refused(workspace: Path, *expected: str) -> None:
    before = sorted(path.name for path in (workspace / "run").iterdir())
    code, said = begin_again(workspace)
    assert code == 2, said
    assert len(said.strip().splitlines()) == 1, said
    for text in expected:
        assert text in said
    assert sorted(path.name for path in (workspace / "run").iterdir()) == before


def test_checkpoints_without_a_recipe_are_refused_and_never_sets_them_aside(
    workspace: Path,
) -> None:
    (workspace / "run" / "recipe.yaml").unlink()
    assert_refused(workspace, "step-00000006", "recipe.yaml is missing", "--resume never")
    code, said = begin_again(workspace, "--resume", "never", steps=4)
    assert code == 0, said
    assert [step["step"] for step in read_metrics(workspace / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
    ]
    assert [path.name for path in step_folders(workspace / "run.old-1" / "checkpoints")] == [
        f"step-{n:08}" for n in (2, 4, 6)
    ]


def test_a_run_that_was_copied_with_links_followed_resumes_and_has_its_links_again(
    trained: Path, tmp_path: Path
) -> None:
    shutil.copytree(trained / "run", tmp_path / "run", symlinks=False)
    for name in ("store0", "store1"):
        (tmp_path / name).symlink_to(trained / name)
    latest = tmp_path / "run" / "checkpoints" / "latest"
    assert not latest.is_symlink()
    assert latest.is_dir()
    code, said = begin_again(tmp_path)
    assert code == 0, said
    lines = [line for line in said.splitlines() if "links again" in line]
    assert len(lines) == 1
    assert str(latest.parent) in lines[0]
    assert "latest" in lines[0]
    assert "failed" not in said
    assert str(latest.readlink()) == "step-00000008"
    code, said = begin_again(tmp_path, steps=9)
    assert code == 0
    assert "links again" not in said


@pytest.mark.parametrize("damage", ["gone", "empty", "dangling", "newest gone"])
def test_saved_checkpoints_that_are_not_there_are_refused(workspace: Path, damage: str) -> None:
    checkpoints = workspace / "run" / "checkpoints"
    if damage == "newest gone":
        shutil.rmtree(checkpoints / "step-00000006")
    else:
        shutil.rmtree(checkpoints)
    if damage == "empty":
        checkpoints.mkdir()
    if damage == "dangling":
        checkpoints.symlink_to(workspace / "not-mounted")
        assert_refused(workspace, "is a link to", "not-mounted", "Mount or restore it")
    else:
        assert_refused(
            workspace,
            "the checkpoint of step 6 was saved in",
            "is missing",
            "Mount or restore it",
            "--resume never",
        )
    if damage == "newest gone":
        code, said = begin_again(workspace, "--resume", str(checkpoints / "step-00000004"))
        assert code == 0, said
        assert read_save_record(workspace / "run").step == 8  # type: ignore[union-attr]


def test_a_run_folder_of_which_only_parts_came_back_is_refused(workspace: Path) -> None:
    for name in ("recipe.yaml", "saved.json"):
        (workspace / "run" / name).unlink()
    shutil.rmtree(workspace / "run" / "checkpoints")
    assert_refused(workspace, "metrics.jsonl is of an earlier run", "recipe.yaml is missing")


def test_a_damaged_record_blocks_nothing(workspace: Path) -> None:
    content = bytearray((workspace / "run" / SAVED).read_bytes())
    content[-5] ^= 1
    (workspace / "run" / SAVED).write_bytes(content)
    code, said = begin_again(workspace)
    assert code == 0, said
    assert "saved.json is damaged" in said
    assert read_save_record(workspace / "run").step == 8  # type: ignore[union-attr]


def test_a_run_folder_removed_under_way_is_whole_again_after_the_next_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saver = Saver(tmp_path / "run" / "checkpoints", CheckpointConfig())
    told: list[int] = []
    session = SimpleNamespace(callbacks=SimpleNamespace(saved=lambda step, _: told.append(step)))
    run = SimpleNamespace(
        start=SimpleNamespace(folder=tmp_path / "run"),
        saver=saver,
        recipe=Recipe(),
        session=session,
        control=SimpleNamespace(steps_before=0),
        checkpoints=saver.checkpoints,
    )
    Run._record_saves(cast(Any, run))
    saver.save(SaveJob(3, {}), [])
    saver.wait()
    assert told == [3]
    assert load(Recipe, tmp_path / "run" / "recipe.yaml") == Recipe()
    assert "was removed during the run" in caplog.text
    saved = read_save_record(tmp_path / "run")
    newest = newest_good(saver.checkpoints).reader
    assert saved is not None
    assert newest is not None
    assert (saved.run, saved.step) == (newest.run, newest.step) == (saver.run, 3)


def test_old_checkpoints_of_higher_steps_are_neither_taken_nor_do_new_ones_go_for_them(
    workspace: Path, tmp_path: Path
) -> None:
    old = workspace / "run" / "checkpoints"
    code, said = begin_again(workspace, "--resume", "never", "run.name=new", steps=4)
    assert code == 0, said
    new = workspace / "new" / "checkpoints"
    # e.g. a disk that was mounted late
    shutil.copytree(old / "step-00000006", new / "step-00000006")
    run_scope = RunScope(open_checkpoint(new / "step-00000004").run, 4)
    assert retain(new, CheckpointConfig(keep_last=1, keep_best=0), run_scope) == [
        new / "step-00000002"
    ]
    newest = newest_good(new, run_scope.run)
    assert newest.reader is not None
    assert newest.reader.step == 4
    assert "another run" in newest.rejected[0][1]
