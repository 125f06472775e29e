"""Conversion between all formats keeps ids, masks, types and packs."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import ConfigError, DataError
from headway.store.convert import TARGETS, ConvertOptions, convert, convert_built
from headway.store.foreign.internlm import InternlmWriter, open_internlm
from headway.store.foreign.mds import open_mds
from headway.store.open import open_source
from headway.store.reader import open_store
from headway.store.source import iter_documents
from headway.store.writer import StoreWriter

documents = st.lists(
    st.lists(st.tuples(st.integers(1, 65000), st.booleans()), min_size=2, max_size=30),
    min_size=1,
    max_size=8,
)


def native(folder: Path, given_documents: list[list[tuple[int, bool]]], masked: bool) -> Path:
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint="abc", masked=masked) as writer:
        for document in given_documents:
            ids, mask = (np.array(column) for column in zip(*document, strict=True))
            writer.add(ids, mask if masked else None)
        writer.finish()
    return folder


def content(path: Path) -> list[tuple[list[int], list[bool] | None]]:
    """Ids, and the mask of what can be a target: all but the first token."""
    source = open_source(path)
    return [
        (item.ids.tolist(), None if item.mask is None else item.mask.tolist()[1:])
        for item in iter_documents(source)
    ]


@pytest.mark.parametrize("masked", [False, True])
@settings(deadline=None, max_examples=12)
@given(given_documents=documents)
def test_a_store_comes_back_unchanged_from_every_format(
    masked: bool,
    given_documents: list[list[tuple[int, bool]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("convert")
    begin = [(65001, True)]
    store = native(root / "native", [begin + d for d in given_documents], masked)
    for target in TARGETS:
        report = convert(store, root / target, target)
        assert (report.documents, report.begins_added, report.empty_dropped) == (
            len(given_documents),
            0,
            0,
        )
        convert(root / target, root / f"{target} back", "headway")
        back = content(root / f"{target} back")
        expected = content(store)
        assert [ids for ids, _ in back] == [ids for ids, _ in expected]
        if open_store(root / f"{target} back").masked:
            assert [mask for _, mask in back] == [mask for _, mask in expected]
        else:
            assert all(mask is None or all(mask) for _, mask in expected)


def test_types_become_folders_and_domains(tmp_path: Path) -> None:
    for kind in ("cn", "en"):
        with InternlmWriter(tmp_path / "in" / kind / "a.bin") as writer:
            writer.add([1, 2, 3])
            writer.finish()
    convert(tmp_path / "in", tmp_path / "mds", "mds", ConvertOptions(compression="zstd"))
    assert [d.type for d in open_mds(tmp_path / "mds").documents()] == ["cn", "en"]
    convert(tmp_path / "mds", tmp_path / "out", "internlm")
    assert sorted(
        p.relative_to(tmp_path / "out").as_posix() for p in (tmp_path / "out").rglob("*.bin")
    ) == [
        "cn/dataset.bin",
        "en/dataset.bin",
    ]
    convert(tmp_path / "mds", tmp_path / "one", "internlm", ConvertOptions(type="code"))
    assert open_internlm(tmp_path / "one").type_of(1) == "code"


def test_packs_stay_packs_where_the_format_knows_them_and_are_split_where_not(
    tmp_path: Path,
) -> None:
    with StoreWriter(
        tmp_path / "packs", dtype="uint32", tokenizer_fingerprint=None, spans=True
    ) as writer:
        writer.add(np.arange(1, 11), None, np.array([0, 4]))
        writer.finish()
    convert(tmp_path / "packs", tmp_path / "mds", "mds")
    assert open_mds(tmp_path / "mds").span_starts(0).tolist() == [0, 4]  # pyright: ignore[reportOptionalMemberAccess]
    convert(tmp_path / "mds", tmp_path / "back", "headway")
    assert open_store(tmp_path / "back").span_starts(0).tolist() == [0, 4]  # pyright: ignore[reportOptionalMemberAccess]
    assert convert(tmp_path / "mds", tmp_path / "internlm", "internlm").documents == 2


def test_begin_tokens_are_named_or_found_and_counted(tmp_path: Path) -> None:
    store = native(
        tmp_path / "native", [[(1, True), (2, True)], [(3, True), (4, True)]], masked=False
    )
    with pytest.raises(ConfigError, match="--begin-id"):
        convert(store, tmp_path / "a", "zero2all")
    between = tmp_path / ".tmp-a-tokens"
    shutil.copytree(store, between)
    with pytest.raises(ConfigError, match=f"^{tmp_path / 'a'}: documents begin"):
        convert_built(between, tmp_path / "a", "zero2all", ConvertOptions())
    assert not between.exists()
    report = convert(store, tmp_path / "b", "zero2all", ConvertOptions(begin_id=9, seq_len=2))
    assert (report.begins_added, report.tokens) == (2, 6)
    assert content(tmp_path / "b") == [([9, 1, 2], None), ([9, 3, 4], None)]


def test_empty_documents_are_counted_where_mds_cannot_hold_them(tmp_path: Path) -> None:
    with InternlmWriter(tmp_path / "in" / "en" / "a.bin") as writer:
        for ids in ([], [5]):
            writer.add(ids)
        writer.finish()
    report = convert(tmp_path / "in", tmp_path / "out", "mds")
    assert (report.documents, report.empty_dropped) == (1, 1)


@pytest.fixture
def small_store(tmp_path: Path) -> Path:
    return native(tmp_path / "native", [[(1, True), (2, True)]], masked=False)


def test_an_unknown_format_is_refused_with_the_known_ones(
    small_store: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="must be one of headway, internlm, zero2all, mds"):
        convert(small_store, tmp_path / "a", "parquet")


def test_a_folder_in_use_is_refused(small_store: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("x")
    with pytest.raises(DataError, match="not empty"):
        convert(small_store, tmp_path / "full", "mds")


def test_raw_data_is_refused_with_the_command_that_tokenizes_it(tmp_path: Path) -> None:
    (tmp_path / "raw.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match="headway data tokenize"):
        convert(tmp_path / "raw.jsonl", tmp_path / "b", "headway")


def test_a_store_of_packs_without_documents_becomes_an_empty_data_set(tmp_path: Path) -> None:
    with StoreWriter(
        tmp_path / "empty", dtype="uint16", tokenizer_fingerprint="abc", spans=True
    ) as writer:
        writer.finish()
    report = convert(tmp_path / "empty", tmp_path / "mds", "mds")
    assert (report.documents, report.tokens, report.empty_dropped) == (0, 0, 0)
    assert (tmp_path / "mds" / "index.json").is_file()
