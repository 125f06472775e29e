"""Validation reads everything and names every bad record."""

import gzip
import json
from pathlib import Path

import pytest

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.prepare.validate import ValidateOptions, validate
from headway.text.document import TextOf

GOOD = '{"instruction": "Hi", "output": "Hello"}\n'


def places(report_paths: list[Path], reading: ValidateOptions) -> list[tuple[str, int | None, str]]:
    return [
        (Path(bad.file).name, bad.line, bad.message)
        for bad in validate(list(report_paths), reading).bad
    ]


def test_one_bad_line_hides_no_other(tmp_path: Path) -> None:
    lines = [
        GOOD.encode(),
        b'{"instruction": "Hi"\n',
        b"\n",
        b"\xff\xfe{}\n",
        b'["a"]\n',
        b'{"instruction": "", "output": "x"}\n',
        GOOD.encode(),
    ]
    (tmp_path / "c.jsonl").write_bytes(b"".join(lines))
    report = validate([tmp_path / "c.jsonl"], ValidateOptions("chat"))
    assert [bad.line for bad in report.bad] == [2, 4, 5, 6]
    assert [bad.place for bad in report.bad] == [
        f"{tmp_path}/c.jsonl:{line}" for line in (2, 4, 5, 6)
    ]
    assert (report.files, report.records, report.good) == (1, 6, 2)
    messages = [bad.message for bad in report.bad]
    assert "not valid JSON" in messages[0]
    assert "not UTF-8" in messages[1]
    assert "JSON list" in messages[2]
    assert "turn 0 (user) is empty" in messages[3]
    assert not any(str(tmp_path) in message for message in messages)


def test_lists_are_read_to_where_they_are_damaged(tmp_path: Path) -> None:
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "a", "chosen": "b"},
        {"prompt": "a", "chosen": "b", "rejected": "b"},
    ]
    text = "[\n" + ",\n".join(map(json.dumps, rows)) + "\n]"
    (tmp_path / "a.json").write_text(text)
    bad_places = places([tmp_path / "a.json"], ValidateOptions("preference"))
    assert [(name, line) for name, line, _ in bad_places] == [("a.json", 3), ("a.json", 4)]
    (tmp_path / "a.json").write_text(text[:-20])
    report = validate([tmp_path / "a.json"], ValidateOptions("preference"))
    assert report.good == 1
    assert len(report.bad) == 2
    assert report.bad[-1].line is not None


@pytest.mark.parametrize(
    "content", [b"", gzip.compress(b'{"text": "a"}\n' * 100, mtime=0)[:-9]], ids=["empty", "cut"]
)
def test_empty_and_damaged_files_are_bad_records(tmp_path: Path, content: bytes) -> None:
    name = "x.jsonl.gz" if content else "x.jsonl"
    (tmp_path / name).write_bytes(content)
    report = validate([tmp_path], ValidateOptions("text"))
    assert len(report.bad) == 1
    assert report.bad[0].file.endswith(name)


def test_texts_are_judged_by_key_and_emptiness(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"text": "one two"}\n{"text": " "}\n{"body": "x"}\n{"text": 3}\n'
    )
    (tmp_path / "t.txt").write_text("a whole document")
    bad_places = places([tmp_path / "t.jsonl", tmp_path / "t.txt"], ValidateOptions("text"))
    assert [(name, line) for name, line, _ in bad_places] == [
        ("t.jsonl", 2),
        ("t.jsonl", 3),
        ("t.jsonl", 4),
    ]
    assert len(places([tmp_path / "t.jsonl"], ValidateOptions("text", text=TextOf("body")))) == 3


def test_lengths_are_counted_by_powers_of_two(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"text": "a" * size}) + "\n" for size in (1, 2, 3, 8, 9, 15))
    )
    report = validate([tmp_path / "t.jsonl"], ValidateOptions("text"))
    assert [(b.low, b.high, b.records) for b in report.histogram()] == [
        (1, 1, 1),
        (2, 3, 2),
        (4, 7, 0),
        (8, 15, 3),
    ]
    assert (report.total, report.longest, report.unit) == (38, 15, "characters")


def test_the_verb_prints_every_bad_record_and_a_chart_and_exits_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD * 3)
    (tmp_path / "bad.jsonl").write_text(GOOD + '{"instruction": "x"}\n')
    assert main(["data", "validate", str(tmp_path / "good.jsonl"), "--kind", "chat"]) == 0
    assert "3 records in 1 files: 3 good, 0 bad" in capsys.readouterr().out
    assert main(["data", "validate", str(tmp_path), "--kind", "chat"]) == 1
    out = capsys.readouterr().out
    assert f"{tmp_path}/bad.jsonl:2: instruction without output" in out
    assert "█" in out
    assert main(["data", "validate", str(tmp_path), "--kind", "chat", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["records"], report["good"], report["bad"][0]["line"]) == (5, 4, 2)
    assert report["histogram"] == [{"low": 4, "high": 7, "records": 4}]
    assert main(["data", "validate", str(tmp_path), "--kind", "poems"]) == 2
    assert main(["data", "validate", str(tmp_path / "nothing.jsonl")]) == 2


def test_an_unknown_kind_and_missing_files_are_the_callers_mistake(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--kind is 'poem'"):
        validate([tmp_path], ValidateOptions("poem"))  # pyright: ignore[reportArgumentType]
    with pytest.raises(DataError):
        validate([tmp_path / "missing.jsonl"], ValidateOptions("text"))
