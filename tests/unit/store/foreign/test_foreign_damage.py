"""Damaged files of every foreign format end in a one-line DataError, or are read as documents that still fit their index."""

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import DataError
from headway.store.foreign.internlm import InternlmWriter
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.foreign.zero2all import SftPairWriter, Zero2allWriter
from headway.store.open import detect_kind, open_source

DOCUMENTS = [[1, 70, 3, 4, 5], [7, 8], [9, 10, 11, 300, 13, 14, 15, 16]]


def internlm(folder: Path) -> None:
    with InternlmWriter(folder / "en" / "data.bin") as writer:
        for ids in DOCUMENTS:
            writer.add(ids, np.array(ids) > 4)
        writer.finish()


def zero2all(folder: Path) -> None:
    with Zero2allWriter(folder, seq_len=4, file_tokens=8) as writer:
        for ids in DOCUMENTS:
            writer.add(ids)
        writer.finish()


def zero2all_sft(folder: Path) -> None:
    with SftPairWriter(folder) as writer:
        for ids in DOCUMENTS:
            writer.add(ids, np.array(ids) > 4)
        writer.finish()


def mds(folder: Path, compression: str | None = None) -> None:
    with MdsTokenWriter(folder, masked=True, compression=compression) as writer:
        for ids in DOCUMENTS:
            writer.add(ids, np.array(ids) > 4, domain="web")
        writer.finish()


def mds_zstd(folder: Path) -> None:
    mds(folder, "zstd")


def megatron(folder: Path) -> None:
    lengths = np.array([len(ids) for ids in DOCUMENTS], "<i4")
    pointers = ((np.cumsum(lengths) - lengths) * 4).astype("<i8")
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 3, 4)
    (folder / "d.idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + np.arange(4, dtype="<i8").tobytes()
    )
    (folder / "d.bin").write_bytes(np.array([t for ids in DOCUMENTS for t in ids], "<i4").tobytes())


FORMATS: dict[str, Callable[[Path], None]] = {
    "internlm": internlm,
    "zero2all": zero2all,
    "zero2all-sft": zero2all_sft,
    "mds": mds,
    "mds (zstd)": mds_zstd,
    "megatron": megatron,
}


def read_everything(folder: Path, kind: str) -> list[list[int]]:
    """Open as training would and read each document; every answer must fit what the store says of itself."""
    source = open_source(folder, kind)  # pyright: ignore[reportArgumentType]
    documents: list[list[int]] = []
    for i in range(source.num_documents):
        length = int(source.lengths(i, i + 1)[0])
        ids = source.tokens(i, 0, length)
        mask = source.mask(i, 0, length)
        assert ids.dtype in (np.uint16, np.uint32)
        assert len(ids) == length
        assert mask is None or (mask.dtype == np.bool_ and len(mask) == length)
        documents.append(ids.tolist())
    assert source.num_tokens == sum(map(len, documents))
    return documents


@pytest.mark.parametrize("name", FORMATS)
def test_an_undamaged_store_is_detected_and_read(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path)
    kind = detect_kind(tmp_path)
    assert kind == name.split(" ")[0]
    begin = [64000] if kind == "zero2all" else []
    assert read_everything(tmp_path, kind) == [begin + ids for ids in DOCUMENTS]


@pytest.mark.parametrize("name", FORMATS)
def test_pieces_are_gathered_as_they_are_read_one_by_one(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path)
    source = open_source(tmp_path)
    documents = np.array([2, 0, 2, 1])
    starts = np.array([1, 0, 0, 1])
    lengths = np.array([4, 5, 1, 1])
    ids, mask = source.gather(documents, starts, lengths)
    pieces = list(
        zip(documents.tolist(), starts.tolist(), (starts + lengths).tolist(), strict=True)
    )
    assert ids.tolist() == [token for piece in pieces for token in source.tokens(*piece).tolist()]
    assert (mask is None) == (not source.masked)
    if mask is not None:
        assert mask.tolist() == [flag for piece in pieces for flag in source.mask(*piece).tolist()]  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize("name", FORMATS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_damage_never_ends_in_a_traceback_or_a_document_that_does_not_fit(
    name: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("damage")
    FORMATS[name](folder)
    victim = data.draw(
        st.sampled_from(sorted(p for p in folder.rglob("*") if p.is_file())), label="file"
    )
    content = bytearray(victim.read_bytes())
    how = data.draw(st.sampled_from(["cut", "flip", "empty", "delete", "append"]))
    if how == "cut":
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    elif how == "flip":
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "append":
        content += bytes(data.draw(st.integers(1, 9)))
    victim.write_bytes(b"" if how == "empty" else content)
    if how == "delete":
        victim.unlink()
    message = str(folder)
    try:
        read_everything(folder, name.split(" ")[0])
    except DataError as error:
        message = str(error)
    assert "\n" not in message
    assert str(folder) in message


@pytest.mark.parametrize("name", FORMATS)
def test_truncated_payloads_are_always_noticed(name: str, tmp_path: Path) -> None:
    FORMATS[name](tmp_path)
    for victim in sorted(p for p in tmp_path.rglob("*") if p.is_file()):
        whole = victim.read_bytes()
        for keep in {0, 1, len(whole) // 2, len(whole) - 1}:
            victim.write_bytes(whole[:keep])
            with pytest.raises(DataError):
                read_everything(tmp_path, name.split(" ")[0])
        victim.write_bytes(whole)


@pytest.mark.parametrize("name", ["nothing", "empty file", "picture"])
def test_what_is_of_no_kind_is_refused_with_what_was_looked_for(name: str, tmp_path: Path) -> None:
    if name == "empty file":
        (tmp_path / "model.bin").write_bytes(b"")
    elif name == "picture":
        (tmp_path / "cat.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(DataError, match="unknown format"):
        detect_kind(tmp_path)
