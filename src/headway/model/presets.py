"""Known model shapes by name, and what a family always has, as plain data. `model: {preset:
llama-1b}` starts from one; other keys of `model` override it. `model: {family: gemma3}` starts
from that family's form."""

from typing import Any

_DEEPSEEK_HEADS = {"nope_head_dim": 128, "rope_head_dim": 64, "value_head_dim": 128}
_GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "hidden_size": 2880, "num_heads": 64, "num_kv_heads": 8, "head_dim": 64, "ffn_size": 2880, "vocab_size": 201088,
    "max_seq_len": 131072, "rope_theta": 150000.0, "sliding_window": 128, "tie_embeddings": False,
    "rope_scaling": {"kind": "yarn", "factor": 32.0, "original_max_seq_len": 4096, "truncate": False},
}  # fmt: skip
PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {
        "family": "llama", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 688, "max_seq_len": 512,
    },
    "laptop-moe": {
        "family": "mixtral", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 344, "max_seq_len": 512,
        "experts": {"num": 8, "per_token": 2, "aux_loss": 0.01},
    },
    "laptop-mla": {
        "family": "deepseek_v3", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "ffn_size": 688, "max_seq_len": 512,
        "norm_eps": 1e-06, "tie_embeddings": False,
        "latent_attention": {"kv_rank": 64, "q_rank": 96, "nope_head_dim": 32, "rope_head_dim": 16, "value_head_dim": 32},
        "experts": {
            "num": 16, "per_token": 4, "ffn_size": 96, "shared_ffn_size": 96, "router": "sigmoid", "first_dense": 1, "num_groups": 4,
            "groups_per_token": 2, "aux_loss": 0.0, "bias_rate": 0.001,
        },
    },
    "laptop-hybrid": {
        "family": "qwen3_5", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 688, "max_seq_len": 512,
        "norm_eps": 1e-06,
        "linear_attention": {"key_heads": 2, "value_heads": 4, "key_head_dim": 32, "value_head_dim": 64, "taps": 4},
    },
    "llama-100m": {
        "family": "llama", "hidden_size": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 4, "ffn_size": 2048,
        "max_seq_len": 2048,
    },
    "llama-1b": {
        "family": "llama", "hidden_size": 2048, "num_layers": 16, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "ffn_size": 8192,
        "vocab_size": 128256, "max_seq_len": 131072, "rope_theta": 500000.0, "tie_embeddings": True,
    },
    "llama-3b": {
        "family": "llama", "hidden_size": 3072, "num_layers": 28, "num_heads": 24, "num_kv_heads": 8, "head_dim": 128, "ffn_size": 8192,
        "vocab_size": 128256, "max_seq_len": 131072, "rope_theta": 500000.0, "tie_embeddings": True,
    },
    "llama-8b": {
        "family": "llama", "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "ffn_size": 14336, "vocab_size": 128256, "max_seq_len": 131072, "rope_theta": 500000.0, "tie_embeddings": False,
    },
    "qwen2.5-3b": {
        "family": "qwen2", "hidden_size": 2048, "num_layers": 36, "num_heads": 16, "num_kv_heads": 2, "head_dim": 128,
        "ffn_size": 11008, "vocab_size": 151936, "max_seq_len": 32768, "rope_theta": 1000000.0, "norm_eps": 1e-06, "qkv_bias": True,
        "tie_embeddings": True,
    },
    "gpt2": {
        "family": "gpt2", "hidden_size": 768, "num_layers": 12, "num_heads": 12, "ffn_size": 3072, "vocab_size": 50257, "max_seq_len": 1024,
        "norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "ffn_gate": False, "qkv_bias": True, "output_bias": True,
        "ffn_bias": True, "tie_embeddings": True,
    },
    "gemma2-2b": {
        "family": "gemma2", "hidden_size": 2304, "num_layers": 26, "num_heads": 8, "num_kv_heads": 4, "head_dim": 256, "ffn_size": 9216,
        "vocab_size": 256000, "max_seq_len": 8192, "norm": "rmsnorm1p", "norm_placement": "both", "norm_eps": 1e-06,
        "activation": "gelu_tanh", "attention_softcap": 50.0, "logit_softcap": 30.0, "sliding_window": 4096,
        "window_layers": tuple(range(0, 26, 2)), "tie_embeddings": True,
    },
    "gemma3-1b": {
        "family": "gemma3", "hidden_size": 1152, "num_layers": 26, "num_heads": 4, "num_kv_heads": 1, "head_dim": 256, "ffn_size": 6912,
        "vocab_size": 262144, "max_seq_len": 32768, "norm": "rmsnorm1p", "norm_placement": "both", "norm_eps": 1e-06, "qk_norm": True,
        "activation": "gelu_tanh", "rope_theta": 1000000.0, "rope_local_theta": 10000.0, "sliding_window": 512,
        "window_layers": tuple(layer for layer in range(26) if (layer + 1) % 6), "tie_embeddings": True,
    },
    "olmo2-1b": {
        "family": "olmo2", "hidden_size": 2048, "num_layers": 16, "num_heads": 16, "ffn_size": 8192, "vocab_size": 100352,
        "max_seq_len": 4096, "rope_theta": 500000.0, "norm_eps": 1e-06, "norm_placement": "after", "qk_norm": True,
        "qk_norm_over": "projection", "tie_embeddings": False,
    },
    "olmoe-1b-7b": {
        "family": "olmoe", "hidden_size": 2048, "num_layers": 16, "num_heads": 16, "ffn_size": 1024, "vocab_size": 50304,
        "max_seq_len": 4096, "qk_norm": True, "qk_norm_over": "projection", "tie_embeddings": False,
        "experts": {"num": 64, "per_token": 8, "normalize": False, "aux_loss": 0.01, "z_loss": 0.001},
    },
    "qwen3-30b-a3b": {
        "family": "qwen3_moe", "hidden_size": 2048, "num_layers": 48, "num_heads": 32, "num_kv_heads": 4, "head_dim": 128,
        "ffn_size": 6144, "vocab_size": 151936, "max_seq_len": 40960, "rope_theta": 1000000.0, "norm_eps": 1e-06, "qk_norm": True,
        "tie_embeddings": False, "experts": {"num": 128, "per_token": 8, "ffn_size": 768, "aux_loss": 0.001, "aux_layers": "pooled"},
    },
    "deepseek-v2-lite": {
        "family": "deepseek_v2", "hidden_size": 2048, "num_layers": 27, "num_heads": 16, "ffn_size": 10944, "vocab_size": 102400,
        "max_seq_len": 163840, "norm_eps": 1e-06, "tie_embeddings": False, "latent_attention": {"kv_rank": 512, **_DEEPSEEK_HEADS},
        "rope_scaling": {"kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "mscale": 0.707, "mscale_all_dim": 0.707},
        "experts": {
            "num": 64, "per_token": 6, "ffn_size": 1408, "shared_ffn_size": 2816, "first_dense": 1, "normalize": False, "aux_loss": 0.001,
        },
    },
    "deepseek-v3": {
        "family": "deepseek_v3", "hidden_size": 7168, "num_layers": 61, "num_heads": 128, "ffn_size": 18432, "vocab_size": 129280,
        "max_seq_len": 163840, "norm_eps": 1e-06, "tie_embeddings": False,
        "latent_attention": {"kv_rank": 512, "q_rank": 1536, **_DEEPSEEK_HEADS},
        "rope_scaling": {"kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
        "experts": {
            "num": 256, "per_token": 8, "ffn_size": 2048, "shared_ffn_size": 2048, "router": "sigmoid", "first_dense": 3,
            "routed_scale": 2.5, "num_groups": 8, "groups_per_token": 4, "aux_loss": 0.0, "bias_rate": 0.001,
        },
    },
    "gpt-oss-20b": {
        **_GPT_OSS,
        "num_layers": 24, "window_layers": tuple(range(0, 24, 2)), "experts": {"num": 32, "per_token": 4, "aux_loss": 0.0},
    },
    "gpt-oss-120b": {
        **_GPT_OSS,
        "num_layers": 36, "window_layers": tuple(range(0, 36, 2)), "experts": {"num": 128, "per_token": 4, "aux_loss": 0.0},
    },
    "mixtral-8x7b": {
        "family": "mixtral", "hidden_size": 4096, "num_layers": 32, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "ffn_size": 14336, "vocab_size": 32000, "max_seq_len": 32768, "rope_theta": 1000000.0, "tie_embeddings": False,
        "experts": {"num": 8, "per_token": 2, "aux_loss": 0.001, "aux_layers": "pooled"},
    },
}  # fmt: skip

# What every published model of a family has, whatever its size. A recipe that names the family
# alone gets it too; without it the config could not be written as that family.
_GEMMA = {"norm": "rmsnorm1p", "norm_placement": "both", "activation": "gelu_tanh"}
_OLMO = {"norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"}
_HYBRID = {
    "norm": "rmsnorm1p", "qk_norm": True, "attention_gate": True, "rotary_fraction": 0.25, "linear_attention": {},
}  # fmt: skip
FORMS: dict[str, dict[str, Any]] = {
    "qwen3_next": _HYBRID,
    "qwen3_5": _HYBRID,
    "qwen3_5_moe": {**_HYBRID, "experts": {"shared_gate": True, "shared_ffn_size": 512}},
    "lfm2": {"qk_norm": True, "short_convolution": {}},
    "lfm2_moe": {
        "qk_norm": True, "short_convolution": {},
        "experts": {"router": "sigmoid", "sum_offset": 1e-6, "first_dense": 2, "bias_rate": 0.001, "aux_loss": 0.0},
    },
    "granitemoehybrid": {"state_space": {}},
    "gemma2": _GEMMA,
    "gemma3": {**_GEMMA, "qk_norm": True},
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "glm4": {"norm_placement": "both", "rope_interleaved": True, "rotary_fraction": 0.5},
    "qwen2_moe": {"qkv_bias": True, "experts": {"shared_ffn_size": 1408, "shared_gate": True, "aux_layers": "pooled"}},
    "glm4_moe": {
        "rotary_fraction": 0.5,
        "experts": {"router": "sigmoid", "first_dense": 1, "bias_rate": 0.001, "aux_loss": 0.0},
    },
    "ernie4_5": {"rope_interleaved": True},
    "ernie4_5_moe": {
        "rope_interleaved": True, "experts": {"first_dense": 1, "bias_rate": 0.001, "aux_layers": "pooled"},
    },
    "minimax_m2": {
        "qk_norm": True, "qk_norm_over": "projection", "rotary_fraction": 0.5,
        "experts": {"router": "sigmoid", "bias_rate": 0.001, "aux_layers": "pooled"},
    },
    "ministral3": {"rope_scaling": {"kind": "yarn", "factor": 16.0, "original_max_seq_len": 16384, "query_growth": 0.1}},
    "deepseek_v2": {"rope_interleaved": True},
    "deepseek_v3": {"rope_interleaved": True},
    "gpt_oss": {
        "attention_sinks": True, "qkv_bias": True, "output_bias": True,
        "experts": {"router_bias": True, "bias": True, "swiglu_limit": 7.0, "aux_layers": "pooled"},
    },
    "cohere2": {"norm": "layernorm_no_bias", "parallel_block": True, "rope_interleaved": True},
    "gpt2": {
        "norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "ffn_gate": False, "qkv_bias": True, "output_bias": True,
        "ffn_bias": True,
    },
}  # fmt: skip
"""What models of a family always have."""
EMBED_SCALE_BY_WIDTH = ("gemma2", "gemma3")
"""Families whose embeddings are multiplied by the root of their width."""
