"""A pipe in place of a file that a user names, or of any file of a run folder, is refused or passed over: nobody waits for a writer."""

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.rollout_runs import rollout_recipe, write_rollout_inputs
from support.runs import headway, make_stores, tiny_settings

from headway.config.load import load
from headway.config.regular_file import NOT_A_FILE
from headway.errors import HeadwayError
from headway.infer.load import load_model
from headway.rollout.journal import FILE
from headway.store.reader import open_store
from headway.train import train
from headway.train.config import Recipe

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    "command",
    [("train",), ("plan",), ("config", "show"), ("config", "import", "--from", "axolotl")],
    ids=" ".join,
)
def test_a_recipe_is_a_regular_file(tmp_path: Path, command: tuple[str, ...]) -> None:
    pipe = tmp_path / "recipe.yaml"
    os.mkfifo(pipe)
    done = headway(*command, str(pipe), timeout=60)
    assert done.returncode == 2
    assert "recipe.yaml: cannot be read" in done.stderr
    assert "is a device or a pipe; a file is expected" in done.stderr


def test_no_file_of_a_run_folder_is_waited_for(tmp_path: Path) -> None:
    make_stores(tmp_path)

    def recipe(folder: Path, steps: int) -> Recipe:
        settings = [*tiny_settings(tmp_path, "run"), f"run.dir={folder}", f"steps={steps}"]
        return load(Recipe, None, settings)

    whole = tmp_path / "run"
    train(recipe(tmp_path, 2))
    for copy in copies_with_a_pipe(whole, tmp_path / "copies"):
        if copy.file.parts[0] == "final":
            with suppress(HeadwayError):
                load_model(copy.run)
        else:
            with suppress(HeadwayError):
                train(recipe(copy.run.parent, 3))


def test_no_file_of_a_store_is_waited_for(tmp_path: Path) -> None:
    store, _ = make_stores(tmp_path)

    for copy in copies_with_a_pipe(store, tmp_path / "copies"):
        with suppress(HeadwayError):
            opened = open_store(copy.run)
            for number in range(len(opened)):
                opened.document(number)


@pytest.mark.slow
def test_no_file_of_a_run_with_rollouts_is_waited_for(tmp_path: Path) -> None:
    write_rollout_inputs(tmp_path, prompts=6)

    def recipe(folder: Path, steps: int) -> Recipe:
        settings = [f"run.dir={folder}", f"steps={steps}", "rollout.prompts=2"]
        return rollout_recipe(tmp_path, "run", *settings, "rollout.samples=2")

    whole = tmp_path / "run"
    train(recipe(tmp_path, 1))
    assert (whole / FILE).is_file()
    for copy in copies_with_a_pipe(whole, tmp_path / "copies", leave_out="final"):
        with suppress(HeadwayError, OSError):
            train(recipe(copy.run.parent, 2))
        if copy.file == Path(FILE):
            report = headway("rollouts", str(copy.run), timeout=60)
            assert report.returncode == 2
            assert report.stderr.endswith(f"{FILE}: {NOT_A_FILE}.\n")
            assert report.stderr.count("\n") == 1


@dataclass(frozen=True)
class CopyWithPipe:
    """A copy of a folder in which one file is a pipe."""

    run: Path
    file: Path


def copies_with_a_pipe(
    whole: Path, folder: Path, *, leave_out: str | None = None
) -> Iterator[CopyWithPipe]:
    """A copy for every file of a folder, one at a time; `leave_out`: a folder inside it."""
    files = [
        path.relative_to(whole)
        for path in sorted(whole.rglob("*"))
        if path.is_file() and path.resolve() == path
    ]
    files = [file for file in files if file.parts[0] != leave_out]
    assert len(files) > 2
    for file in files:
        copy = folder / "run"
        shutil.copytree(whole, copy, symlinks=True)
        (copy / file).unlink()
        os.mkfifo(copy / file)
        yield CopyWithPipe(copy, file)
        shutil.rmtree(folder)
