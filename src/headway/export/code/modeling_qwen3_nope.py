"""Qwen 3 with layers that do not rotate: transformers' own classes, whose layers in `no_rope_layers` leave queries and keys as they are.

Loads with `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`; needs transformers 4.57 or newer. Written by headway.
"""

from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention


class Qwen3NopeConfig(Qwen3Config):
    """Qwen 3's settings and `no_rope_layers`: the indices of the layers that do not rotate, from 0."""

    model_type = "qwen3_nope"


class Qwen3NopeAttention(Qwen3Attention):
    """Attention whose angles are all zero; the norm of queries and keys stays."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        *rest: Any,
        **more: Any,
    ) -> Any:
        cos, sin = position_embeddings
        return super().forward(
            hidden_states, (torch.ones_like(cos), torch.zeros_like(sin)), *rest, **more
        )


class Qwen3NopeModel(Qwen3Model):
    """The layers without the head."""

    config_class = Qwen3NopeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in config.no_rope_layers:
            self.layers[layer].self_attn = Qwen3NopeAttention(config, layer)
        self.post_init()


class Qwen3NopeForCausalLM(Qwen3ForCausalLM):
    """The model with its head."""

    config_class = Qwen3NopeConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Qwen3NopeModel(config)
        self.post_init()
