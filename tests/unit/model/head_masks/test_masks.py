"""Which heads keep all keys: counts, ranks by score, equal layers, and masks that fit their model."""

from __future__ import annotations

import pytest

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks, num_full_heads, select_heads

FULL = ((True, False, True), (False, False, True))


def test_a_layer_lists_its_full_and_its_streaming_heads() -> None:
    masks = HeadMasks(FULL)
    assert (masks.full_heads(0), masks.streaming_heads(0), masks.full_heads(1)) == (
        (0, 2),
        (1,),
        (2,),
    )
    assert masks.num_full == 3
    assert masks.sparsity == 0.5


@pytest.mark.parametrize(
    ("total", "sparsity", "kept"),
    [(256, 0.7, 76), (10, 0.9, 1), (10, 0.7, 3), (8, 0.0, 8), (8, 1.0, 0), (30, 0.1, 27)],
)
def test_the_number_of_full_heads_is_exact(total: int, sparsity: float, kept: int) -> None:
    assert num_full_heads(total, sparsity) == kept


def test_heads_are_ranked_over_the_whole_model_and_ties_go_to_the_first() -> None:
    scores = ((-9.0, -8.0, 1.0, -9.0), (-9.0, 2.0, 3.0, -8.0))
    assert select_heads(scores, 4).full == (
        (False, True, True, False),
        (False, True, True, False),
    )
    assert select_heads(scores, 6).num_full == 6
    assert select_heads(((0.0, 0.0), (0.0, 0.0)), 3).full == ((True, True), (True, False))


def test_equal_per_layer_gives_every_layer_the_same_count() -> None:
    scores = ((5.0, 4.0, 3.0, 2.0), (1.0, 0.0, -1.0, -2.0), (9.0, 9.0, 9.0, 9.0))
    assert [sum(row) for row in select_heads(scores, 6).full] == [2, 0, 4]
    equal = select_heads(scores, 6, equal_per_layer=True)
    assert [sum(row) for row in equal.full] == [2, 2, 2]
    assert equal.full[1] == (True, True, False, False)
    # 1.5 each rounds up
    assert [sum(row) for row in select_heads(((1.0, 2.0),) * 2, 3, equal_per_layer=True).full] == [
        2,
        2,
    ]


def test_masks_with_other_numbers_of_layers_or_heads_than_the_model_are_refused() -> None:
    HeadMasks(FULL).check(ModelConfig(num_layers=2, num_heads=6, num_kv_heads=3, hidden_size=96))
    with pytest.raises(ConfigError, match="2 layers of 3 KV heads; the model has 4 layers of 4"):
        HeadMasks(FULL).check(ModelConfig())
