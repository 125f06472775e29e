"""Shards that mosaicml-streaming itself wrote (tests/golden/mds) are read exactly, and the same samples are written to the same bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.store.foreign.mds import open_mds
from headway.store.foreign.mds_writer import MdsWriter
from headway.text.read import read_records

GOLDEN = Path(__file__).parents[3] / "golden" / "mds"
TOKENS = {"input_ids": "ndarray:uint32", "length": "int", "domain": "str"}
CHAT = TOKENS | {"indices": "ndarray:uint32", "mask": "ndarray:uint8"}
MIXED = {
    "a_str": "str",
    "b_bytes": "bytes",
    "c_json": "json",
    "d_int": "int",
    "e_u8": "uint8",
    "f_f32": "float32",
    "g_nd": "ndarray",
}
MIXED |= {"h_fixed": "ndarray:int16:2,3", "i_i64": "int64", "j_nd16": "ndarray:uint16"}


def token_samples() -> Iterator[dict[str, Any]]:
    draw = np.random.RandomState(0)
    for i, length in enumerate((1, 5, 255, 256, 300, 70, 2)):
        yield {
            "input_ids": draw.randint(0, 128256, length).astype(np.uint32),
            "length": length,
            "domain": ("book", "code")[i % 2],
        }


def chat_samples() -> Iterator[dict[str, Any]]:
    for i in range(3):
        length = 40 + i
        yield {
            "input_ids": (np.arange(length) * (i + 3)).astype(np.uint32),
            "indices": np.array([[0, 10], [10, 25], [25, length]], np.uint32),
            "mask": (np.arange(length) % 3 == 0).astype(np.uint8),
            "length": length,
            "domain": "chat",
        }


def mixed_samples() -> Iterator[dict[str, Any]]:
    for i in range(3):
        yield {
            "a_str": f"文本 {i}",
            "b_bytes": bytes([i, 255, 0]),
            "c_json": {"k": [1, None, "é"], "i": i},
            "d_int": -(2**40) + i,
            "e_u8": 200 + i,
            "f_f32": 0.5 * i,
            "g_nd": np.arange(6, dtype=np.int64).reshape(2, 3) + i,
            "h_fixed": np.arange(6, dtype=np.int16).reshape(2, 3) - i,
            "i_i64": 2**62 + i,
            "j_nd16": np.arange(260, dtype=np.uint16),
        }


SETS = {
    "raw/tokens": (TOKENS, token_samples, 1000),
    "raw/chat": (CHAT, chat_samples, 1 << 26),
    "raw/mixed": (MIXED, mixed_samples, 1 << 26),
    "zstd/chat": (CHAT, chat_samples, 1 << 26),
}


@pytest.mark.parametrize("name", SETS)
def test_shards_of_mosaicml_are_read_exactly(name: str) -> None:
    _, samples, _ = SETS[name]
    stored = [record.data for record in read_records(GOLDEN / name)]
    expected = list(samples())
    assert len(stored) == len(expected)
    for sample, other in zip(stored, expected, strict=True):
        assert sample.keys() == other.keys()
        for key, value in other.items():
            if isinstance(value, np.ndarray):
                assert sample[key].dtype == value.dtype
                assert np.array_equal(sample[key], value)
            else:
                assert sample[key] == value


@pytest.mark.parametrize("name", ["raw/tokens", "raw/chat", "zstd/chat"])
def test_shards_of_mosaicml_are_documents_with_masks_and_spans(name: str) -> None:
    store = open_mds(GOLDEN / name, verify=True)
    expected = list(SETS[name][1]())
    assert store.num_documents == len(expected)
    assert store.num_tokens == sum(sample["length"] for sample in expected)
    for i, sample in enumerate(expected):
        document = store.document(i)
        spans = store.span_starts(i)
        assert np.array_equal(document.ids, sample["input_ids"])
        assert document.type == sample["domain"]
        assert (document.mask is None) == ("mask" not in sample)
        assert (spans is None) == ("indices" not in sample)
        assert document.mask is None or np.array_equal(document.mask, sample["mask"] != 0)
        assert spans is None or np.array_equal(spans, sample["indices"][:, 0])


@pytest.mark.parametrize("name", ["raw/tokens", "raw/chat", "raw/mixed"])
def test_the_same_samples_are_written_to_the_same_bytes(name: str, tmp_path: Path) -> None:
    columns, samples, size_limit = SETS[name]
    writer = MdsWriter(tmp_path, columns, hashes=["sha1"], size_limit=size_limit)
    for sample in samples():
        writer.write(sample)
    writer.finish()
    ours = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert ours == {file.name: file.read_bytes() for file in (GOLDEN / name).iterdir()}
