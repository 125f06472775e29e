"""A pipe in place of a file that a user names, or of any file of a run folder, is refused or passed over: nobody waits for a writer."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
from support.runs import headway, make_stores, tiny_settings

from headway.config.load import load
from headway.errors import HeadwayError
from headway.infer.load import load_model
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
    files = [
        path.relative_to(whole)
        for path in sorted(whole.rglob("*"))
        if path.is_file() and path.resolve() == path
    ]
    assert len(files) > 10
    for file in files:
        copy = tmp_path / "copies" / "run"
        shutil.copytree(whole, copy, symlinks=True)
        (copy / file).unlink()
        os.mkfifo(copy / file)
        if file.parts[0] == "final":
            with suppress(HeadwayError):
                load_model(copy)
        else:
            with suppress(HeadwayError):
                train(recipe(copy.parent, 3))
        shutil.rmtree(copy.parent)
