"""Small random models of transformers' classes that headway has no family for, with unusual settings; needs transformers 5."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "starcoder2": {"sliding_window": 5},  # tied, biases, LayerNorm, windows
    "gpt_neox": {
        "hidden_dropout": 0.0,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
    "opt": {
        "ffn_dim": 48,
        "word_embed_proj_dim": 16,
        "dropout": 0.0,
    },  # learned positions, a projection before the head
    "phi": {"partial_rotary_factor": 0.5},  # the head has a bias
    "exaone4": {
        "sliding_window": 4,
        "sliding_window_pattern": 2,
    },  # one layer with a window, one without
    "vaultgemma": {
        "head_dim": 8,
        "sliding_window": 4,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 2.0,
    },  # scores, logits
    "cohere": {"logit_scale": 0.25},  # logits are scaled
}
"""model_type -> settings over SHAPE."""


def build_stock(kind: str) -> Any:
    """A model of transformers in evaluation mode, every parameter random."""
    import transformers

    config = transformers.AutoConfig.for_model(kind, **{**SHAPE, **CASES[kind]})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    with torch.no_grad():
        for parameter in dict.fromkeys(model.parameters()):
            parameter.add_(
                torch.randn(parameter.shape, generator=generator)
                * (0.15 if parameter.dim() > 1 else 0.3)
            )
    return model.eval()


def save_stock(model: Any, folder: Path) -> Path:
    """Write a model as transformers writes it."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return folder
