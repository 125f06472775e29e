"""Generated data: the same for the same seed, consistent with its own index, learnable."""

from itertools import pairwise

import numpy as np

from headway.data.synthetic import SyntheticSource


def test_index_and_documents_agree() -> None:
    source = SyntheticSource(97, 3, num_documents=200)
    lengths = source.lengths(0, 200)
    starts = np.cumsum([0, *lengths])
    assert source.num_tokens == starts[-1]
    for token in range(0, source.num_tokens + 100, 777):
        assert source.first_at(token) == np.searchsorted(starts[:-1], token, side="left")
    for document in (0, 63, 64, 199):
        ids = source.tokens(document, 0, 10**6)
        assert len(ids) == lengths[document]
        assert ids.max() <= source.max_id
        assert source.tokens(document, 5, 9).tolist() == ids[5:9].tolist()


def test_documents_follow_from_the_seed_and_count_in_steps() -> None:
    synthetic_source = SyntheticSource(1000, 1)
    same = SyntheticSource(1000, 1)
    other = SyntheticSource(1000, 2)
    assert all(
        synthetic_source.tokens(i, 0, 99).tolist() == same.tokens(i, 0, 99).tolist()
        for i in range(50)
    )
    assert any(
        synthetic_source.tokens(i, 0, 99).tolist() != other.tokens(i, 0, 99).tolist()
        for i in range(50)
    )
    ids = synthetic_source.tokens(7, 0, 32).tolist()
    assert [(b - a) % 1000 for a, b in pairwise(ids[2:])] == [ids[1]] * (len(ids) - 3)


def test_any_vocabulary_will_do() -> None:
    assert SyntheticSource(2, 0).tokens(5, 0, 50).max() <= 1
