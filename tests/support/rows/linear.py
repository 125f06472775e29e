"""Settings of linear attention, state spaces and short convolutions."""

from typing import Any

from headway.config.load import load
from headway.model.layout import param_specs
from headway.train.config import Recipe
from support.setting_runs import Row, built_run, parameter_shapes

LINEAR = (
    "model.vocab_size=64",
    "model.linear_attention.key_heads=2",
    "model.linear_attention.value_heads=4",
    "model.linear_attention.key_head_dim=8",
    "model.linear_attention.value_head_dim=8",
)
SPACE = (
    "model.vocab_size=64",
    "model.state_space.heads=4",
    "model.state_space.head_dim=8",
    "model.state_space.state_size=8",
    "model.state_space.groups=2",
)
SHORT = ("model.vocab_size=64", "model.short_convolution.taps=3")


def sizes(overrides: tuple[str, ...]) -> Any:
    """Name and shape of every parameter."""
    model = load(Recipe, None, list(overrides)).model
    return [(spec.name, spec.shape) for spec in param_specs(model)]


ROWS: dict[str, Row] = {
    "model.linear_attention.key_heads": (LINEAR, 2, 4, sizes),
    "model.linear_attention.value_heads": (LINEAR, 4, 2, sizes),
    "model.linear_attention.key_head_dim": (LINEAR, 8, 4, sizes),
    "model.linear_attention.value_head_dim": (LINEAR, 8, 4, sizes),
    "model.linear_attention.taps": (LINEAR, 4, 3, sizes),
    "model.linear_attention.layers": (LINEAR, None, "[0]", sizes),
    "model.short_convolution.taps": (SHORT, 3, 4, sizes),
    "model.short_convolution.channels": (SHORT, None, 96, sizes),
    "model.short_convolution.bias": (SHORT, False, True, sizes),
    "model.short_convolution.layers": (SHORT, None, "[0]", sizes),
    "model.state_space.heads": (SPACE, 4, 2, sizes),
    "model.state_space.head_dim": (SPACE, 8, 4, sizes),
    "model.state_space.state_size": (SPACE, 8, 4, sizes),
    "model.state_space.groups": (SPACE, 2, 1, sizes),
    "model.state_space.taps": (SPACE, 4, 3, sizes),
    "model.state_space.conv_bias": (SPACE, True, False, sizes),
    "model.state_space.bias": (SPACE, False, True, sizes),
    "model.state_space.layers": (SPACE, None, "[0]", sizes),
    "model.attention_gate": ((), False, True, built_run(parameter_shapes)),
    "model.experts.shared_gate": (
        ("model.experts.num=4", "model.experts.shared_ffn_size=8"),
        False,
        True,
        built_run(parameter_shapes),
    ),
}
