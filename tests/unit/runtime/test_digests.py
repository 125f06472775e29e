"""A folder with digests is read only as it was written; what is not listed, and folders without digests, do not matter."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.disk_bit_flip import flip_bit_on_disk

from headway.errors import DataError
from headway.runtime.digests import (
    DIGESTS,
    check_digests,
    read_digests,
    record_digests,
    write_digests,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"a": 1}')
    (tmp_path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "README.md").write_text("about")
    write_digests(tmp_path)
    return tmp_path


def test_only_what_is_read_is_listed_and_other_files_may_come_and_change(folder: Path) -> None:
    digests = read_digests(folder)
    assert digests is not None
    assert sorted(digests.files) == ["config.json", "model.safetensors"]
    (folder / "README.md").write_text("another text")
    (folder / "notes.json").write_text("{}")
    digests.check_all()


def refusal(folder: Path) -> str:
    with pytest.raises(DataError) as caught:
        check_digests(folder)
    return str(caught.value)


def test_a_changed_file_is_named_with_the_remedy(folder: Path) -> None:
    flip_bit_on_disk(folder / "config.json", 9)
    message = refusal(folder)
    assert "config.json: damaged, or changed since headway wrote it" in message
    assert f"`headway verify folder {folder} --update`" in message


def test_a_longer_file_is_named(folder: Path) -> None:
    (folder / "config.json").write_text('{"a": 1} ')
    assert "config.json: damaged" in refusal(folder)


def test_a_missing_file_is_named_with_the_remedy(folder: Path) -> None:
    (folder / "config.json").unlink()
    message = refusal(folder)
    assert "config.json: is missing, but headway_digests.json lists it" in message
    assert f"`headway verify folder {folder} --update`" in message


def test_weights_are_hashed_where_they_are_read(folder: Path) -> None:
    flip_bit_on_disk(folder / "model.safetensors", 1000)
    digests = read_digests(folder)
    assert digests is not None
    digests.check()  # of small files
    taken = []

    def items() -> Iterator[int]:
        yield from range(5)

    with pytest.raises(DataError, match=r"model\.safetensors: damaged"):
        taken.extend(digests.through(["model.safetensors", "config.json"], items()))
    assert taken == [0, 1, 2, 3]  # never the last one


def test_a_reader_that_takes_all_items_and_no_more_has_checked_files(folder: Path) -> None:
    flip_bit_on_disk(folder / "model.safetensors", 1000)
    digests = read_digests(folder)
    assert digests is not None
    reader = digests.through(["model.safetensors"], iter("ab"))
    assert next(reader) == "a"
    with pytest.raises(DataError):
        next(reader)


def test_a_reader_that_stops_early_leaves_no_thread(folder: Path) -> None:
    import threading

    digests = read_digests(folder)
    assert digests is not None
    reader = digests.through(["model.safetensors"], iter("abc"))
    next(reader)
    reader.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert not [
        thread for thread in threading.enumerate() if thread.name.startswith("headway-digests")
    ]


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"checksum": 1}', b"\xff\xfe", b"[" * 100_000]
)
def test_a_damaged_list_is_refused_in_one_line(folder: Path, content: bytes) -> None:
    (folder / DIGESTS).write_bytes(content)
    with pytest.raises(DataError, match="damaged") as refused:
        check_digests(folder)
    assert "\n" not in str(refused.value)
    assert "--update" in str(refused.value)


def test_every_bit_of_the_list_counts(folder: Path) -> None:
    path = folder / DIGESTS
    whole = json.loads(path.read_text())
    for bit in range(0, 8 * path.stat().st_size, 7):
        flip_bit_on_disk(path, bit)
        try:
            digests = read_digests(folder)
        except DataError:
            pass
        else:  # a space that is no space any more is no JSON; anything else that is read must be the same
            assert digests is not None
            assert json.loads(path.read_text()) == whole
        flip_bit_on_disk(path, bit)


def test_files_written_beside_others_are_added_to_the_list(folder: Path) -> None:
    (folder / "masks.tsv").write_text("1.0\n")
    record_digests(folder, ("masks.tsv", "masks.json"))
    digests = read_digests(folder)
    assert digests is not None
    assert sorted(digests.files) == [
        "config.json",
        "masks.tsv",
        "model.safetensors",
    ]
    (folder / "masks.tsv").write_text("0.0\n")
    with pytest.raises(DataError, match=r"masks\.tsv"):
        check_digests(folder, ("masks.tsv",))


def test_a_folder_without_a_list_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_digests(tmp_path) is None
    check_digests(tmp_path)
    check_digests(tmp_path / "nowhere")


def test_a_list_that_names_files_elsewhere_is_refused(folder: Path) -> None:
    from headway.runtime.storage import parse_sealed_json, sealed_json

    values = parse_sealed_json((folder / DIGESTS).read_bytes())
    values["files"]["../other"] = values["files"]["config.json"]
    (folder / DIGESTS).write_text(sealed_json(values))
    with pytest.raises(DataError, match="outside of the folder"):
        check_digests(folder)
