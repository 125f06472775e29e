"""MDS shards of tokens: what is written is read back, packs keep their spans, damage is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError, DataError
from headway.store.foreign.mds import has_tokens, open_mds
from headway.store.foreign.mds_writer import MdsTokenWriter, MdsWriter
from headway.text.read import read_records

DTYPES = (
    "uint8",
    "int8",
    "uint16",
    "int16",
    "float16",
    "uint32",
    "int32",
    "float32",
    "uint64",
    "int64",
    "float64",
)
samples = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(max_size=20),
            "raw": st.binary(max_size=20),
            "object": st.recursive(
                st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
                lambda x: st.lists(x, max_size=3),
            ),
            "number": st.integers(-(2**63), 2**63 - 1),
            "small": st.integers(0, 255),
            "real": st.floats(allow_nan=False, width=32),
            "any": st.tuples(
                st.sampled_from(DTYPES), st.lists(st.integers(1, 300), min_size=1, max_size=2)
            ),
            "flat": st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300),
            "fixed": st.lists(st.integers(-9, 9), min_size=6, max_size=6),
        }
    ),
    min_size=1,
    max_size=6,
)
COLUMNS = {
    "text": "str",
    "raw": "bytes",
    "object": "json",
    "number": "int",
    "small": "uint8",
    "real": "float32",
    "any": "ndarray",
}
COLUMNS |= {"flat": "ndarray:uint32", "fixed": "ndarray:int16:2,3"}


def made(sample: dict[str, Any]) -> dict[str, Any]:
    dtype, shape = sample["any"]
    return sample | {
        "any": (np.arange(np.prod(shape)) % 2048)
        .reshape(shape)
        .astype(dtype),  # float16 holds no more than 65504
        "flat": np.array(sample["flat"], np.uint32),
        "fixed": np.array(sample["fixed"], np.int16).reshape(2, 3),
    }


@settings(deadline=None, max_examples=30)
@given(
    given_samples=samples,
    compression=st.sampled_from([None, "zstd:7"]),
    size_limit=st.sampled_from([200, 1 << 26]),
)
def test_every_encoding_survives_the_round_trip(
    given_samples: list[dict[str, Any]],
    compression: str | None,
    size_limit: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    writer = MdsWriter(
        folder, COLUMNS, compression=compression, hashes=["sha1"], size_limit=size_limit
    )
    written = [made(sample) for sample in given_samples]
    for sample in written:
        writer.write(sample)
    writer.finish()
    samples = [record.data for record in read_records(folder)]
    assert len(samples) == len(written)
    for stored, other in zip(samples, written, strict=True):
        assert stored.keys() == other.keys()
        for name in stored:
            if isinstance(other[name], np.ndarray):
                assert stored[name].dtype == other[name].dtype
                assert np.array_equal(stored[name], other[name])
            else:
                assert stored[name] == other[name]


documents = st.lists(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), min_size=1, max_size=300),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=30)
@given(given_documents=documents, masked=st.booleans(), compression=st.sampled_from([None, "zstd"]))
def test_documents_and_masks_survive_the_round_trip(
    given_documents: list[list[tuple[int, bool]]],
    masked: bool,
    compression: str | None,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    with MdsTokenWriter(folder, masked=masked, compression=compression) as writer:
        for document in given_documents:
            ids, mask = (np.array(column) for column in zip(*document, strict=True))
            writer.add(ids, mask if masked else None, domain="web")
        writer.finish()
    store = open_mds(folder, verify=True)
    assert store.lengths(0, store.num_documents).tolist() == [len(d) for d in given_documents]
    assert [d.ids.tolist() for d in store.documents()] == [
        [t for t, _ in d] for d in given_documents
    ]
    assert {d.type for d in store.documents()} == {"web"}
    assert store.masked == masked
    if masked:
        assert [store.mask(i).tolist() for i in range(store.num_documents)] == [
            [m for _, m in d] for d in given_documents
        ]  # pyright: ignore[reportOptionalMemberAccess]


def write_packs(
    folder: Path, spans: list[list[list[int]]], columns: dict[str, str] | None = None
) -> Path:
    writer = MdsWriter(
        folder,
        {"input_ids": "ndarray:uint32", "indices": "ndarray:uint32", "mask": "ndarray:uint8"}
        | (columns or {}),
    )
    for indices in spans:
        tokens = np.arange(10, 20, dtype=np.uint32)
        writer.write(
            {
                "input_ids": tokens,
                "indices": np.array(indices, np.uint32),
                "mask": (tokens % 2).astype(np.uint8),
            }
        )
    writer.finish()
    return folder


def test_packs_keep_their_spans_and_tokens_outside_of_them_are_left_out(tmp_path: Path) -> None:
    store = open_mds(write_packs(tmp_path, [[[0, 4], [4, 10]], [[0, 3], [3, 3], [5, 9]]]))
    assert [store.span_starts(i).tolist() for i in range(2)] == [[0, 4], [0, 3]]  # pyright: ignore[reportOptionalMemberAccess]
    assert store.document(0).ids.tolist() == list(range(10, 20))
    assert store.document(1).ids.tolist() == [10, 11, 12, 15, 16, 17, 18]
    assert store.document(1).mask.tolist() == [False, True, False, True, False, True, False]  # pyright: ignore[reportOptionalMemberAccess]
    assert store.lengths(0, 2).tolist() == [10, 7]


def test_indices_outside_of_the_pack_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="outside its 10 tokens"):
        open_mds(write_packs(tmp_path, [[[0, 11]]]))


def test_a_folder_of_domain_folders_is_one_store_with_types(tmp_path: Path) -> None:
    for name in ("books", "code"):
        writer = MdsWriter(tmp_path / name, {"tokens": "ndarray"})
        writer.write({"tokens": np.array([1, 2, 3], np.int32)})
        writer.finish()
    store = open_mds(tmp_path)
    assert [(d.type, d.ids.tolist()) for d in store.documents()] == [
        ("books", [1, 2, 3]),
        ("code", [1, 2, 3]),
    ]
    merged = [
        json.loads((tmp_path / name / "index.json").read_text())["shards"][0]
        for name in ("books", "code")
    ]
    for name, shard in zip(("books", "code"), merged, strict=True):
        shard["raw_data"]["basename"] = f"{name}/shard.00000.mds"
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": merged}))
    assert [d.type for d in open_mds(tmp_path).documents()] == ["books", "code"]


def test_tokens_stored_as_int64_bytes_are_read_and_int32_bytes_are_found_out(
    tmp_path: Path,
) -> None:
    for name, dtype in (("a", "<i8"), ("b", "<i4")):
        writer = MdsWriter(tmp_path / name, {"tokens": "bytes"})
        writer.write({"tokens": np.array([5, 6, 7, 8], dtype).tobytes()})
        writer.finish()
    assert open_mds(tmp_path / "a").document(0).ids.tolist() == [5, 6, 7, 8]
    with pytest.raises(DataError, match="token id"):
        open_mds(tmp_path / "b")


def test_text_shards_are_told_from_token_shards(tmp_path: Path) -> None:
    writer = MdsWriter(tmp_path, {"text": "str"})
    writer.write({"text": "words"})
    writer.finish()
    assert not has_tokens(tmp_path)
    with pytest.raises(DataError, match="no column input_ids or tokens"):
        open_mds(tmp_path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": "pkl"}, "MDS encoding is 'pkl'"),
        ({"a": "ndarray:complex64"}, "MDS encoding"),
        ({"a": "jpeg"}, "MDS encoding"),
    ],
)
def test_encodings_that_are_not_written_are_refused(
    tmp_path: Path, columns: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        MdsWriter(tmp_path, columns)


def test_an_empty_document_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty document"), MdsTokenWriter(tmp_path / "a") as writer:
        writer.add(np.zeros(0, np.int64))


def test_a_value_of_another_shape_is_refused_and_the_unfinished_folder_is_removed(
    tmp_path: Path,
) -> None:
    writer = MdsWriter(tmp_path / "b", {"x": "ndarray:uint32:2"}, size_limit=10)
    for value in (np.array([1, 2], np.uint32), np.array([3, 4], np.uint32)):
        writer.write({"x": value})
    with pytest.raises(DataError, match="shape"):
        writer.write({"x": np.array([1, 2, 3], np.uint32)})
    writer.close()
    assert not (tmp_path / "b").exists()


def test_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compression"):
        MdsWriter(tmp_path / "c", {"x": "int"}, compression="lz4")


def test_hashes_in_the_index_are_compared_when_asked(tmp_path: Path) -> None:
    writer = MdsWriter(tmp_path, {"input_ids": "ndarray:uint32"}, hashes=["sha1"])
    writer.write({"input_ids": np.array([1, 2, 3], np.uint32)})
    writer.finish()
    shard = tmp_path / "shard.00000.mds"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert open_mds(tmp_path).num_tokens == 3
    with pytest.raises(DataError, match="sha1"):
        open_mds(tmp_path, verify=True)
