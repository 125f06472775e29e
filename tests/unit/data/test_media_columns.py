"""Media columns: every placeholder has its soft token, in any packing; features follow their hash; resumed exactly; mixed with text."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.media_store import TOKENS, content_hash, make_features, make_media_store

from headway.data.batch import Batch
from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.media import MediaColumns, MediaFeatures
from headway.data.mixture import MixtureSource
from headway.data.rows import RowPieces
from headway.data.selection import Selection
from headway.errors import ConfigError, DataError
from headway.store.local_copy import copy_to_local
from headway.store.media_items import (
    ITEMS_NAME,
    MediaItem,
    has_media,
    media_mark,
    read_items,
    write_items,
)
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter


def loader_of(features: MediaFeatures, *stores: Store, state: Any = None, **changes: Any) -> Loader:
    config = DataConfig.model_validate(
        {"seq_len": 32, "window_tokens": 256, "workers": 0, "cache_dir": None, **changes}
    )
    mixed = [MixtureSource(Selection(store)) for store in stores]
    return Loader(
        config,
        sources=mixed,
        rows_per_step=4,
        micro_rows=2,
        seed=1,
        epochs=1,
        state=state,
        media=features,
    )


def batches(loader: Loader) -> list[Batch]:
    with loader:
        return [micro for step, _ in loader for micro in step.microbatches]


def check_slots(batch: Batch, features: MediaFeatures) -> None:
    """Placeholders (ids 1 and 2) have a slot and nothing else has; the tokens of an item are consecutive."""
    slot = batch.extra["media.slot"]
    tokens = batch.tokens
    assert torch.equal((slot >= 0), (tokens == 1) | (tokens == 2))
    begin = 0
    for fill, (name, count) in enumerate(TOKENS.items(), 1):
        items = batch.extra[f"media.{name}"].shape[1]
        here = slot[tokens == fill]
        assert bool(((here >= begin) & (here < begin + items * count)).all())
        begin += items * count
    for row in range(len(slot)):
        used = slot[row][slot[row] >= 0]
        assert len(used.unique()) == len(used)
        assert batch.loss_weight[row][:-1][slot[row][1:] >= 0].sum() == 0


@pytest.mark.parametrize("packing", ["best_fit", "pad", "concat", "one_document"])
def test_every_placeholder_has_its_soft_token(tmp_path: Path, packing: str) -> None:
    store = make_media_store(tmp_path / "s", long=60)
    features = make_features()
    read = batches(loader_of(features, store, packing=packing))
    for batch in read:
        check_slots(batch, features)
    shapes = {name: column.shape for name, column in read[0].extra.items()}
    assert all(
        {name: column.shape for name, column in batch.extra.items()} == shapes for batch in read
    )
    assert all(batch.loss_weight.sum() > 0 for batch in read)


def test_a_row_holds_parts_of_pictures_at_both_ends(tmp_path: Path) -> None:
    pictures = [
        MediaItem(3 * number, "image", content_hash("image", number)) for number in range(8)
    ]
    with StoreWriter(
        tmp_path / "p",
        dtype="uint16",
        tokenizer_fingerprint="f",
        masked=True,
        sources=["kind=chat", media_mark(TOKENS)],
    ) as writer:
        writer.add(np.full(24, 1), np.ones(24, np.bool_))
        write_items(tmp_path / "p", TOKENS, [pictures])
        writer.finish()
    store = open_store(tmp_path / "p")
    features = make_features()
    media_columns = MediaColumns(features, [store], seq_len=8, documents_per_row=4)
    # one document in three rows: tokens 0 to 7, 8 to 15 and 16 to 23
    pieces = RowPieces(
        np.array([0, 1, 2]),
        np.array([0, 0, 0]),
        np.array([0, 8, 16]),
        np.array([8, 8, 8]),
        np.array([True, True, False]),
    )
    columns = media_columns.columns(3, {0: pieces})
    # the second row has the end of picture 2, all of 3 and 4, and the beginning of 5
    assert columns["media.slot"].tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [2, 3, 4, 5, 6, 7, 8, 9],
        [1, 2, 3, 4, 5, 6, 7, 8],
    ]
    table: Any = features.tables["image"]
    np.testing.assert_array_equal(columns["media.image"][1, :4].numpy(), table.array[2:6])
    assert columns["media.image.present"].sum(1).tolist() == [3, 4, 3]


def test_a_row_of_more_parts_of_pictures_than_planned_is_refused_in_one_line(
    tmp_path: Path,
) -> None:
    # Each document is one token longer than a row, so its rest is the last token of a picture;
    # best_fit puts eight such rests into one row.
    picture = [MediaItem(6, "image", content_hash("image", 0))]
    with StoreWriter(
        tmp_path / "long",
        dtype="uint16",
        tokenizer_fingerprint="f",
        masked=True,
        sources=["kind=chat", media_mark(TOKENS)],
    ) as writer:
        for _ in range(16):
            writer.add(np.array([5, 5, 5, 5, 5, 5, 1, 1, 1]), np.ones(9, np.bool_))
        write_items(tmp_path / "long", TOKENS, [picture] * 16)
        writer.finish()
    loader = loader_of(
        make_features(),
        open_store(tmp_path / "long"),
        seq_len=8,
        packing="best_fit",
        max_documents=16,
    )
    with pytest.raises(DataError, match=r"longer than data\.seq_len=8.*--max-length 8"):
        batches(loader)


def test_features_and_presence_follow_the_document(tmp_path: Path) -> None:
    store = make_media_store(tmp_path / "s")
    features = make_features()
    items = read_items(store)
    seen = 0
    whole = [tuple(store.document(i).tolist()) for i in range(store.num_documents)]
    for batch in batches(loader_of(features, store, packing="best_fit")):
        for row in range(len(batch.tokens)):
            bounds = batch.bounds[row].tolist()
            for first, last in pairwise(bounds):
                document = tuple(batch.tokens[row, first:last].tolist())
                if document not in whole:
                    continue  # padding
                number = whole.index(document)
                for item_index in range(items.first[number], items.first[number + 1]):
                    name = list(TOKENS)[items.modality[item_index]]
                    begin = (
                        0
                        if name == "image"
                        else batch.extra["media.image"].shape[1] * TOKENS["image"]
                    )
                    item = (
                        int(batch.extra["media.slot"][row, first + items.offset[item_index]])
                        - begin
                    ) // TOKENS[name]
                    table: Any = features.tables[name]
                    known = table.known.get(items.keys[item_index].tobytes().hex())
                    assert bool(batch.extra[f"media.{name}.present"][row, item]) == (
                        known is not None
                    )
                    expected = np.zeros(table.shape) if known is None else table.array[known]
                    np.testing.assert_array_equal(
                        batch.extra[f"media.{name}"][row, item].numpy(), expected
                    )
                    seen += known is not None
    assert seen > 20


def test_a_resumed_loader_gives_the_same_columns_and_ranks_share_them(tmp_path: Path) -> None:
    store = make_media_store(tmp_path / "s")
    features = make_features()
    with loader_of(features, store) as loader:
        next(loader)
        state = loader.state
        rest = [micro for step, _ in loader for micro in step.microbatches]
    again = batches(loader_of(features, store, state=state, workers=2))
    assert len(rest) == len(again)
    for batch, other in zip(rest, again, strict=True):
        assert all(torch.equal(batch.extra[name], other.extra[name]) for name in batch.extra)


def test_text_sources_mix_with_media(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "t", dtype="uint16", tokenizer_fingerprint="f") as writer:
        for length in range(4, 30):
            writer.add(np.full(length, 5))
        writer.finish()
    store = make_media_store(tmp_path / "s")
    features = make_features()
    read = batches(loader_of(features, store, open_store(tmp_path / "t")))
    sources = {int(source) for batch in read for source in batch.source}
    assert sources == {0, 1}
    for batch in read:
        check_slots(batch, features)
    alone = batches(loader_of(features, open_store(tmp_path / "t")))
    assert all(
        (batch.extra["media.slot"] < 0).all() and batch.extra["media.image"].shape[1] == 1
        for batch in alone
    )


def test_items_travel_with_a_copied_store(tmp_path: Path) -> None:
    store = make_media_store(tmp_path / "s")
    copied = open_store(copy_to_local(tmp_path / "s", tmp_path / "local"))
    assert has_media(copied)
    assert read_items(copied).digest == read_items(store).digest


def test_features_with_other_numbers_of_tokens_are_refused(tmp_path: Path) -> None:
    store = make_media_store(tmp_path / "s")
    features = MediaFeatures(make_features().tables, {"image": 4, "audio": 2})
    with pytest.raises(ConfigError, match="3 tokens for each image"):
        loader_of(features, store)


def test_a_store_whose_items_are_damaged_or_missing_is_refused(tmp_path: Path) -> None:
    store = make_media_store(tmp_path / "s")
    items = tmp_path / "s" / ITEMS_NAME
    items.write_bytes(items.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="checksum"):
        loader_of(make_features(), store)
    items.unlink()
    with pytest.raises(DataError, match="missing"):
        loader_of(make_features(), store)
