"""A text file in blocks: the same text as the whole, and the same complaints with file, line and byte."""

import gzip
import random
from pathlib import Path

import pytest

from headway.errors import DataError
from headway.text.raw import RawFile, decode, text_blocks
from headway.text.read import read_blocks, read_documents


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 1 << 20])
def test_blocks_are_the_text_whatever_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr("headway.text.raw.BLOCK_BYTES", size)
    rng = random.Random(size)
    text = "".join(rng.choice("ab\n é中文🙂\u2028\r") for _ in range(400))
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    blocks = list(text_blocks(RawFile.at(path)))
    assert "".join(blocks) == text
    assert all(blocks)
    assert max(map(len, blocks)) <= size + 3
    packed = tmp_path / "b.txt.gz"
    packed.write_bytes(gzip.compress(text.encode()))
    assert ["".join(block) for _, block in read_blocks([path, packed])] == [
        d.text for d in read_documents([path, packed])
    ]


@pytest.mark.parametrize("size", [1, 4, 7, 1 << 20])
@pytest.mark.parametrize("bad", [b"\xff", b"\xe4\xb8", b"\x80", b"\xf0\x9f\x99a"])
def test_bytes_that_are_no_text_are_reported_as_in_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, bad: bytes
) -> None:
    monkeypatch.setattr("headway.text.raw.BLOCK_BYTES", size)
    path = tmp_path / "a.txt"
    for data in ("中文 abc\nd中e".encode() + bad, b"a" * 9 + bad + b"\nb", bad):
        path.write_bytes(data)
        with pytest.raises(DataError) as whole:
            decode(data, str(path), 1)
        with pytest.raises(DataError) as caught:
            list(text_blocks(RawFile.at(path)))
        assert str(caught.value).split(" (")[0] == str(whole.value).split(" (")[0]


def test_an_empty_text_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(DataError, match="no documents; the file is empty"):
        list(read_blocks(tmp_path / "a.txt"))
