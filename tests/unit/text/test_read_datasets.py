"""Dataset folders: splits and subsets by name, save_to_disk folders, MDS with arrays and compression."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from headway.errors import DataError
from headway.text.expand import expand
from headway.text.formats.mds import decode_value
from headway.text.read import read_documents, read_records


def put(path: Path, *texts: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{"text": text} for text in texts]), path)


def texts(path: Path | str) -> list[str]:
    return [document.text for document in read_documents(path)]


def test_a_snapshot_gives_its_train_split_unless_another_is_chosen(tmp_path: Path) -> None:
    put(tmp_path / "data/train-00001-of-00002.parquet", "b")
    put(tmp_path / "data/train-00000-of-00002.parquet", "a")
    put(tmp_path / "data/test-00000-of-00001-0123456789abcdef.parquet", "t")
    (tmp_path / "README.md").write_text("about", encoding="utf-8")
    assert texts(tmp_path) == ["a", "b"]
    assert texts(f"{tmp_path}:test") == ["t"]
    with pytest.raises(DataError, match=r"no split or subset 'dev'; it holds test, train"):
        texts(f"{tmp_path}:dev")


def test_a_snapshot_with_subsets_needs_a_choice(tmp_path: Path) -> None:
    put(tmp_path / "en/train-00000-of-00001.parquet", "e")
    put(tmp_path / "zh/train-00000-of-00001.parquet", "z")
    put(tmp_path / "zh/validation/0000.parquet", "v")
    assert texts(f"{tmp_path}:zh") == ["z"]
    assert texts(f"{tmp_path}:zh/validation") == ["v"]
    with pytest.raises(
        DataError,
        match=r"several subsets \(en/train, zh/train, zh/validation\); choose one, as in .*:en/train",
    ):
        texts(tmp_path)


def test_a_folder_whose_names_tell_no_splits_is_read_whole(tmp_path: Path) -> None:
    put(tmp_path / "train.parquet", "a")
    put(tmp_path / "more.parquet", "b")
    assert texts(tmp_path) == ["b", "a"]
    with pytest.raises(DataError, match="have no splits"):
        texts(f"{tmp_path}:train")


def save_to_disk(folder: Path, *parts: list[dict[str, Any]]) -> None:
    folder.mkdir(parents=True)
    names = [f"data-{i:05}-of-{len(parts):05}.arrow" for i in range(len(parts))]
    for name, rows in zip(names, parts, strict=True):
        table = pa.Table.from_pylist(rows)
        with (
            pa.OSFile(str(folder / name), "wb") as out,
            pa.ipc.new_stream(out, table.schema) as writer,
        ):
            writer.write_table(table)
    state = {
        "_data_files": [{"filename": name} for name in names],
        "_indices_data_files": None,
        "_split": "train",
    }
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    (folder / "dataset_info.json").write_text("{}", encoding="utf-8")


def test_save_to_disk_folders_are_read(tmp_path: Path) -> None:
    save_to_disk(tmp_path / "one", [{"text": "a"}], [{"text": "b"}])
    assert texts(tmp_path / "one") == ["a", "b"]
    save_to_disk(tmp_path / "many/train", [{"text": "c"}])
    save_to_disk(tmp_path / "many/test", [{"text": "d"}])
    (tmp_path / "many/dataset_dict.json").write_text(
        '{"splits": ["train", "test"]}', encoding="utf-8"
    )
    assert texts(tmp_path / "many") == ["c"]
    assert texts(f"{tmp_path / 'many'}:test") == ["d"]
    (tmp_path / "one/data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"listed in state.json, but missing"):
        texts(tmp_path / "one")


def encode_array(values: np.ndarray[Any, Any], dtype_code: int | None) -> bytes:
    head = b"" if dtype_code is None else bytes([dtype_code])
    return (
        head
        + bytes([values.ndim << 2 | 1])
        + np.array(values.shape, "<u2").tobytes()
        + values.tobytes()
    )


def write_mds(
    folder: Path, texts: list[str], *, compressed: bool = False, prefix: str = ""
) -> dict[str, Any]:
    """One shard with the columns ids (an array of any length), n (fixed size) and text."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "column_encodings": ["ndarray:uint16", "int", "str"],
        "column_names": ["ids", "n", "text"],
        "column_sizes": [None, 8, None],
    }
    described = json.dumps(config).encode()
    samples: list[bytes] = []
    for n, text in enumerate(texts):
        ids = encode_array(np.arange(n + 1, dtype="<u2"), None)
        data = text.encode()
        sizes = np.array([len(ids), len(data)], "<u4")
        samples.append(sizes.tobytes() + ids + np.int64(n).tobytes() + data)
    begin = 4 + 4 * (len(samples) + 1) + len(described)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4")
    raw = np.uint32(len(samples)).tobytes() + offsets.tobytes() + described + b"".join(samples)
    name = "shard.00000.mds"
    entry: dict[str, Any] = {
        "format": "mds",
        "samples": len(samples),
        "raw_data": {"basename": prefix + name, "bytes": len(raw), "hashes": {}},
        "zip_data": None,
    }
    if compressed:
        stored = zstandard.compress(raw)
        (folder / f"{name}.zstd").write_bytes(stored)
        entry["zip_data"] = {
            "basename": f"{prefix}{name}.zstd",
            "bytes": len(stored),
            "hashes": {},
        }
    else:
        (folder / name).write_bytes(raw)
    return {"version": 2, "shards": [entry]}


@pytest.mark.parametrize("compressed", [False, True])
def test_mds_folders_give_all_columns_and_their_texts(tmp_path: Path, compressed: bool) -> None:
    index = write_mds(tmp_path, ["一", "two"], compressed=compressed)
    (tmp_path / "index.json").write_text(json.dumps(index), encoding="utf-8")
    samples = [record.data for record in read_records(tmp_path)]
    assert [s["text"] for s in samples] == ["一", "two"] == texts(tmp_path)
    assert [s["n"] for s in samples] == [0, 1]
    assert samples[1]["ids"].tolist() == [0, 1]
    assert samples[1]["ids"].dtype == np.uint16
    assert [r.data["n"] for r in read_records(tmp_path)] == [0, 1]


def test_mds_folders_of_folders_work_with_and_without_a_common_index(tmp_path: Path) -> None:
    entries: list[Any] = []
    for name in ("code", "books"):
        index = write_mds(tmp_path / name, [name], prefix="")
        (tmp_path / name / "index.json").write_text(json.dumps(index), encoding="utf-8")
        entries += write_mds(tmp_path / name, [name], prefix=f"{name}/")["shards"]
    assert texts(tmp_path) == ["books", "code"]
    (tmp_path / "index.json").write_text(
        json.dumps({"version": 2, "shards": entries}), encoding="utf-8"
    )
    assert texts(tmp_path) == ["code", "books"]
    assert [p.parent.name for p in expand(tmp_path)] == ["code", "books"]


def test_mds_values_of_every_encoding_are_decoded() -> None:
    grid = np.arange(6, dtype="<f4").reshape(2, 3)
    assert decode_value("ndarray", encode_array(grid, 34)).tolist() == grid.tolist()
    assert decode_value("ndarray:float32:2,3", grid.tobytes()).tolist() == grid.tolist()
    assert decode_value("int32", np.int32(-5).tobytes()) == -5
    assert decode_value("float64", np.float64(0.5).tobytes()) == 0.5
    assert decode_value("json", b'{"a": 1}') == {"a": 1}
    assert decode_value("str_int", b"12345678901234567890") == 12345678901234567890
    with pytest.raises(ValueError, match="'pil' is unknown"):
        decode_value("pil", b"")


def test_pickled_mds_columns_are_refused(tmp_path: Path) -> None:
    config = json.dumps(
        {"column_encodings": ["pkl"], "column_names": ["x"], "column_sizes": [None]}
    ).encode()
    begin = 4 + 4 + len(config)
    (tmp_path / "s.mds").write_bytes(np.array([0, begin], "<u4").tobytes() + config)
    with pytest.raises(DataError, match=r"column 'x' is pickled"):
        list(read_records(tmp_path / "s.mds"))
