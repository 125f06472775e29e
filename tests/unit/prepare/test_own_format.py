"""Files in a format of one's own: read once by the user's module, then like any JSONL file; its faults are one line with the file."""

import json
from pathlib import Path

import pytest
from support.byte_model import byte_tokenizer

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.prepare.own_format import read_own_format
from headway.store.reader import open_store

FORMAT = """
from pathlib import Path

def read(raw):
    with open({calls!r}, "a") as file:
        file.write("x")
    with raw.open() as stream:
        for number, part in enumerate(stream.read().decode().split("%"), 1):
            if part.strip() == "bad":
                raise ValueError("bad part")
            yield {{"text": part.strip(), "number": number}}
"""


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_format.py").write_text(FORMAT.format(calls=str(tmp_path / "calls")))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.pct").write_text("one % two")
    (tmp_path / "in" / "b.pct").write_text("three")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_a_file_a_folder_and_a_glob_are_read_once(lab: Path) -> None:
    assert texts(read_own_format("in/a.pct", "./my_format.py", lab / "cache")) == ["one", "two"]
    whole = read_own_format("in", "./my_format.py", lab / "cache")
    assert texts(whole) == ["one", "two", "three"]
    assert len((lab / "calls").read_text()) == 3
    assert read_own_format("in/*.pct", "./my_format.py", lab / "cache") == whole
    assert len((lab / "calls").read_text()) == 3
    (lab / "in" / "b.pct").write_text("four")
    assert texts(read_own_format("in", "./my_format.py", lab / "cache")) == ["one", "two", "four"]
    code = (lab / "my_format.py").read_text().replace("part.strip(), ", "part.strip().upper(), ")
    (lab / "my_format.py").write_text(code)
    assert texts(read_own_format("in", "./my_format.py", lab / "cache")) == [
        "ONE",
        "TWO",
        "FOUR",
    ], "other code, other records"


def test_an_error_of_the_users_reader_names_the_file_and_the_record(lab: Path) -> None:
    (lab / "in" / "b.pct").write_text("x % bad")
    with pytest.raises(
        DataError, match=r"in/b.pct: ./my_format.py failed after record 1: ValueError: bad part"
    ):
        read_own_format("in", "./my_format.py", lab / "cache")


def test_a_pattern_without_files_is_refused(lab: Path) -> None:
    with pytest.raises(DataError, match="there are no files"):
        read_own_format("none/*.pct", "./my_format.py", lab / "cache")


def test_a_module_without_a_reader_is_refused(lab: Path) -> None:
    (lab / "empty.py").write_text("")
    with pytest.raises(ConfigError, match=r"has no function read\(raw\)"):
        read_own_format("in", "./empty.py", lab / "cache")


def test_the_verb_takes_it_too(lab: Path, capsys: pytest.CaptureFixture[str]) -> None:
    byte_tokenizer().save(lab / "tokenizer")
    words = [
        "data",
        "tokenize",
        "--input",
        "in",
        "--format",
        "./my_format.py",
        "--tokenizer",
        "tokenizer",
        "--out",
        "store",
    ]
    assert main(words) == 0, capsys.readouterr().err
    assert open_store(lab / "store").num_documents == 3
