"""Known model shapes by name, as plain data. `model: {preset: llama-1b}` starts from one; other keys of `model` override it."""

from typing import Any

PRESETS: dict[str, dict[str, Any]] = {
    "laptop": {
        "family": "llama", "hidden_size": 256, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 688, "max_seq_len": 512,
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
}  # fmt: skip
