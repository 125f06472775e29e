"""One HTML file, and the terminal."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from support.board_runs import make_run, unpack

import headway
from headway.board.open import open_sources
from headway.board.report import write_html_report
from headway.board.server import VENDORED
from headway.board.terminal import braille_plot, screen, show_once
from headway.board.watch import Board, LocalSource
from headway.cli import main

EVIL_NAME = "</script><script>alert(1)<"


@pytest.fixture
def report(tmp_path: Path) -> str:
    """The HTML file of two runs, one with a hostile name and a picture, the other with a rate of 0.5."""
    evil = make_run(tmp_path / "runs" / EVIL_NAME, 50)
    (evil / "eval").mkdir()
    (evil / "eval" / "report.md").write_text("![plot](plot.png)\n")
    (evil / "eval" / "plot.png").write_bytes(b"\x89PNG")
    two = make_run(tmp_path / "runs" / "two", 30, lr=0.5)
    out = tmp_path / "deep" / "report.html"
    written = write_html_report(open_sources([str(evil), str(two)]), out)
    page = out.read_text(encoding="utf-8")
    assert written["bytes"] == len(page.encode())
    return page


def test_a_report_loads_nothing_from_elsewhere(report: str) -> None:
    page_alone = report
    for name in VENDORED:
        library = (Path(headway.__file__).parent / "vendor" / name).read_text(encoding="utf-8")
        assert library in report, name
        page_alone = page_alone.replace(library, "")
    assert not re.search(r'(src|href)="(?!data:)', report)
    assert "http://" not in page_alone.replace("http://www.w3.org", "")


def test_a_report_runs_its_own_script_and_no_other(report: str) -> None:
    assert "<script>alert" not in report
    scripts = re.findall(r"<script>(.*?)</script>", report, re.DOTALL)
    assert len(scripts) == 1
    checksum = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{checksum}'" in report
    assert "default-src 'none'" in report


def test_a_report_holds_curves_settings_and_pictures_of_its_runs(
    report: str, tmp_path: Path
) -> None:
    data = json.loads(re.findall(r'id="embedded">(.*?)</script>', report, re.DOTALL)[0])
    assert {run["name"] for run in data["runs"]} == {EVIL_NAME.rpartition("/")[2], "two"}
    assert len(data["runs"]) == 2
    (identity,) = (run["id"] for run in data["runs"] if run["name"] == "two")
    stored = unpack(base64.b64decode(data["curves"][identity]["step"]))
    curves = {curve["metric"]: curve for curve in stored}
    metrics = (tmp_path / "runs" / "two" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in metrics.splitlines()]
    assert curves["loss"]["y"] == tuple(record["loss"] for record in records)
    assert data["details"][identity]["config"]["optim.lr"] == 0.5
    pictures = list(data["pictures"].values())
    assert {"eval/plot.png": "data:image/png;base64,iVBORw=="} in pictures


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_terminal_shows_runs_at_any_width(tmp_path: Path, width: int) -> None:
    make_run(tmp_path / "runs" / "a-run-with-quite-a-long-name\x1b[31m", 50)
    with Board([LocalSource(tmp_path / "runs")]) as board:
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        show_once(board, console, 5.0)
        text = console.export_text()
        console.file.close()
    assert "50/50" in text
    assert "done" in text
    assert "loss" in text
    assert "\x1b" not in text
    assert ("memory" in text) == (width == 160)
    assert max(len(line) for line in text.splitlines()) <= width


def test_the_terminal_shows_a_validation_loss_that_the_last_record_does_not_have(
    tmp_path: Path,
) -> None:
    metrics = make_run(tmp_path / "runs" / "a", 50) / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    records = [json.loads(line) for line in lines]
    records[20]["valid"] = {"valid": {"loss": 4.321}}
    for record in records[21:]:
        record.pop("valid", None)
    metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    with Board([LocalSource(tmp_path / "runs")]) as board:
        console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        show_once(board, console, 5.0)
        text = console.export_text()
        console.file.close()
    assert "4.321" in text


def test_a_plot_of_nothing_is_blank() -> None:
    assert braille_plot([], 4, 2) == [[(" ", -1)] * 4] * 2


def test_a_plot_of_one_point_shows_it() -> None:
    import numpy as np

    rows = braille_plot([(np.array([1.0]), np.array([2.0]))], 4, 2)
    assert sum(cell != " " for row in rows for cell, _ in row) >= 1


def test_a_screen_without_runs_says_so() -> None:
    board = Board([LocalSource(Path("/nonexistent"))])
    assert "no runs" in str(screen(board, 80, 24))
    board.close()


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "runs" / "one", 5)


@pytest.mark.parametrize("words", [["board", "--list", "--json"], ["top", "--json"]], ids=" ".join)
def test_board_and_top_list_runs_as_json(
    words: list[str], run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    verb, *options = words
    assert main([verb, str(run_folder.parent), *options]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["name"], row["state"], row["step"]) == ("one", "done", 5)


def test_report_prints_its_runs_as_json(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_folder), "--out", str(tmp_path / "r.html"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == ["one"]


def test_top_prints_the_steps_of_runs(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", str(run_folder.parent)]) == 0
    assert "5/5" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["board", "nothing"], "does not exist"),
        (["top", "r.html"], "is not a folder"),
        (["report", "empty"], "no runs there"),
        (["report", "runs", "--out", "."], "is a folder"),
        (["board", "runs", "--port", "70000"], "65535"),
        (["board", ".", "--ssh-config", "nothing"], "no such file"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_folder_or_option_that_cannot_be_shown_is_refused_in_one_line(
    words: list[str],
    message: str,
    run_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "r.html").write_text("<html>")
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
