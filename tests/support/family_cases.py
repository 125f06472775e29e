"""Small random models of transformers' classes, one per family, with settings that break code which guesses; needs transformers."""

from __future__ import annotations

from typing import Any

import torch

SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.3, 1.9],
    "long_factor": [1.0, 2.0, 3.5, 9.0],
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 14, "n_routed_experts": 8,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "head_dim": 24, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 7, "linear_value_head_dim": 9,
}  # fmt: skip
SPACE: dict[str, Any] = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 7, "shared_intermediate_size": 40,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 20, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "no_rope_layer_interval": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True, "head_dim": 20},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "clip_qkv": None}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **LATENT, "q_lora_rank": None, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": True,
            "routed_scaling_factor": 1.7, "n_shared_experts": 2, "rms_norm_eps": 1e-5, "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 16, "mscale": 0.7,
                "mscale_all_dim": 0.9, "beta_fast": 4.0,
            },
        },
    ),
    "deepseek_v3 plain": (
        "DeepseekV3",
        {
            **LATENT, "q_lora_rank": 20, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "norm_topk_prob": False,
            "rope_interleave": False, "n_shared_experts": 1, "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {
            **LATENT, "q_lora_rank": 20, "n_group": 4, "topk_group": 2, "topk_method": "group_limited_greedy", "num_experts_per_tok": 3,
            "routed_scaling_factor": 3.0, "n_shared_experts": 1,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 20, "sliding_window": 5, "swiglu_limit": 0.8, "swiglu_alpha": 2.5,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5e4, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 16,
            },
        },
    ),
    "gemma2": (
        "Gemma2",
        {"head_dim": 20, "query_pre_attn_scalar": 24, "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 20, "query_pre_attn_scalar": 30, "sliding_window": 5, "layer_types": TYPES, "tie_word_embeddings": False,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "phi3": ("Phi3", {"sliding_window": 7, "tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e3}}),
    "phi3 longrope": (
        "Phi3",
        {"hidden_size": 64, "original_max_position_embeddings": 16, "rope_parameters": {**LONG, "partial_rotary_factor": 0.5}},
    ),
    "olmo2": ("Olmo2", {"attention_bias": True, "num_key_value_heads": 1}),
    "olmo3": (
        "Olmo3",
        {
            "sliding_window": 5, "layer_types": TYPES,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5, "original_max_position_embeddings": 16, "attention_factor": 1.2,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.15, "logits_scaling": 7.0,
            "attention_bias": True, "tie_word_embeddings": True,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
    "cohere2": ("Cohere2", {"sliding_window": 5, "layer_types": TYPES, "attention_bias": True, "logit_scale": 0.3}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 20,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mlp_only_layers": [0],
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
        },
    ),
    "qwen3_5": (
        "Qwen3_5Text",
        {
            **LINEAR, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"], "attention_bias": True,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeText",
        {
            **LINEAR, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 20,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "conv_L_cache": 4, "block_multiple_of": 20,
            "block_ffn_dim_multiplier": 1.3, "norm_eps": 1e-4, "tie_word_embeddings": False,
        },
    ),
    "lfm2 plain": ("Lfm2", {"full_attn_idxs": [0], "block_auto_adjust_ff_dim": False, "conv_L_cache": 2, "num_key_value_heads": 1}),
    "lfm2_moe": (
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv"], "conv_bias": True, "num_experts": 5, "num_experts_per_tok": 3,
            "moe_intermediate_size": 20, "num_dense_layers": 1, "routed_scaling_factor": 1.7,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **SPACE, "layer_types": ["linear_attention", "full_attention", "linear_attention"], "mamba_n_groups": 2, "mamba_d_conv": 3,
            "mamba_proj_bias": True, "position_embedding_type": "rope", "attention_bias": True, "num_local_experts": 4,
            "num_experts_per_tok": 2, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.15,
            "logits_scaling": 7.0, "tie_word_embeddings": True,
        },
    ),
    "granitemoehybrid dense": (
        "GraniteMoeHybrid",
        {
            **SPACE, "layer_types": ["full_attention", "linear_attention", "linear_attention"], "mamba_conv_bias": False,
            "num_local_experts": 0, "num_key_value_heads": 1,
        },
    ),
    "seed_oss": ("SeedOss", {"head_dim": 20, "attention_out_bias": True, "residual_dropout": 0.0, "attention_dropout": 0.0}),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 20, "sliding_window": 7,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 0.7,
                "mscale_all_dim": 0.9, "beta_fast": 8.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "glm4_moe": (
        "Glm4Moe",
        {
            "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "n_group": 4, "topk_group": 2, "attention_bias": True,
            "use_qk_norm": True, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7, "n_shared_experts": 2,
        },
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28,
            "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3,
        },
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 20, "use_bias": True}),
    "ernie4_5_moe": ("Ernie4_5_Moe", {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 20, "moe_num_shared_experts": 1}),
    "minimax_m2": ("MiniMaxM2", {"head_dim": 20, "rotary_dim": 8, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt2": (
        "GPT2",
        {
            "n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 72, "n_positions": 64, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
}  # fmt: skip
"""Name of a case, which begins with the family -> class of transformers, and its settings."""


def build_reference(case: str) -> Any:
    """A model of transformers in evaluation mode, every parameter random: an untrained norm or bias would hide mistakes."""
    import transformers

    name, settings = CASES[case]
    shape = {} if name == "GPT2" else SHAPE
    tokens = {
        key: SHAPE[key] for key in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
    }
    config = getattr(transformers, f"{name}Config")(
        **{**shape, **tokens, **settings}, attn_implementation="eager"
    )
    seed = sum(map(ord, case))
    with torch.random.fork_rng():
        # whatever ran before: where two experts are nearly equal, rounding would choose
        torch.manual_seed(seed)
        model = getattr(
            transformers,
            f"{name.removesuffix('Text')}{'LMHeadModel' if name == 'GPT2' else 'ForCausalLM'}",
        )(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        biases = [
            buffer
            for buffer_name, buffer in model.named_buffers()
            if buffer_name.endswith("e_score_correction_bias")
        ]
        for parameter in dict.fromkeys([*model.parameters(), *biases]):
            parameter.add_(
                torch.randn(parameter.shape, generator=generator)
                * (0.15 if parameter.dim() > 1 else 0.3)
            )
    return model.eval()
