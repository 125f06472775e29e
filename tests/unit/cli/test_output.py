"""Tables for people: whole where nobody counts columns, folded where a terminal is narrow, and no number is ever cut in two."""

import pytest

from headway.cli._output import print_table

LONG = "a/path/that/is/much/too/long/for/a/narrow/terminal/and/goes/on"
COLUMNS = ("variant", "streaming heads", "cache bytes", "where")
ROWS = [("full", "0.0%", "8,388,608", LONG), ("random s=0.3", "37.5%", "5,660,672", "x")]


def shown(capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_table(COLUMNS, ROWS)
    return capsys.readouterr().out.splitlines()


def test_a_piped_table_has_one_line_a_row(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    lines = shown(capsys)
    assert len(lines) == 1 + len(ROWS)
    for line, row in zip(lines, (COLUMNS, *ROWS), strict=True):
        assert all(cell in line for cell in row)


@pytest.mark.parametrize("columns", [20, 40, 70, 200])
def test_no_number_is_cut_in_two_however_narrow_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = shown(capsys)
    text = "\n".join(lines)
    for cell in ("8,388,608", "5,660,672", "random s=0.3", "37.5%", "streaming", "bytes"):
        assert cell in text
    assert (LONG in text) == (columns == 200)
    if columns >= 70:
        assert max(map(len, lines)) <= columns


def test_a_table_without_rows_is_its_headings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(COLUMNS, [])
    assert capsys.readouterr().out.split() == " ".join(COLUMNS).split()


def test_brackets_in_cells_are_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(("key", "value"), [("adapter.targets", "[q_proj, v_proj]")], title="[bold]")
    assert "[q_proj, v_proj]" in (out := capsys.readouterr().out)
    assert "[bold]" in out
