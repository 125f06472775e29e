"""metrics.jsonl holds one valid line per step, ever: through NaN, kills and resumes."""

import json
import logging
import time
from pathlib import Path

import pytest

from headway.errors import DataError
from headway.track import metrics_file as jsonl
from headway.track.metrics_file import MetricsFile, read_metrics


def written(path: Path, steps: range) -> MetricsFile:
    file = MetricsFile(path)
    for step in steps:
        file.write({"step": step, "loss": 1 / step, "name": "größe", "time": {"step_seconds": 0.5}})
    file.sync()
    return file


def test_records_come_back_exactly(tmp_path: Path) -> None:
    written(tmp_path / "m.jsonl", range(1, 4))
    records = read_metrics(tmp_path / "m.jsonl")
    assert records == [
        {"step": s, "loss": 1 / s, "name": "größe", "time": {"step_seconds": 0.5}}
        for s in (1, 2, 3)
    ]


def test_values_json_cannot_say_are_null_and_named(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    MetricsFile(path).write(
        {"step": 1, "loss": float("nan"), "ok": 1.0, "time": {"rate": float("-inf")}}
    )
    [line] = path.read_text().splitlines()

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    record = json.loads(line, parse_constant=refuse)
    assert record == {
        "step": 1,
        "loss": None,
        "ok": 1.0,
        "time": {"rate": None},
        "non_finite": {"loss": "nan", "time/rate": "-inf"},
    }


@pytest.mark.parametrize("step", [0, 3, 5, 9])
@pytest.mark.parametrize(
    "torn", [b"", b'{"step": 6, "lo', b'{"step": 2}'], ids=["whole", "torn", "without an end"]
)
def test_a_resumed_run_writes_each_step_once(tmp_path: Path, step: int, torn: bytes) -> None:
    path = tmp_path / "m.jsonl"
    straight = tmp_path / "straight.jsonl"
    file = written(path, range(1, 6))
    with open(path, "ab") as raw:
        raw.write(torn)
    file.truncate_after(step)
    written(path, range(min(step, 5) + 1, 8))
    written(straight, range(1, 8))
    assert path.read_bytes() == straight.read_bytes()


def test_nothing_to_cut_is_fine(tmp_path: Path) -> None:
    MetricsFile(tmp_path / "none.jsonl").truncate_after(5)
    MetricsFile(tmp_path / "none.jsonl").sync()
    assert list(tmp_path.iterdir()) == []


def test_a_torn_last_line_is_not_read_and_a_damaged_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    written(path, range(1, 3))
    good = path.read_bytes()
    path.write_bytes(good + b'{"step": 3')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]
    path.write_bytes(good.replace(b"loss", b'lo"s', 1))
    with caplog.at_level(logging.WARNING, "headway"):
        assert [r["step"] for r in read_metrics(path)] == [2]
        assert "skipped 1 damaged lines; the first is line 1" in caplog.text
        MetricsFile(path).truncate_after(9)
    assert "dropped 1 damaged lines" in caplog.text
    caplog.clear()
    assert [r["step"] for r in read_metrics(path)] == [2]
    assert not caplog.text


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.jsonl: cannot be read: No such file"):
        read_metrics(tmp_path / "gone.jsonl")


def test_only_the_end_of_a_long_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "m.jsonl"
    written(path, range(1, 2001))
    lines = path.read_bytes().splitlines(keepends=True)
    read: list[int] = []
    plain = jsonl._record  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(jsonl, "_record", lambda line: (read.append(1), plain(line))[1])
    monkeypatch.setattr(jsonl, "TAIL_BYTES", 1000)
    MetricsFile(path).truncate_after(1990)
    assert path.read_bytes() == b"".join(lines[:1990])
    assert len(read) < 50
    MetricsFile(path).truncate_after(5)
    assert path.read_bytes() == b"".join(lines[:5])


def test_many_damaged_lines_cost_no_more_than_reading_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "m.jsonl"
    written(path, range(1, 4))
    good = path.read_bytes()
    path.write_bytes(good + b"\x00damaged\n" * 200_000)
    began = time.process_time()
    with caplog.at_level(logging.WARNING, "headway"):
        MetricsFile(path).truncate_after(9)
    assert time.process_time() - began < 5, (
        "200,000 damaged lines took minutes when each was counted by reading all"
    )
    assert path.read_bytes() == good
    assert "200000 damaged lines" in caplog.text


def test_a_line_without_end_is_not_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "LONGEST_LINE", 100)
    path = tmp_path / "m.jsonl"
    path.write_bytes(
        b'{"step": 1}\n{"step": 2, "x": "'
        + b"y" * 1000
        + b'"}\n{"step": 3}\n{"step": ['
        + b"[" * 1000
    )
    assert [record["step"] for record in read_metrics(path)] == [1, 3]


def test_repair_keeps_every_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(
        b'{"step": 1}\nnonsense\n{"step": true}\n[]\n' + b"[" * 100_000 + b'\n{"step": 2}\n'
    )
    MetricsFile(path).repair()
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'
