"""Settings of latent attention."""

from typing import Any

from headway.config.load import load
from headway.model.latent_attention import score_scale
from headway.model.layout import param_specs
from headway.model.rope import attention_factor
from headway.train.config import Recipe
from support.setting_runs import Row

LATENT = (
    "model.vocab_size=64",
    "model.latent_attention.kv_rank=8",
    "model.latent_attention.value_head_dim=8",
)
YARN = (*LATENT, "model.rope_scaling.kind=yarn", "model.rope_scaling.factor=8")


def sizes(overrides: tuple[str, ...]) -> Any:
    """The shape of every parameter."""
    return [spec.shape for spec in param_specs(load(Recipe, None, list(overrides)).model)]


def scales(overrides: tuple[str, ...]) -> Any:
    """What scores, cos and sin are multiplied by."""
    model = load(Recipe, None, list(overrides)).model
    return score_scale(model), attention_factor(model.rope_scaling)


ROWS: dict[str, Row] = {
    "model.latent_attention.kv_rank": (LATENT, 8, 12, sizes),
    "model.latent_attention.q_rank": (LATENT, None, 12, sizes),
    "model.latent_attention.nope_head_dim": (LATENT, 128, 8, sizes),
    "model.latent_attention.rope_head_dim": (LATENT, 64, 4, sizes),
    "model.latent_attention.value_head_dim": (LATENT, 8, 12, sizes),
    "model.rope_scaling.mscale": (
        (*YARN, "model.rope_scaling.mscale_all_dim=1.0"),
        0.0,
        0.5,
        scales,
    ),
    "model.rope_scaling.mscale_all_dim": (YARN, 0.0, 1.0, scales),
}
