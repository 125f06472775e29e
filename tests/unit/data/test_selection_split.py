"""A fraction for validation leaves something on both sides, whatever the number of documents."""

from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.preference_pairs import make_pair_store

from headway.data.selection import Selection, split_side
from headway.errors import ConfigError
from headway.store.open import open_source
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter
from headway.tasks.preference.source import PairSource


def make_store(folder: Path, lengths: list[int]) -> Store:
    ids = iter(range(1, 1 << 30))
    with StoreWriter(folder, dtype="uint32", tokenizer_fingerprint=None) as writer:
        for length in lengths:
            writer.add([next(ids) for _ in range(length)])
        writer.finish()
    return open_store(folder)


def read(selection: Selection) -> list[list[int]]:
    documents, lengths = selection.pick(0, selection.num_documents)
    return [
        selection.source.tokens(d, 0, n).tolist()
        for d, n in zip(documents.tolist(), lengths.tolist(), strict=True)
    ]


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=12),
    fraction=st.sampled_from([1e-9, 0.001, 0.05, 0.3, 0.5, 0.9, 1 - 1e-9]),
    min_length=st.integers(1, 4),
    limit=st.integers(1, 14) | st.none(),
)
def test_both_sides_hold_something_and_share_everything(
    tmp_path_factory, lengths, fraction, min_length, limit
) -> None:
    wanted = Selection(make_store(tmp_path_factory.mktemp("s"), lengths), limit, min_length)
    everything = read(wanted)
    if not everything or (len(everything) == 1 and len(everything[0]) < 2 * max(2, min_length)):
        return
    train = read(split_side(wanted, "train", fraction))
    valid = read(split_side(wanted, "valid", fraction))
    assert train
    assert valid
    assert sorted(chain(*train, *valid)) == sorted(chain(*everything)), "each token is on one side"
    if len(everything) > 1:
        assert all(document in everything for document in train + valid), "whole documents"


def test_documents_that_a_fraction_divides_already_stay_where_they_were(tmp_path: Path) -> None:
    wanted = Selection(make_store(tmp_path / "s", [3] * 400))
    for side in ("train", "valid"):
        assert split_side(wanted, side, 0.1) == Selection(wanted.source, side=side, fraction=0.1)
        assert (
            split_side(wanted, side, 0.1).key
            == Selection(wanted.source, side=side, fraction=0.1).key
        )


def test_the_last_tokens_of_a_single_document_are_for_validation(tmp_path: Path) -> None:
    wanted = Selection(make_store(tmp_path / "s", [1000]))
    assert read(split_side(wanted, "train", 0.1)) == [list(range(1, 901))]
    assert read(split_side(wanted, "valid", 0.1)) == [list(range(901, 1001))]
    assert split_side(wanted, "train", 0.1).key != split_side(wanted, "valid", 0.1).key


def test_what_cannot_be_divided_is_refused_with_a_remedy_that_helps(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"one document, of 3 tokens, which cannot be split.*data\.valid\.sets"
    ):
        split_side(Selection(make_store(tmp_path / "s", [3])), "valid", 0.5)


def test_a_single_pair_cannot_be_divided(tmp_path: Path) -> None:
    pairs = PairSource(open_store(make_pair_store(tmp_path / "p", pairs=1)))
    with pytest.raises(ConfigError, match="one pair, which cannot be split"):
        split_side(Selection(pairs), "train", 0.5)


def test_a_single_conversation_cannot_be_divided(tmp_path: Path) -> None:
    with StoreWriter(
        tmp_path / "s", dtype="uint16", tokenizer_fingerprint=None, masked=True
    ) as writer:
        writer.add(np.arange(100), np.arange(100) > 90)
        writer.finish()
    with pytest.raises(ConfigError, match="one conversation, which cannot be split"):
        split_side(Selection(open_source(tmp_path / "s")), "train", 0.5)


def test_the_parts_of_a_pack_keep_the_documents_inside(tmp_path: Path) -> None:
    with StoreWriter(
        tmp_path / "s", dtype="uint16", tokenizer_fingerprint=None, spans=True
    ) as writer:
        writer.add(np.arange(20), None, np.array([0, 5, 12]))
        writer.finish()
    wanted = Selection(open_source(tmp_path / "s"))
    train = split_side(wanted, "train", 0.4).source
    valid = split_side(wanted, "valid", 0.4).source
    train_starts = train.span_starts(0)
    valid_starts = valid.span_starts(0)
    assert train_starts is not None
    assert valid_starts is not None
    assert train_starts.tolist() == [0, 5]
    assert valid_starts.tolist() == [0]
    assert valid.tokens(0, 0, 8).tolist() == list(range(12, 20))
