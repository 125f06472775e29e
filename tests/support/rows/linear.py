"""Settings of linear attention and short convolutions."""

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
    "model.attention_gate": ((), False, True, built_run(parameter_shapes)),
    "model.experts.shared_gate": (
        ("model.experts.num=4", "model.experts.shared_ffn_size=8"),
        False,
        True,
        built_run(parameter_shapes),
    ),
}
