"""Unusual configurations of each family, as keys of config.json over one small shape: what code that guesses gets wrong.

A family's parity test is its list here; tests/unit/model/families/test_odd_configs.py runs them all by one call.
"""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
YARN: dict[str, Any] = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "beta_fast": 8.0, "beta_slow": 1.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}
SPACE: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": "auto", "mamba_d_state": 7, "mamba_d_conv": 2, "shared_intermediate_size": 36,
}  # fmt: skip
ODD: dict[str, list[dict[str, Any]]] = {
    "qwen2_moe": [
        {**EXPERTS, "shared_expert_intermediate_size": 28, "norm_topk_prob": True, "mlp_only_layers": [0]},
        {
            **EXPERTS, "shared_expert_intermediate_size": 36, "qkv_bias": False, "use_sliding_window": True, "sliding_window": 5,
            "max_window_layers": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
        },
        {**EXPERTS, "shared_expert_intermediate_size": 20, "decoder_sparse_step": 2},
    ],
    "seed_oss": [
        {"head_dim": 20},
        {"head_dim": 12, "attention_bias": False, "attention_out_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ],
    "lfm2": [
        {"layer_types": ["conv", "conv", "full_attention"], "conv_bias": True, "conv_L_cache": 5, "block_multiple_of": 7, "head_dim": 20},
        {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False, "conv_L_cache": 2, "tie_word_embeddings": False},
        {
            "layer_types": ["conv"] * 3, "num_key_value_heads": 1, "block_ffn_dim_multiplier": 1.7, "block_multiple_of": 10,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3},
        },
    ],
    "lfm2_moe": [
        {"layer_types": ["conv", "full_attention", "conv"], **EXPERTS, "num_dense_layers": 1, "conv_L_cache": 5, "norm_eps": 1e-4},
        {
            "layer_types": ["conv"] * 3, **EXPERTS, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False,
            "routed_scaling_factor": 1.7, "tie_embedding": False, "num_key_value_heads": 1,
        },
    ],
    "granitemoehybrid": [
        {
            **SPACE, "layers_block_type": ["mamba", "attention", "mamba"], "num_local_experts": 5, "num_experts_per_tok": 3,
            "time_step_limit": [0.0, {"__float__": "Infinity"}], "mamba_n_groups": 2, "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 2.0,
        },
        {
            **SPACE, "layer_types": ["full_attention", "linear_attention", "full_attention"], "num_local_experts": 0, "mamba_expand": 1,
            "mamba_d_head": 8, "mamba_conv_bias": False, "mamba_proj_bias": True, "position_embedding_type": "rope",
            "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1,
        },
        {**SPACE, "num_local_experts": 0, "mamba_n_heads": 3, "mamba_d_head": 32, "mamba_n_groups": 3, "mamba_d_conv": 5},
    ],
    "ministral3": [
        {"head_dim": 20, "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.3}},
        {
            "head_dim": 8, "sliding_window": 5, "tie_word_embeddings": True,
            "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ],
    "glm4_moe": [
        {**ROUTED, "attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.7, "n_shared_experts": 2},
        {
            **ROUTED, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "num_key_value_heads": 1, "first_k_dense_replace": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
        {**ROUTED, "head_dim": 20, "partial_rotary_factor": 0.8, "tie_word_embeddings": True},
    ],
    "ernie4_5": [
        {"head_dim": 20, "use_bias": True},
        {"head_dim": 12, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ],
    "ernie4_5_moe": [
        {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 20},
        {
            "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 20, "moe_num_shared_experts": 0, "moe_layer_start_index": 2,
            "tie_word_embeddings": False, "num_key_value_heads": 1,
        },
    ],
    "minimax_m2": [
        {"head_dim": 20, "rotary_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2},
        {"head_dim": 12, "num_local_experts": 6, "num_experts_per_tok": 3, "num_key_value_heads": 1, "tie_word_embeddings": True},
    ],
}  # fmt: skip
"""model_type -> settings over SHAPE."""
REQUIRED: dict[str, dict[str, Any]] = {
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"] * 8}
}
"""model_type -> keys without which its class makes no model."""


def odd_config(kind: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A whole config.json."""
    return {"model_type": kind, **SHAPE, **settings}
