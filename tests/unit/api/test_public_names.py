"""`import headway as hw`: exactly the public names, without torch, whatever is imported first; results show themselves."""

import inspect
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import headway as hw
from headway.api.results import loss_table
from headway.api.table import as_html, as_text

ORDERS = """
import sys
{first}
import headway as hw
assert hw.train.__module__ == "headway.api.training" and hw.export.__module__ == "headway.api.models", (hw.train, hw.export)
import headway.train.config
import headway.export.adapter
import headway.train.control as control
assert hw.train.__module__ == "headway.api.training" and callable(hw.export)
assert headway.train.config.Recipe is hw.Recipe and control.Control and headway.export.adapter.export_adapter
from headway.train import dry_run, train
assert sys.modules["headway.train"].train is train is not hw.train
"""


@pytest.mark.parametrize(
    "first", ["", "import headway.train.loop", "from headway import train, export"]
)
def test_functions_and_packages_of_the_same_name_do_not_replace_each_other(first: str) -> None:
    pid = os.fork()
    if (
        pid == 0
    ):  # torch is loaded already; headway is imported afresh, but for its operations, which torch knows once
        for name in [
            name
            for name in sys.modules
            if name.split(".")[0] == "headway" and not name.startswith("headway.kernels")
        ]:
            del sys.modules[name]
        try:
            exec(ORDERS.format(first=first), {})
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_import_loads_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, headway as hw; dir(hw); print({'torch', 'pydantic', 'numpy'} & {*sys.modules})"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "set()\n"
    )
    code = "import sys, headway as hw; hw.train, hw.Recipe, hw.Interrupted; print('torch' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )


def test_exactly_the_public_names_exist_and_have_documentation() -> None:
    assert sorted(hw.__all__) == hw.__all__
    assert set(hw.__all__) <= set(dir(hw))
    for name in hw.__all__:
        member = getattr(hw, name)
        assert isinstance(member, str) or (
            (inspect.getdoc(member) or "").count("\n") >= 0
            and len(inspect.getdoc(member) or "") > 20
        ), name
    functions = [name for name in hw.__all__ if inspect.isfunction(getattr(hw, name))]
    assert functions == ["evaluate", "export", "load_model", "score", "tokenize", "train"]
    assert all("Example:" in (inspect.getdoc(getattr(hw, name)) or "") for name in functions)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hw.nothing  # pyright: ignore[reportAttributeAccessIssue]


def test_the_page_names_every_public_name() -> None:
    page = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    assert [name for name in hw.__all__ if f"`hw.{name}" not in page] == []


def test_a_table_is_printed_in_columns_and_read_by_row_or_column() -> None:
    table = hw.ResultTable(("data", "loss", "tokens"), (("wiki", 2.5, 1200), ("code", None, 7)))
    assert str(table) == "data   loss  tokens\nwiki  2.500   1,200\ncode              7"
    assert len(table) == 2
    assert table.column("tokens") == [1200, 7]
    assert [row["tokens"] for row in table] == [1200, 7]


def test_a_result_prints_only_what_is_known() -> None:
    assert as_text("run a", {"steps": 3, "model": None}) == "run a\n  steps  3"


def test_html_of_a_result_escapes_every_text() -> None:
    html = as_html("<script>", {"a&b": "<i>"}, hw.ResultTable(("<x>",), (("<y>",),)))
    tags = {part + ">" for part in html.split(">")}
    assert not {"<script>", "<i>", "<x>", "<y>"} & tags
    assert "&lt;script&gt;" in html


def test_the_table_of_losses_is_small(tmp_path: Path) -> None:
    assert len(loss_table(tmp_path)) == 0
    lines = [f'{{"step": {step}, "loss": {step}.0}}' for step in range(1, 1001)]
    lines[999] = '{"step": 1000, "loss": 1000.0, "valid": {"valid": {"loss": 3.5}}}'
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    table = loss_table(tmp_path)
    assert table.columns == ("step", "loss", "valid")
    assert len(table) == 20
    assert table.rows[0] == (1, 1.0, None)
    assert table.rows[-1][0] == 1000
    assert table.rows[-1][2] == 3.5
    before = table.rows[-2][0]
    last = table.rows[-1]
    assert isinstance(before, int)
    assert last[1] == sum(range(before + 1, 1001)) / (1000 - before)
