"""Rows of preference pairs: whole pairs, chosen before rejected, each once in an epoch, the same for any packing and split."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.preference_pairs import make_pair_store

from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.open import open_data
from headway.data.row_stream import Windows
from headway.data.selection import Selection
from headway.errors import DataError
from headway.store.reader import open_store
from headway.store.writer import StoreWriter
from headway.tasks.preference.source import PAIR, PairReader, PairSource


def read(config: DataConfig, sources: list[MixtureSource], **options: Any) -> list[Any]:
    with Loader(
        config, sources=sources, rows_per_step=8, micro_rows=4, seed=3, epochs=1, **options
    ) as loader:
        return [step for step, _ in loader]


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("max_documents", ["auto", 4])
def test_every_pair_is_read_once_and_lies_whole_in_one_row(
    tmp_path: Path, packing: Any, max_documents: Any
) -> None:
    store = open_store(make_pair_store(tmp_path / "pairs"))
    config = DataConfig(seq_len=64, packing=packing, max_documents=max_documents)
    seen: list[int] = []
    for step in read(config, [MixtureSource(Selection(PairSource(store, 100), max_length=64))]):
        assert step.totals["pairs"] == sum(
            int((micro.extra[PAIR] >= 0).sum()) for micro in step.microbatches
        )
        for micro in step.microbatches:
            for row in range(len(micro.tokens)):
                pairs = [int(pair) - 100 for pair in micro.extra[PAIR][row] if pair >= 0]
                seen += pairs
                for index, document in enumerate(
                    number for pair in pairs for number in (2 * pair, 2 * pair + 1)
                ):
                    begin, end = micro.bounds[row, index : index + 2].tolist()
                    mask = store.document_mask(document)
                    assert mask is not None
                    assert (
                        micro.tokens[row, begin:end].tolist() == store.document(document).tolist()
                    )
                    assert micro.loss_weight[row, begin : end - 1].tolist() == mask[1:].tolist()
                    assert micro.loss_weight[row, end - 1] == 0
    assert sorted(seen) == list(range(40))


def test_ranks_share_the_pairs_of_a_step_and_know_their_number_beforehand(tmp_path: Path) -> None:
    store = open_store(make_pair_store(tmp_path / "pairs"))
    config = DataConfig(seq_len=64)
    source = [MixtureSource(Selection(PairSource(store), max_length=64))]
    whole = read(config, source)
    parts = [read(config, source, rank=rank, world=2) for rank in range(2)]
    for step, left, right in zip(whole, *parts, strict=True):
        assert step.totals["pairs"] == left.totals["pairs"] == right.totals["pairs"]
        together = torch.cat(
            [micro.extra[PAIR] for micro in (*left.microbatches, *right.microbatches)]
        )
        assert torch.equal(together, torch.cat([micro.extra[PAIR] for micro in step.microbatches]))


def test_pairs_at_the_edges_of_windows_are_read_once(tmp_path: Path) -> None:
    writer = StoreWriter(
        tmp_path / "pairs",
        dtype="uint16",
        tokenizer_fingerprint=None,
        masked=True,
        sources=["kind=preference"],
    )
    for length in (
        3,
        5,
        4,
        6,
        2,
        2,
        7,
        3,
    ):  # pairs of 8, 10, 4 and 10 tokens, which start at 0, 8, 18 and 22
        writer.add(np.arange(1, 1 + length, dtype=np.uint16), np.arange(length) >= 1)
    writer.finish()
    source = PairSource(open_store(tmp_path / "pairs"))
    assert [source.first_at(token) for token in (0, 1, 3, 8, 9, 12, 18, 19, 22, 23, 32)] == [
        0,
        1,
        1,
        1,
        2,
        2,
        2,
        3,
        3,
        4,
        4,
    ]
    windows = Windows(Selection(source), 4, 2)
    assert [windows.pick(window)[0].tolist() for window in range(windows.num_windows)] == [
        [0],
        [],
        [1],
        [],
        [2],
        [3],
    ]
    config = DataConfig(seq_len=16, window_tokens=16)
    steps = read(config, [MixtureSource(Selection(source))])
    assert sorted(
        int(pair)
        for step in steps
        for m in step.microbatches
        for pair in m.extra[PAIR].flatten()
        if pair >= 0
    ) == [0, 1, 2, 3]


def test_pairs_longer_than_a_row_are_left_out_and_said(tmp_path: Path) -> None:
    from headway.data.target_check import check_targets

    path = make_pair_store(tmp_path / "pairs", longest=30)
    lengths = PairSource(open_store(path)).lengths(0, 40)
    config = DataConfig(train=(str(path),), seq_len=48, tokenizer_unchecked=True)  # pyright: ignore[reportArgumentType]
    data = open_data(config, tokenizer=None, vocab_size=64, seed=0, reader=PairReader())
    seen = [
        int(pair)
        for step in read(config, list(data.train))
        for micro in step.microbatches
        for pair in micro.extra[PAIR].flatten()
    ]
    assert sorted(pair for pair in seen if pair >= 0) == [i for i in range(40) if lengths[i] <= 48]
    assert (
        f"{int((lengths > 48).sum())} pairs longer than data.seq_len=48 are skipped"
        in check_targets(data, None).lines[0]
    )
    small = config.model_copy(update={"seq_len": 8})
    with pytest.raises(DataError, match=r"no pair fits into a row of data\.seq_len=8 tokens"):
        open_data(small, tokenizer=None, vocab_size=64, seed=0, reader=PairReader())


def test_a_split_keeps_pairs_whole_and_numbers_them_through_over_sources(tmp_path: Path) -> None:
    paths = [make_pair_store(tmp_path / f"pairs{n}", seed=n) for n in range(2)]
    config = DataConfig.model_validate(
        {
            "train": [str(path) for path in paths],
            "valid": {"fraction": 0.3},
            "seq_len": 64,
            "tokenizer_unchecked": True,
        }
    )
    data = open_data(config, tokenizer=None, vocab_size=64, seed=0, reader=PairReader())
    sides = [
        [
            int(pair)
            for step in read(config, list(many))
            for micro in step.microbatches
            for pair in micro.extra[PAIR].flatten()
            if pair >= 0
        ]
        for many in (data.train, data.valid["valid"])
    ]
    assert sorted(sides[0] + sides[1]) == list(range(80))
    assert len(sides[1]) > 5
