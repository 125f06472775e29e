"""Packing ahead of training: what is kept, cut, dropped and repeated, and packs that the loader takes apart again."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headway.cli import main
from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection
from headway.errors import ConfigError, DataError
from headway.prepare.pack import PackOptions, PackReport, pack
from headway.store.convert import convert
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter


def make_store(folder: Path, lengths: list[int], masked: bool = False) -> Path:
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint="f", masked=masked) as writer:
        first = 1
        for length in lengths:
            ids = np.arange(first, first + length)
            writer.add(ids, ids % 3 == 0 if masked else None)
            first += length
        writer.finish()
    return folder


def spans_of(store: Store) -> list[list[list[int]]]:
    """Every pack as the ids of the documents inside it."""
    packs = []
    for i in range(store.num_documents):
        starts = store.span_starts(i)
        assert starts is not None
        packs.append([piece.tolist() for piece in np.split(store.document(i), starts[1:])])
    return packs


def packed(
    folder: Path, lengths: list[int], masked: bool = False, **options: Any
) -> tuple[list[list[list[int]]], PackReport]:
    report = pack(
        make_store(folder / "in", lengths, masked), folder / "out", PackOptions(**options)
    )
    store = open_store(folder / "out")
    store.verify()
    assert store.fingerprint == "f"
    assert report.tokens == store.num_tokens
    assert report.packs == store.num_documents
    if masked:
        for i in range(store.num_documents):
            mask = store.document_mask(i)
            assert mask is not None
            assert mask.tolist() == [int(t) % 3 == 0 for t in store.document(i)]
    return spans_of(store), report


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    length=st.integers(2, 20),
    mode=st.sampled_from(["concat", "best_fit"]),
    min_length=st.sampled_from([1, 1, 5]),
    masked=st.booleans(),
)
def test_concat_and_best_fit_lose_nothing(
    tmp_path_factory, lengths, length, mode, min_length, masked
) -> None:
    lengths = [*lengths, 5]
    packs, report = packed(
        tmp_path_factory.mktemp("p"),
        lengths,
        masked,
        pack_length=length,
        mode=mode,
        min_length=min_length,
        workers=1,
    )
    firsts = np.cumsum([1, *lengths])
    kept = [
        t
        for first, n in zip(firsts, lengths, strict=False)
        if n >= min_length
        for t in range(first, first + n)
    ]
    assert sorted(t for pack in packs for span in pack for t in span) == kept
    assert all(span == list(range(span[0], span[0] + len(span))) for pack in packs for span in pack)
    assert all(sum(map(len, pack)) <= length for pack in packs)
    if mode == "concat":
        assert [t for pack in packs for span in pack for t in span] == kept
        assert all(sum(map(len, pack)) == length for pack in packs[:-1])
    assert report.dropped_tokens == sum(n for n in lengths if n < min_length)
    assert report.utilisation == pytest.approx(len(kept) / (len(packs) * length))


def test_prulong_drops_short_rests_and_the_last_buffer(tmp_path: Path) -> None:
    # Documents 1-6, 7-12, 13-23, 24-26 in packs of 8.
    packs, report = packed(tmp_path, [6, 6, 11, 3], pack_length=8, mode="prulong", min_length=5)
    assert packs == [[[1, 2, 3, 4, 5, 6], [7, 8]], [list(range(13, 21))]]
    assert (report.cut_documents, report.dropped_tokens) == (2, 4 + 3 + 3)


def test_prulong_keeps_long_rests_with_overlap(tmp_path: Path) -> None:
    packs, report = packed(
        tmp_path, [6, 6, 11], pack_length=8, mode="prulong", overlap=1, keep_last=True
    )
    assert packs == [
        [[1, 2, 3, 4, 5, 6], [7, 8]],
        [[8, 9, 10, 11, 12], [13, 14, 15]],
        [[15, 16, 17, 18, 19, 20, 21, 22]],
        [[22, 23]],
    ]
    assert (report.repeated_tokens, report.dropped_tokens) == (3, 0)


def test_prulong_intact_never_continues_a_document(tmp_path: Path) -> None:
    packs, report = packed(
        tmp_path, [6, 6, 11, 5], pack_length=8, mode="prulong", intact=True, keep_last=True
    )
    assert packs == [[[1, 2, 3, 4, 5, 6], [7, 8]], [list(range(13, 21))], [[24, 25, 26, 27, 28]]]
    assert report.dropped_tokens == 4 + 3


def test_prulong_splits_by_lengths_first(tmp_path: Path) -> None:
    packs, report = packed(
        tmp_path, [7, 1, 12], pack_length=8, mode="prulong", split_by_lengths=(2, 4), keep_last=True
    )
    assert packs == [
        [[1, 2, 3, 4], [5, 6], [9, 10]],
        [[11, 12], [13, 14, 15, 16], [17, 18]],
        [[19, 20]],
    ]
    assert (report.short_documents, report.dropped_tokens) == (1, 2)


def test_the_loader_keeps_the_documents_of_a_pack_apart(tmp_path: Path) -> None:
    packed(tmp_path, [3, 4, 5, 2, 9, 1] * 20, pack_length=16)
    source = [MixtureSource(Selection(open_store(tmp_path / "out")))]
    apart = {tuple(span) for pack in spans_of(open_store(tmp_path / "out")) for span in pack}
    rows = set()
    for step, _ in Loader(
        DataConfig(seq_len=16, max_documents=17, workers=0),
        sources=source,
        rows_per_step=2,
        micro_rows=2,
        seed=1,
        epochs=1,
    ):
        batch = step.microbatches[0]
        for row in range(2):
            starts = [b for b in batch.bounds[row].tolist() if b < 16] + [16]
            rows |= {tuple(batch.tokens[row, a:b].tolist()) for a, b in pairwise(starts)}
    assert {span for span in rows if span[0]} == apart


def test_packing_packs_takes_them_apart(tmp_path: Path) -> None:
    first, _ = packed(tmp_path, [3, 4, 5, 2, 9], pack_length=12)
    pack(tmp_path / "out", tmp_path / "again", PackOptions(6))
    again = spans_of(open_store(tmp_path / "again"))
    assert [t for pack in again for span in pack for t in span] == [
        t for pack in first for span in pack for t in span
    ]
    assert again[0] == [[1, 2, 3], [4, 5, 6]]
    assert again[1][0] == [7]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pack_length": 1}, "pack_length is 1"),
        ({"pack_length": 8, "overlap": 2}, "only mode prulong"),
        ({"pack_length": 8, "overlap": 8, "mode": "prulong"}, "0 to pack_length - 1 = 7"),
        ({"pack_length": 8, "mode": "best"}, "one of concat, best_fit, prulong"),
        ({"pack_length": 8, "mode": "best_fit", "keep_last": False}, "no partly filled last pack"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        PackOptions(**options)


def test_data_pack_prints_packs_utilisation_and_dropped_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = make_store(tmp_path / "s", [30, 50])
    arguments = ["--pack-length", "16", "--json"]
    assert main(["data", "pack", str(store), str(tmp_path / "p"), *arguments]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["packs"], report["utilisation"], report["dropped_tokens"]) == (5, 1.0, 0)


def test_lengths_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [30, 50])
    arguments = ["--pack-length", "99", "--mode", "prulong", "--split-by-lengths", "1,x"]
    assert main(["data", "pack", str(store), str(tmp_path / "q"), *arguments]) == 2


def test_a_store_shorter_than_one_pack_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "s", [30, 50])
    with pytest.raises(DataError, match="has too few tokens for a pack of 99"):
        pack(store, tmp_path / "q", PackOptions(99, "prulong"))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    pack_length=st.integers(2, 20),
    overlap=st.integers(0, 19),
    min_length=st.integers(1, 12),
    parts=st.lists(st.integers(1, 30), max_size=3, unique=True),
    kind=st.sampled_from(["headway", "mds", "packs"]),
)
def test_an_overlap_never_leaves_its_document(
    tmp_path_factory, lengths, pack_length, overlap, min_length, parts, kind
) -> None:
    folder = tmp_path_factory.mktemp("overlap")
    overlap %= pack_length
    source = make_store(folder / "in", lengths, masked=True)
    if kind == "mds":
        convert(source, folder / "mds", "mds")
        source = folder / "mds"
    elif kind == "packs":
        pack(source, folder / "packs", PackOptions(17))
        source = folder / "packs"
    options = PackOptions(pack_length, "prulong", min_length, overlap, tuple(parts), keep_last=True)
    assume(not parts or max(lengths) >= min(parts))
    assume(kind != "packs" or not parts or min(17, sum(lengths)) >= min(parts))
    report = pack(source, folder / "out", options)
    store = open_store(folder / "out")
    owner = np.repeat(np.arange(len(lengths)), lengths)
    seen: dict[int, int] = {}
    for number in range(store.num_documents):
        assert store.document_mask(number).tolist() == [
            int(t) % 3 == 0 for t in store.document(number)
        ]
    for piece in (piece for spans in spans_of(store) for piece in spans):
        assert piece == list(range(piece[0], piece[0] + len(piece))), (
            "a piece is a stretch of the source"
        )
        assert len({int(owner[token - 1]) for token in piece}) == 1, "of one document"
        for token in piece:
            seen[token] = seen.get(token, 0) + 1
    assert sum(count - 1 for count in seen.values()) == report.repeated_tokens
    assert len(seen) + report.dropped_tokens == sum(lengths)
    assert report.tokens == len(seen) + report.repeated_tokens


def test_a_cut_in_a_documents_first_tokens_repeats_only_those(tmp_path: Path) -> None:
    spans, report = packed(
        tmp_path, [9, 20], pack_length=10, mode="prulong", overlap=4, keep_last=True
    )
    # Document 2 (ids 10 to 29) is cut after its first token: the rest repeats that one, not three tokens of document 1.
    assert spans[0] == [list(range(1, 10)), [10]]
    assert spans[1][0] == list(range(10, 20))
    assert report.repeated_tokens == 1 + 4 + 4
