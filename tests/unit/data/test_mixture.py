"""Mixtures: every prefix of the global sequence has the wanted shares, whatever the weights."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.mixture import Mixture, MixtureSource
from headway.data.packing import RowShape
from headway.data.row_stream import RowStream, Windows
from headway.data.selection import Selection
from headway.store.reader import Store, open_store
from headway.store.writer import StoreWriter

ROW = 8


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Store]:
    opened = []
    for number in range(4):
        folder: Path = tmp_path_factory.mktemp("store")
        with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint=None) as writer:
            for _ in range(5 + 20 * number):
                writer.add(np.full(ROW, number))
            writer.finish()
        opened.append(open_store(folder))
    return opened


def mixture_of(sources: list[MixtureSource]) -> Mixture:
    shape = RowShape(ROW, 7, "best_fit")
    streams = [
        RowStream(Windows(s.selection, 64, 2), shape, seed=1, number=i, shuffle=True)
        for i, s in enumerate(sources)
    ]
    return Mixture(sources, streams)


@settings(max_examples=40, deadline=None)
@given(weights=st.lists(st.floats(0.001, 1000), min_size=2, max_size=4))
def test_every_prefix_has_the_wanted_shares(stores: list[Store], weights: list[float]) -> None:
    mixture = mixture_of(
        [
            MixtureSource(Selection(store), weight)
            for store, weight in zip(stores, weights, strict=False)
        ]
    )
    shares = np.array(weights) / sum(weights)
    drawn = np.zeros(len(weights))
    for row in range(1, 300):
        drawn[mixture.draw().source] += 1
        assert np.abs(drawn - shares * row).max() < len(weights), (row, drawn)
    assert [cursor.drawn for cursor in mixture.state.cursors] == drawn.tolist()


def test_without_weights_small_sources_are_spread_over_the_whole_epoch(stores: list[Store]) -> None:
    mixture = mixture_of([MixtureSource(Selection(store)) for store in stores])
    order = np.array([mixture.draw().source for _ in range(mixture.num_rows)])
    assert np.bincount(order).tolist() == [5, 25, 45, 65]
    assert mixture.state.epoch == 1
    places = np.flatnonzero(order == 0)
    assert places[0] < 20
    assert places[-1] > 120
    assert np.diff(places).max() < 40


def test_a_repeated_source_is_spread_as_one_of_twice_its_size(stores: list[Store]) -> None:
    small = stores[0]  # five rows
    mixture = mixture_of(
        [MixtureSource(Selection(small), repeat=2), MixtureSource(Selection(small))]
    )
    assert mixture.num_rows == 15
    order = [mixture.draw().source for _ in range(15)]
    # keys (2k + 1) / weight: 1, 3, 5, ... halves against 2, 6, 10, ... halves
    assert order == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0]
    assert mixture.state.epoch == 1


def test_the_sequence_does_not_depend_on_where_reading_began(stores: list[Store]) -> None:
    sources = [
        MixtureSource(Selection(store), repeat=1 + number % 2)
        for number, store in enumerate(stores)
    ]
    whole = mixture_of(sources)
    states = []
    rows = []
    for _ in range(500):
        states.append(whole.state)
        row = whole.draw()
        rows.append((row.source, row.block.plan.document[row.block.plan.first[row.number]]))
    for start in (0, 1, 137, 225, 226, 499):
        streams = mixture_of(sources)._streams
        again = Mixture(sources, streams, states[start])
        row = again.draw()
        assert (row.source, row.block.plan.document[row.block.plan.first[row.number]]) == rows[
            start
        ]
