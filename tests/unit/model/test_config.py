"""Shapes that cannot be are refused with their key; those at the edge are not."""

import pytest

from headway.model.config import ModelConfig


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_layers": 2, "window_layers": (0,)}, "window_layers is given without sliding_window"),
        (
            {"num_layers": 2, "window_layers": (0, 2), "sliding_window": 8},
            "window_layers holds 2; layers go from 0 to 1",
        ),
        ({"num_layers": 2, "no_rope_layers": (1, 1)}, "different layers"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads is 3; it must divide num_heads=4"),
        ({"hidden_size": 30, "num_heads": 4}, "num_heads is 4; it must divide hidden_size=30"),
        ({"hidden_size": 12, "num_heads": 4}, "head_dim is 3; it must be even"),
        ({"head_gates": {}, "sliding_window": 8}, "gates need heads that see the full context"),
    ],
)
def test_a_shape_that_cannot_be_names_what_is_wrong(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ModelConfig.model_validate(settings)


def test_layers_have_the_window_they_were_given() -> None:
    config = ModelConfig(num_layers=3, sliding_window=8, window_layers=(0, 2))
    assert [config.window_of(layer) for layer in range(3)] == [8, None, 8]
    assert [ModelConfig(num_layers=2, sliding_window=8).window_of(layer) for layer in range(2)] == [
        8,
        8,
    ]
    assert ModelConfig(num_layers=2).window_of(1) is None
