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


def test_a_report_holds_its_data_and_loads_nothing(tmp_path: Path) -> None:
    one = make_run(tmp_path / "runs" / "</script><script>alert(1)<", 50)
    two = make_run(tmp_path / "runs" / "two", 30, lr=0.5)
    (one / "eval").mkdir()
    (one / "eval" / "report.md").write_text("![plot](plot.png)\n")
    (one / "eval" / "plot.png").write_bytes(b"\x89PNG")
    out = tmp_path / "deep" / "report.html"
    written = write_html_report(open_sources([str(one), str(two)]), out)
    page = out.read_text(encoding="utf-8")
    assert written["bytes"] == len(page.encode()) and "<script>alert" not in page
    own = page
    for name in VENDORED:
        library = (Path(headway.__file__).parent / "vendor" / name).read_text(encoding="utf-8")
        assert library in page, name
        own = own.replace(library, "")
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "http://" not in own.replace("http://www.w3.org", "")
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 1
    checksum = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{checksum}'" in page and "default-src 'none'" in page
    data = json.loads(re.findall(r'id="embedded">(.*?)</script>', page, re.DOTALL)[0])
    assert [run["name"] for run in data["runs"]] == ["</script><script>alert(1)<", "two"] or len(
        data["runs"]
    ) == 2
    (identity,) = (run["id"] for run in data["runs"] if run["name"] == "two")
    curves = {
        one["metric"]: one for one in unpack(base64.b64decode(data["curves"][identity]["step"]))
    }
    records = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    assert curves["loss"]["y"] == tuple(one["loss"] for one in records)
    assert data["details"][identity]["config"]["optim.lr"] == 0.5
    assert any(
        value == {"eval/plot.png": "data:image/png;base64,iVBORw=="}
        for value in data["pictures"].values()
    )


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_terminal_shows_runs_at_any_width(tmp_path: Path, width: int) -> None:
    make_run(tmp_path / "runs" / "a-run-with-quite-a-long-name\x1b[31m", 50)
    with Board([LocalSource(tmp_path / "runs")]) as board:
        console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
        show_once(board, console, 5.0)
        text = console.export_text()
        console.file.close()
    assert "50/50" in text and "done" in text and "loss" in text and "\x1b" not in text
    assert ("memory" in text) == (width == 160) and max(
        len(line) for line in text.splitlines()
    ) <= width


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


def test_plots_of_nothing_and_of_constants() -> None:
    import numpy as np

    assert braille_plot([], 4, 2) == [[(" ", -1)] * 4] * 2
    one = braille_plot([(np.array([1.0]), np.array([2.0]))], 4, 2)
    assert sum(cell != " " for row in one for cell, _ in row) >= 1
    board = Board([LocalSource(Path("/nonexistent"))])
    assert "no runs" in str(screen(board, 80, 24))
    board.close()


def test_the_verbs_print_json_and_refuse_mistakes_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "runs" / "one", 5)
    for words in (
        ["board", str(tmp_path / "runs"), "--list", "--json"],
        ["top", str(tmp_path / "runs"), "--json"],
    ):
        assert main(words) == 0
        (row,) = json.loads(capsys.readouterr().out)
        assert (row["name"], row["state"], row["step"]) == ("one", "done", 5)
    assert (
        main(
            ["report", str(tmp_path / "runs" / "one"), "--out", str(tmp_path / "r.html"), "--json"]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["runs"] == ["one"]
    assert main(["top", str(tmp_path / "runs")]) == 0 and "5/5" in capsys.readouterr().out
    (tmp_path / "empty").mkdir()
    mistakes = [
        (["board", str(tmp_path / "nothing")], "does not exist"), (["top", str(tmp_path / "r.html")], "is not a folder"),
        (["report", str(tmp_path / "empty")], "no runs there"), (["report", str(tmp_path / "runs"), "--out", str(tmp_path)], "is a folder"),
        (["board", str(tmp_path / "runs"), "--port", "70000"], "65535"),
        (["board", str(tmp_path), "--ssh-config", "nothing"], "no such file"),
    ]  # fmt: skip
    for words, expected in mistakes:
        assert main(words) == 2
        said = capsys.readouterr().err
        assert expected in said and said.count("\n") == 1, said
