"""Megatron's indexed datasets: read as documents, refused where index and data disagree."""

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.store.foreign.megatron import open_megatron

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write(prefix: Path, documents: list[list[list[int]]], dtype: str = "int32") -> Path:
    """Lay out an indexed dataset by hand: documents of sequences."""
    sequences = [s for d in documents for s in d]
    tokens = np.array([len(s) for s in sequences], dtype="<i4")
    pointers = (np.cumsum(tokens, dtype="<i8") - tokens) * np.dtype(dtype).itemsize
    bounds = np.cumsum([0, *(len(d) for d in documents)], dtype="<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(bounds))
    prefix.with_suffix(".idx").write_bytes(
        head + tokens.tobytes() + pointers.astype("<i8").tobytes() + bounds.tobytes()
    )
    prefix.with_suffix(".bin").write_bytes(
        np.array([t for s in sequences for t in s], dtype=dtype).tobytes()
    )
    return prefix.with_suffix(".idx")


@settings(deadline=None, max_examples=40)
@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 200), max_size=9), max_size=3), min_size=1, max_size=8
    ),
    dtype=st.sampled_from(sorted(CODES)),
)
def test_sequences_of_a_document_are_joined(
    documents: list[list[list[int]]], dtype: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    index = write(tmp_path_factory.mktemp("mg") / "text_document", documents, dtype)
    store = open_megatron(index)
    assert [d.ids.tolist() for d in store.documents()] == [
        [t for s in d for t in s] for d in documents
    ]
    assert all(d.ids.dtype in (np.uint16, np.uint32) and d.mask is None for d in store.documents())
    assert (
        open_megatron(index.with_suffix(".bin")).num_tokens
        == open_megatron(index.parent).num_tokens
        == store.num_tokens
    )


def test_files_of_megatron_core_are_read(tmp_path: Path) -> None:
    """Bytes that IndexedDatasetBuilder of megatron-core 0.16.1 wrote: documents of sequences [1,2,3],[4] | [5,60000] | [7], uint16."""
    index = (
        "4d4d494449445800000100000000000000080400000000000000040000000000000003000000010000000200000001000000"
        "0000000000000000060000000000000008000000000000000c00000000000000000000000000000002000000000000000300"
        "0000000000000400000000000000"
    )
    (tmp_path / "x.idx").write_bytes(bytes.fromhex(index))
    (tmp_path / "x.bin").write_bytes(np.array([1, 2, 3, 4, 5, 60000, 7], "<u2").tobytes())
    assert [d.ids.tolist() for d in open_megatron(tmp_path).documents()] == [
        [1, 2, 3, 4],
        [5, 60000],
        [7],
    ]


POINTER = struct.Struct("<q")
WRAPPED = POINTER.pack(8 - (1 << 32))

DAMAGED_INDEXES = {
    "shorter than the header": lambda index: index[:20],
    "the file is truncated": lambda index: index[:-1],
    "not a Megatron index": lambda index: b"X" + index[1:],
    "dtype code 7": lambda index: index[:17] + b"\x07" + index[18:],
    "a mode per sequence": lambda index: index + b"\0\0\0",
    "32-bit pointers wrapped": lambda index: index[:54] + WRAPPED + index[62:],
    "document bounds": lambda index: index[:-8] + POINTER.pack(2),
    "-2 tokens": lambda index: index[:34] + struct.pack("<i", -2) + index[38:],
}
"""By message: what was done to an index whose header has 34 bytes, followed by a length and a pointer per sequence."""


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """The index of two documents, one of two sequences and one of one."""
    return write(tmp_path / "x", [[[1, 2], [3]], [[4, 5, 6]]])


@pytest.mark.parametrize("message", DAMAGED_INDEXES)
def test_a_damaged_index_is_refused_in_one_line(index: Path, message: str) -> None:
    index.write_bytes(DAMAGED_INDEXES[message](index.read_bytes()))
    with pytest.raises(DataError, match=message) as caught:
        list(open_megatron(index).documents())
    assert "\n" not in str(caught.value)


def test_data_shorter_than_its_index_is_refused(index: Path) -> None:
    data = index.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(DataError, match="do not belong together"):
        open_megatron(index)


def test_a_negative_token_is_refused_when_it_is_read(index: Path) -> None:
    data = index.with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-4] + struct.pack("<i", -5))
    with pytest.raises(DataError, match="token id -5"):
        open_megatron(index).document(1)


def test_an_index_without_its_data_is_refused(index: Path) -> None:
    index.with_suffix(".bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin is missing"):
        open_megatron(index)
