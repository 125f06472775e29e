"""Types of data: a folder of several is one source per type with its own loss; every format and every step keeps them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.chat_tokenizer import byte_tokenizer
from support.runs import headway

from headway.config.load import validate
from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.open import open_data
from headway.errors import ConfigError, DataError
from headway.prepare.inspect import inspect
from headway.prepare.pack import PackOptions, pack
from headway.store.convert import ConvertOptions, convert
from headway.store.foreign.internlm import InternlmWriter
from headway.store.foreign.mds import open_mds
from headway.store.foreign.mds_writer import MdsTokenWriter
from headway.store.merge import merge
from headway.store.open import open_source
from headway.store.reader import open_store
from headway.store.source import iter_documents

TYPES = {"cn": 12, "code": 5, "en": 8}


def ids_of(name: str, number: int) -> np.ndarray[Any, Any]:
    return np.arange(number % 7 + 3) + 2 + 10 * list(TYPES).index(name)


def internlm(folder: Path) -> Path:
    for name, documents in TYPES.items():
        with InternlmWriter(folder / name / "a.bin") as writer:
            for number in range(documents):
                writer.add(ids_of(name, number))
            writer.finish()
    return folder


def mds(folder: Path) -> Path:
    for name, documents in TYPES.items():
        with MdsTokenWriter(folder / name) as writer:
            for number in range(documents):
                writer.add(ids_of(name, number), domain=f"domain of {name}")
            writer.finish()
    return folder


def data(**settings: Any) -> DataConfig:
    return validate(
        DataConfig, {"seq_len": 16, "workers": 0, "tokenizer_unchecked": True, **settings}
    )


def opened(path: Path, **settings: Any) -> Any:
    return open_data(
        data(train=[{"path": str(path), **settings}]), tokenizer=None, vocab_size=64, seed=1
    )


@pytest.mark.parametrize("kind", ["internlm", "mds", "headway"])
def test_a_folder_of_types_is_a_source_per_type_with_rows_of_its_own(
    tmp_path: Path, kind: str
) -> None:
    path = internlm(tmp_path / "d") if kind != "mds" else mds(tmp_path / "d")
    if kind == "headway":
        convert(path, tmp_path / "s", "headway")
        path = tmp_path / "s"
    opened_data = opened(path)
    assert [name.rsplit("/", 1)[1] for name in opened_data.names] == list(TYPES)
    loader = Loader(
        data(), sources=opened_data.train, rows_per_step=2, micro_rows=2, seed=1, epochs=1
    )
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for step, _ in loader:
        for batch in step.microbatches:
            for row, source in enumerate(batch.source.tolist()):
                seen[source] += [token for token in batch.tokens[row].tolist() if token]
    whole = [
        sorted(int(i) for n in range(count) for i in ids_of(name, n))
        for name, count in TYPES.items()
    ]
    assert [sorted(seen[source]) for source in range(3)] == whole
    config = data(by_type=False, train=[str(path)])
    assert open_data(config, tokenizer=None, vocab_size=64, seed=1).names == [str(path)]


def test_weight_and_limit_of_a_folder_are_shared_out(tmp_path: Path) -> None:
    path = internlm(tmp_path / "d")
    weights = [source.weight for source in opened(path, weight=3.0).train]
    tokens = [sum(len(ids_of(name, n)) for n in range(count)) for name, count in TYPES.items()]
    assert weights == pytest.approx([3 * size / sum(tokens) for size in tokens])
    assert [source.selection.num_documents for source in opened(path, limit=14).train] == [12, 2]


def test_a_validation_folder_is_a_set_for_each_thing_in_it(tmp_path: Path) -> None:
    path = internlm(tmp_path / "valid")
    (path / "README.md").write_text("about")
    train = internlm(tmp_path / "train")
    for valid in (str(path), {"sets": str(path)}):
        opened_data = open_data(
            data(train=str(train), valid=valid), tokenizer=None, vocab_size=64, seed=1
        )
        assert {
            name: many[0].selection.num_documents for name, many in opened_data.valid.items()
        } == TYPES
    (tmp_path / "empty").mkdir()
    for wrong, said in (
        (tmp_path / "empty", "holds no data set"),
        (tmp_path / "none", "there is no such file or folder"),
    ):
        with pytest.raises(ConfigError, match=said):
            open_data(
                data(train=str(train), valid=str(wrong)), tokenizer=None, vocab_size=64, seed=1
            )


def types_of(path: Path) -> dict[str, int]:
    return {name: documents for name, (documents, _) in open_source(path).count_types().items()}


def test_internlm_types_come_back_from_headway_and_mds(tmp_path: Path) -> None:
    path = internlm(tmp_path / "d")
    for step in ("headway", "mds"):
        convert(path, tmp_path / step, step)
        assert types_of(tmp_path / step) == TYPES
        convert(tmp_path / step, tmp_path / f"{step} back", "internlm")
        assert sorted(folder.name for folder in (tmp_path / f"{step} back").iterdir()) == list(
            TYPES
        )
        first = open_source(path)
        second = open_source(tmp_path / f"{step} back")
        assert [(item.type, item.ids.tolist()) for item in iter_documents(first)] == [
            (item.type, item.ids.tolist()) for item in iter_documents(second)
        ]
    open_store(tmp_path / "headway").verify()
    assert {
        name: counts.documents for name, counts in inspect(tmp_path / "headway").types.items()
    } == TYPES
    merged = merge([tmp_path / "headway", tmp_path / "headway"], tmp_path / "merged")
    assert {name: documents for name, (documents, _) in merged.count_types().items()} == {
        k: 2 * v for k, v in TYPES.items()
    }


def test_a_second_type_is_added_to_an_internlm_folder_and_the_first_stays(tmp_path: Path) -> None:
    source = tmp_path / "one"
    with InternlmWriter(source / "x" / "a.bin") as writer:
        writer.add([1, 2, 3])
        writer.finish()
    convert(source, tmp_path / "out", "internlm", ConvertOptions(type="cn"))
    before = (tmp_path / "out" / "cn" / "dataset.bin").read_bytes()
    convert(source, tmp_path / "out", "internlm", ConvertOptions(type="en"))
    assert types_of(tmp_path / "out") == {"cn": 1, "en": 1}
    for options in (ConvertOptions(type="cn"), ConvertOptions(type="en")):
        with pytest.raises(DataError, match=f"{options.type}: already exists and is not empty"):
            convert(source, tmp_path / "out", "internlm", options)
    (tmp_path / "out" / "x").mkdir()
    (tmp_path / "out" / "x" / "mine").touch()
    with pytest.raises(DataError, match="x: already exists and is not empty"):
        convert(source, tmp_path / "out", "internlm")
    assert (tmp_path / "out" / "cn" / "dataset.bin").read_bytes() == before


def test_packs_written_as_mds_are_those_of_headway_and_keep_their_domain(tmp_path: Path) -> None:
    source = mds(tmp_path / "d")
    pack(source, tmp_path / "a", PackOptions(20))
    pack(source, tmp_path / "b", PackOptions(20, to="mds", compression="zstd"))
    packed_store = open_store(tmp_path / "a")
    other = open_mds(tmp_path / "b")
    assert packed_store.num_documents == other.num_documents
    for i in range(packed_store.num_documents):
        length = int(packed_store.lengths(i, i + 1)[0])
        assert packed_store.tokens(i, 0, length).tolist() == other.tokens(i).tolist()
        assert packed_store.span_starts(i).tolist() == other.span_starts(i).tolist()
        assert packed_store.type_of(i) == other.type_of(i)
    assert list(packed_store.count_types()) == [
        "domain of cn", "domain of cn+domain of code", "domain of code+domain of en", "domain of en",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="only --to mds uses it"):
        PackOptions(20, compression="zstd")
    with pytest.raises(DataError, match="already exists and is not empty"):
        pack(source, tmp_path / "b", PackOptions(20, to="mds"))


def test_chat_data_is_written_straight_to_mds(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path / "t")
    records = [
        {
            "messages": [
                {"role": "user", "content": f"a {i}"},
                {"role": "assistant", "content": f"b {i}"},
            ]
        }
        for i in range(9)
    ]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    common = [
        "data",
        "tokenize",
        "--kind",
        "chat",
        "--input",
        str(tmp_path / "chat.jsonl"),
        "--tokenizer",
        str(tmp_path / "t"),
    ]
    for to in ("headway", "mds"):
        done = headway(*common, "--out", str(tmp_path / to), "--to", to)
        assert done.returncode == 0, done.stderr
    direct = open_store(tmp_path / "headway")
    other = open_mds(tmp_path / "mds")
    for i in range(9):
        assert (direct.document(i).tolist(), direct.document_mask(i).tolist()) == (
            other.tokens(i).tolist(),
            other.mask(i).tolist(),
        )
    assert {path.name for path in tmp_path.iterdir()} == {"t", "chat.jsonl", "headway", "mds"}
