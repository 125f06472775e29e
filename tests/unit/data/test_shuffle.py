"""Order: a bijection, a split and windows that depend on keys and indices alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.data.row_stream import Windows
from headway.data.selection import Selection, in_valid
from headway.data.shuffle import mix, permuted, shuffled
from headway.data.synthetic import SyntheticSource
from headway.errors import DataError


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 600), key=st.integers(0, 2**63 - 1))
def test_the_permutation_is_a_bijection_that_needs_no_table(count: int, key: int) -> None:
    everything = permuted(np.arange(count), count, key)
    assert sorted(everything.tolist()) == list(range(count))
    some = np.arange(0, count, 7)
    assert permuted(some, count, key).tolist() == everything[some].tolist()


def test_permutations_of_different_keys_differ_and_mix_well() -> None:
    orders = [permuted(np.arange(1000), 1000, key) for key in range(40)]
    assert len({tuple(p.tolist()) for p in orders}) == 40
    displacement = np.mean([np.abs(p - np.arange(1000)).mean() for p in orders])
    assert 300 < displacement < 367, "a random permutation of 1000 moves a place by a third of them"


def test_hashes_are_the_same_on_every_machine() -> None:
    assert mix(np.arange(3), 12345).tolist() == [
        17540659726606785873,
        2454886589211414944,
        3778200017661327597,
    ]
    assert shuffled(8, 1).tolist() == sorted(range(8), key=lambda i: int(mix(np.array([i]), 1)[0]))


@settings(max_examples=30, deadline=None)
@given(fraction=st.floats(0.001, 0.999))
def test_the_split_has_the_wanted_share_and_depends_on_the_index_alone(fraction: float) -> None:
    valid = in_valid(np.arange(20000), fraction)
    assert abs(valid.mean() - fraction) < 0.02
    assert in_valid(np.array([77, 5]), fraction).tolist() == valid[[77, 5]].tolist()


def test_both_sides_of_a_split_together_are_the_source() -> None:
    source = SyntheticSource(100, 0, num_documents=500)
    sides = [
        Selection(source, limit=400, side=side, fraction=0.2).pick(0, 500)[0]
        for side in ("train", "valid")
    ]
    assert sorted(np.concatenate(sides).tolist()) == list(range(400))


@settings(max_examples=50, deadline=None)
@given(
    documents=st.integers(1, 200),
    window=st.integers(100, 5000),
    block=st.integers(1, 5),
    limit=st.none() | st.integers(1, 250),
    min_length=st.integers(1, 300),
)
def test_windows_hold_every_wanted_document_once(
    documents: int, window: int, block: int, limit: int | None, min_length: int
) -> None:
    source = SyntheticSource(100, 0, num_documents=documents)
    selection = Selection(source, limit, min_length)
    windows = Windows(selection, window, block)
    picked = [
        windows.pick(number)
        for b in range(windows.num_blocks)
        for number in windows.of_block(b, key=9)
    ]
    lengths = source.lengths(0, documents)
    wanted = [i for i in range(min(documents, limit or documents)) if lengths[i] >= min_length]
    assert sorted(np.concatenate([docs for docs, _ in picked]).tolist()) == wanted
    for docs, sizes in picked:
        assert sizes.tolist() == lengths[docs].tolist()


def test_a_limit_leaves_no_empty_windows_behind() -> None:
    assert Windows(Selection(SyntheticSource(100, 0), limit=10), 1 << 12, 4).num_windows <= 2


def test_a_min_length_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="lower min_length"):
        Selection(SyntheticSource(100, 0), min_length=5000, limit=64).check()
