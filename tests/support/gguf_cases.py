"""One model of each family that is written as GGUF, with unusual settings that its architecture of llama.cpp has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from headway.export.huggingface import export_huggingface
from headway.model.config import ModelConfig
from headway.model.layout import param_specs
from headway.tokenizer.byte_level import WORDS, byte_level
from headway.tokenizer.load import Tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 96, "max_seq_len": 64,
}  # fmt: skip
WINDOWS: dict[str, Any] = {"sliding_window": 7, "window_layers": (0, 2, 3)}
GEMMA: dict[str, Any] = {
    "norm": "rmsnorm1p", "norm_placement": "both", "activation": "gelu_tanh", "embed_scale": 8.0, "head_dim": 24,
}  # fmt: skip
OLMO: dict[str, Any] = {
    "norm_placement": "after",
    "qk_norm": True,
    "qk_norm_over": "projection",
    "tie_embeddings": False,
}
YARN: dict[str, Any] = {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 16, "beta_fast": 8.0}
SCORED: dict[str, Any] = {"num": 5, "per_token": 2, "bias_rate": 0.0, "aux_loss": 0.0}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"tie_embeddings": False, "qkv_bias": True, "output_bias": True, "ffn_bias": True, "head_dim": 24},
    "mistral": {"head_dim": 24},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "smollm3": {"no_rope_layers": (3,)},
    "mixtral": {"experts": {"num": 5, "per_token": 2, "aux_loss": 0.0}, "tie_embeddings": False},
    "qwen2_moe": {
        "qkv_bias": True, "tie_embeddings": False,
        "experts": {
            "num": 5, "per_token": 2, "ffn_size": 32, "shared_ffn_size": 48, "shared_gate": True, "normalize": False, "aux_loss": 0.0,
        },
    },
    "qwen3_moe": {"qk_norm": True, "head_dim": 24, "experts": {"num": 5, "per_token": 2, "ffn_size": 32, "aux_loss": 0.0}},
    "olmoe": {
        "qk_norm": True, "qk_norm_over": "projection", "tie_embeddings": False, "num_kv_heads": 4,
        "experts": {"num": 5, "per_token": 2, "normalize": False, "aux_loss": 0.0},
    },
    "gemma2": {**GEMMA, **WINDOWS, "attention_softcap": 3.0, "logit_softcap": 5.0},
    "gemma3": {
        **GEMMA, **WINDOWS, "qk_norm": True, "rope_theta": 1e6, "rope_local_theta": 5e3, "rope_scaling": {"kind": "linear", "factor": 4.0},
    },
    "olmo2": OLMO,
    "olmo3": {**OLMO, **WINDOWS, "rope_theta": 5e5, "rope_local_theta": 5e5, "rope_scaling": {**YARN, "attention_factor": 1.2}},
    "granite": {"embed_scale": 3.0, "residual_scale": 0.4, "attention_scale": 0.2, "logit_scale": 0.25, "output_bias": True, "qkv_bias": True},
    "glm4": {"norm_placement": "both", "rope_interleaved": True, "rotary_fraction": 0.5, "head_dim": 24, "qkv_bias": True},
    "phi3": {"rotary_fraction": 0.75, "tie_embeddings": False},
    "cohere2": {
        "norm": "layernorm_no_bias", "parallel_block": True, "rope_interleaved": True, "logit_scale": 0.3, **WINDOWS, "no_rope_layers": (1,),
    },
    "gpt2": {
        "norm": "layernorm", "positions": "learned", "ffn_gate": False, "activation": "gelu_tanh", "qkv_bias": True, "output_bias": True,
        "ffn_bias": True, "num_kv_heads": 4,
    },
    "seed_oss": {"qkv_bias": True, "head_dim": 24},
    "ernie4_5": {"rope_interleaved": True, "head_dim": 24},
    "ernie4_5_moe": {
        "rope_interleaved": True, "experts": {**SCORED, "ffn_size": 32, "shared_ffn_size": 64, "first_dense": 1},
    },
    "ministral3": {"head_dim": 24, "rope_scaling": {**YARN, "attention_factor": 1.0, "query_growth": 0.3}},
    "glm4_moe": {
        "rotary_fraction": 0.5, "qk_norm": True, "qkv_bias": True, "tie_embeddings": False,
        "experts": {**SCORED, "ffn_size": 32, "shared_ffn_size": 32, "first_dense": 1, "router": "sigmoid", "routed_scale": 1.7},
    },
    "minimax_m2": {
        "rotary_fraction": 0.5, "qk_norm": True, "qk_norm_over": "projection", "tie_embeddings": False, "head_dim": 24,
        "experts": {**SCORED, "router": "sigmoid"},
    },
}  # fmt: skip
"""Family -> its settings over BASE."""


def gguf_config(family: str, **more: Any) -> ModelConfig:
    """The shape of one case."""
    settings = {**BASE, **CASES[family], "family": family, **more}
    if "embed_scale" in settings and family.startswith("gemma"):
        settings["embed_scale"] = settings["hidden_size"] ** 0.5
    return ModelConfig(**settings)


WHOLE_BLOCKS: dict[str, Any] = {"hidden_size": 256, "ffn_size": 512, "head_dim": 64}
"""Sizes whose rows are whole blocks of 256, so that no tensor needs a type with smaller blocks."""


def merging_tokenizer() -> Tokenizer:
    """A byte-level tokenizer with a merge: llama.cpp refuses one without any."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocabulary["th"] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    backend.pre_tokenizer = byte_level(WORDS)  # pyright: ignore[reportAttributeAccessIssue]
    backend.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, {"bos": "<s>", "eos": "</s>"}, {}, None)


def gguf_folder(config: ModelConfig, out: Path, spread: float = 0.2) -> Path:
    """A Hugging Face folder with random weights, norms and biases among them.

    `spread`: of matrices. llama.cpp also rounds the activations that quantised matrices read, and a wide spread makes much of that.
    """
    generator = torch.Generator().manual_seed(1)

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for spec in param_specs(config):
            width = 0.3 if len(spec.shape) == 1 else spread
            value = torch.randn(spec.shape, generator=generator) * width
            is_norm = "norm" in spec.groups and spec.name.endswith("weight")
            yield spec.name, value + float(is_norm and config.norm != "rmsnorm1p")

    merging_tokenizer().save(out / "tokenizer")
    export_huggingface(config, weights(), out / "hf", tokenizer=out / "tokenizer")
    return out / "hf"
