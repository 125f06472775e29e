"""What learned masks are compared with: as many full heads, chosen by chance or by a simple rule."""

from __future__ import annotations

import itertools
import random

import pytest

from headway.model.head_masks.baselines import random_draws, select_evenly, simple_choices
from headway.model.head_masks.masks import HeadMasks

LIKE = HeadMasks(((True, True, True, False), (False,) * 4, (True, False, False, True)), 6, 2)
"""Five of twelve heads full."""


def test_random_draws_keep_the_number_of_full_heads_and_differ() -> None:
    draws = random_draws(LIKE, 20, seed=3)
    assert len(draws) == 20
    for draw in draws:
        assert draw.masks.num_full == LIKE.num_full
        assert (draw.masks.window, draw.masks.sinks) == (6, 2)
    assert all(one.masks != other.masks for one, other in itertools.combinations(draws, 2))
    assert [draw.seed for draw in random_draws(LIKE, 20, seed=3)] == [draw.seed for draw in draws]
    assert draws[0].seed == 3


def test_there_are_no_more_draws_than_masks() -> None:
    small = HeadMasks(((True, False), (False, False)), 6, 2)
    draws = random_draws(small, 9, seed=0)
    assert {draw.masks.full for draw in draws} == {
        tuple(tuple(head == chosen for head in row) for row in ((0, 1), (2, 3)))
        for chosen in range(4)
    }
    all_full = HeadMasks(((True, True),), 6, 2)
    assert [draw.masks for draw in random_draws(all_full, 5, seed=0)] == [all_full]


def test_simple_choices_keep_the_number_of_full_heads_but_windows() -> None:
    scores = [[0.9, 0.8, 0.7, 0.1], [0.2, 0.5, 0.3, 0.1], [0.6, 0.1, 0.2, 0.4]]
    equal, first, windows = simple_choices(LIKE, scores)
    assert equal.kind == "equal"
    assert equal.masks == HeadMasks(
        ((True, True, False, False), (False, True, False, False), (True, False, False, True)), 6, 2
    )
    assert first.masks.full == (
        (True, True, False, False),
        (True, True, False, False),
        (True, False, False, False),
    )
    assert windows.masks.num_full == 0
    for choice in (equal, first, windows):
        assert (choice.masks.window, choice.masks.sinks) == (6, 2)
    assert [choice.kind for choice in simple_choices(LIKE, None)] == ["first", "windows"]
    # Masks with equal layers are no baseline of themselves.
    assert [choice.kind for choice in simple_choices(equal.masks, scores)] == ["first", "windows"]


@pytest.mark.parametrize("num_full", range(13))
def test_layers_differ_by_at_most_one_head_and_keep_their_best(num_full: int) -> None:
    rng = random.Random(num_full)
    scores = [[rng.random() for _ in range(4)] for _ in range(3)]
    masks = select_evenly(scores, num_full)
    counts = [sum(row) for row in masks.full]
    assert sum(counts) == num_full
    assert max(counts) - min(counts) <= 1
    for row, full in zip(scores, masks.full, strict=True):
        kept = [score for score, is_full in zip(row, full, strict=True) if is_full]
        left = [score for score, is_full in zip(row, full, strict=True) if not is_full]
        assert not kept or not left or min(kept) > max(left)
