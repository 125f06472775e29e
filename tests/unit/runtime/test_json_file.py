"""One rule for every reader of JSON files: a value, an OSError or a ValueError, whatever lies at the path."""

import os
from pathlib import Path

import pytest

from headway.errors import DataError
from headway.runtime.json_file import load_json, read_bounded, read_object


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[" * 100_000, b"\xff\xfe\x00", b'{"a": NaN, }', b"nul", b"\x00" * 50]
)
def test_what_is_no_json_is_a_value_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"."):
        load_json(tmp_path / "x.json")
    with pytest.raises(DataError, match=r"x\.json: not JSON"):
        read_object(tmp_path / "x.json", DataError)


def test_devices_pipes_folders_and_large_files_are_os_errors(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "endless").symlink_to("/dev/zero")
    (tmp_path / "large").write_bytes(b"0" * 11)
    for path in (
        tmp_path,
        tmp_path / "pipe",
        tmp_path / "endless",
        tmp_path / "large",
        tmp_path / "missing",
    ):
        with pytest.raises(OSError, match=r"."):
            read_bounded(path, largest=10)
    assert read_bounded(tmp_path / "large", largest=11) == b"0" * 11


def test_a_mark_of_byte_order_is_no_content(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    assert load_json(tmp_path / "x.json") == {"a": 1}
