"""The notebooks of the cookbook run from their first cell to their last: as plain Python, and in a kernel where nbclient is installed."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import guide_workspace

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples/cookbook").glob("*.ipynb"))
SMALL = {
    "style": {"EXAMPLES": 12, "QUESTIONS": 2, "EPOCHS": 1},
    "distil": {"STEPS": 2},
}
"""Parameters that make a notebook a matter of seconds."""


def cells(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["cells"]


def small_source(path: Path, cell: dict[str, Any]) -> str:
    """The code of a cell; that of the parameters with small values after it."""
    source = "".join(cell["source"])
    if "parameters" in cell["metadata"].get("tags", ()):
        source += "".join(f"\n{name} = {value}" for name, value in SMALL[path.stem].items())
    return source


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_its_parameters_exist(path: Path) -> None:
    codes = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in codes)
    parameters = "".join(codes[0]["source"])
    for name in SMALL[path.stem]:
        assert f"{name} = " in parameters
    for cell in codes:
        compile("".join(cell["source"]), path.name, "exec")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The small world of the guides, which has what `headway demo` leaves."""
    folder = tmp_path_factory.mktemp("notebooks") / "world"
    here = Path.cwd()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_CACHE_HOME", str(folder.parent / "cache"))
        patched.syspath_prepend(str(ROOT / "examples" / "my_lab"))
        guide_workspace.build(folder)
        patched.chdir(here)
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_plain_python(
    path: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide_workspace.copy_to(world, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    names: dict[str, Any] = {}
    for cell in cells(path):
        if cell["cell_type"] == "code":
            exec(compile(small_source(path, cell), path.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_a_kernel_with_a_live_chart(
    path: Path, world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    guide_workspace.copy_to(world, tmp_path / "here")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell, stored in zip(notebook.cells, cells(path), strict=True):
        if cell.cell_type == "code":
            cell.source = small_source(path, stored)
    client = nbclient.NotebookClient(
        notebook, timeout=240, resources={"metadata": {"path": str(tmp_path / "here")}}
    )
    client.execute()
    html = [
        output.get("data", {}).get("text/html", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
    ]
    assert any("<svg" in text for text in html)
