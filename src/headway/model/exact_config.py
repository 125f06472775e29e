"""Which models can be computed in the same bits by trainer and sampler (model/exact.py). Imports
without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.model.config import ModelConfig


def why_not_exact(config: ModelConfig, context: int) -> str:
    """What of a model has no exact form for sequences of `context` tokens; empty where nothing
    stands against it."""
    reasons = {
        "head is not of tokens": config.head != "tokens",
        "its class is not headway's own": config.hf_config is not None,
        "experts": config.experts is not None,
        "latent_attention": config.latent_attention is not None,
        "linear_attention": config.linear_attention is not None,
        "short_convolution": config.short_convolution is not None,
        "state_space": config.state_space is not None,
        "attention_gate": config.attention_gate,
        "attention_sinks": config.attention_sinks,
        "attention_softcap": config.attention_softcap is not None,
        "logit_softcap": config.logit_softcap is not None,
        "head_gates": config.head_gates is not None,
        "rope_local_theta": config.rope_local_theta is not None,
        "rope_scaling.kind=longrope": config.rope_scaling is not None
        and config.rope_scaling.kind == "longrope",
        "dropout": config.dropout > 0,
        f"a sliding_window shorter than {context} tokens": any(
            (config.window_of(layer) or context) < context for layer in range(config.num_layers)
        ),
    }
    return next((reason for reason, stands in reasons.items() if stands), "")
