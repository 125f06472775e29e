"""What each family adds to a small Transformer, as settings of the model; without transformers.

No bias on keys where channels are not rotated: it shifts all scores of a query alike, so its gradient is rounding noise, which Adam
scales up.
"""

from typing import Any

FAMILY_SHAPES: dict[str, dict[str, Any]] = {
    "gemma2": {
        "norm": "rmsnorm1p", "norm_placement": "both", "activation": "gelu_tanh", "embed_scale": 3.0, "attention_scale": 0.2,
        "attention_softcap": 1.5, "logit_softcap": 2.0, "sliding_window": 5, "window_layers": (0,),
    },
    "gemma3": {
        "norm": "rmsnorm1p", "norm_placement": "both", "activation": "gelu_tanh", "embed_scale": 3.0, "qk_norm": True, "head_dim": 6,
        "sliding_window": 5, "window_layers": (0,), "rope_local_theta": 50.0, "rope_scaling": {"kind": "linear", "factor": 4.0},
    },
    "phi3": {
        "head_dim": 8, "rotary_fraction": 0.5,
        "rope_scaling": {
            "kind": "longrope", "factor": 4.0, "original_max_seq_len": 6, "short_factor": (1.0, 1.5), "long_factor": (2.0, 5.0),
        },
    },
    "olmo2": {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"},
    "granite": {"embed_scale": 3.0, "residual_scale": 0.3, "attention_scale": 0.3, "logit_scale": 0.2},
    "glm4": {"norm_placement": "both", "head_dim": 8, "rotary_fraction": 0.5, "rope_interleaved": True},
    "cohere2": {
        "norm": "layernorm_no_bias", "parallel_block": True, "rope_interleaved": True, "logit_scale": 0.3, "sliding_window": 5,
        "window_layers": (0,), "no_rope_layers": (1,), "output_bias": True,
    },
    "deepseek": {
        "num_kv_heads": None, "head_dim": None, "rope_interleaved": True, "attention_scale": 0.3, "output_bias": True,
        "latent_attention": {"kv_rank": 12, "q_rank": 10, "nope_head_dim": 6, "rope_head_dim": 10, "value_head_dim": 8},
    },
    "gpt_oss": {
        "attention_sinks": True, "qkv_bias": True, "output_bias": True, "sliding_window": 5, "window_layers": (0,),
        "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 8, "beta_fast": 8.0, "truncate": False},
        "experts": {"num": 4, "per_token": 2, "ffn_size": 24, "router_bias": True, "bias": True, "swiglu_limit": 0.5},
    },
    "qwen3_5": {
        "norm": "rmsnorm1p", "qk_norm": True, "attention_gate": True, "head_dim": 8, "rotary_fraction": 0.5,
        "linear_attention": {
            "key_heads": 2, "value_heads": 4, "key_head_dim": 5, "value_head_dim": 6, "taps": 3, "layers": (0,),
        },
    },
    "qwen3_next": {
        "norm": "rmsnorm1p", "qk_norm": True, "attention_gate": True, "head_dim": 8, "rotary_fraction": 0.5,
        "linear_attention": {
            "key_heads": 2, "value_heads": 2, "key_head_dim": 6, "value_head_dim": 5, "taps": 4, "layers": (1,),
        },
        "experts": {"num": 4, "per_token": 2, "ffn_size": 24, "shared_ffn_size": 12, "shared_gate": True},
    },
    "lfm2": {"qk_norm": True, "head_dim": 8, "short_convolution": {"taps": 4, "bias": True, "layers": (0,)}},
    "lfm2_moe": {
        "qk_norm": True, "head_dim": 8, "short_convolution": {"layers": (0,)},
        "experts": {
            "num": 4, "per_token": 2, "ffn_size": 24, "router": "sigmoid", "sum_offset": 1e-6, "first_dense": 1, "bias_rate": 0.0,
        },
    },
    "granitemoehybrid": {
        "embed_scale": 3.0, "residual_scale": 0.3, "attention_scale": 0.3, "logit_scale": 0.2,
        "state_space": {
            "heads": 4, "head_dim": 6, "state_size": 5, "groups": 2, "taps": 3, "bias": True, "layers": (0,),
        },
    },
    "state space of one group": {
        "state_space": {"heads": 4, "head_dim": 5, "state_size": 6, "layers": (0,)},
    },
    "ministral3": {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_seq_len": 6, "beta_fast": 8.0, "query_growth": 0.4}},
    "glm4_moe": {
        "head_dim": 8, "rotary_fraction": 0.5, "qkv_bias": True, "qk_norm": True,
        "experts": {"num": 4, "per_token": 2, "ffn_size": 24, "shared_ffn_size": 24, "router": "sigmoid", "routed_scale": 1.5, "bias_rate": 0.0},
    },
    "minimax_m2": {
        "head_dim": 8, "rotary_fraction": 0.5, "qk_norm": True, "qk_norm_over": "projection",
        "experts": {"num": 4, "per_token": 2, "ffn_size": 24, "router": "sigmoid", "bias_rate": 0.0},
    },
    "gpt2": {
        "norm": "layernorm", "positions": "learned", "ffn_gate": False, "activation": "gelu_tanh", "output_bias": True, "ffn_bias": True,
    },
}  # fmt: skip
