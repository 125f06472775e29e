"""Records from Python become a raw file in the cache, named by content, in bounded memory; what is no record is refused by its number."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.errors import DataError
from headway.prepare.records_file import write_records


def test_the_same_records_give_the_same_file(tmp_path: Path) -> None:
    rows = [{"text": "héllo", "n": np.int64(3), "x": np.array([1.5, 2.0])}, {"text": "二"}]
    first = write_records(rows, tmp_path)
    second = write_records(iter(rows), tmp_path)
    assert first == second
    assert first.parent == tmp_path / "records"
    assert [*first.parent.iterdir()] == [first]
    assert [json.loads(line) for line in first.read_text("utf-8").splitlines()] == [
        {"text": "héllo", "n": 3, "x": [1.5, 2.0]},
        {"text": "二"},
    ]
    assert write_records(rows[:1], tmp_path) != first


def test_an_iterator_is_read_once_in_bounded_memory(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        for number in range(2000):
            yield {"text": f"{number} " * 1000}

    tracemalloc.start()
    path = write_records(rows(), tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert path.stat().st_size > 8e6 > 2 * peak


class _Dataset:
    """What matters of a Hugging Face dataset: it yields dicts, and again each time."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield {"text": "a"}
        yield {"text": "b"}


def test_a_dataset_is_iterated(tmp_path: Path) -> None:
    assert write_records(_Dataset(), tmp_path) == write_records(
        [{"text": "a"}, {"text": "b"}], tmp_path
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no records"),
        (["text"], r'data\[0\] is a str; a record is a dict. Write {"text"'),
        ([{"text": "a"}, 3], r"data\[1\] is a int"),
        ([{"at": object()}], r"data\[0\]: cannot be written as JSON: it holds a object"),
        ([{"x": float("nan")}], r"data\[0\]: cannot be written as JSON"),
        ({"train": [], "test": []}, "a mapping with the keys train, test; .* one split"),
        (7, "data is a int; give a path"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, rows: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_records(rows, tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"


def test_an_error_of_the_iterator_is_not_hidden(tmp_path: Path) -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield {"text": "a"}
        raise OSError("mine")

    with pytest.raises(OSError, match="mine"):
        write_records(rows(), tmp_path)
