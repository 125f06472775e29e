"""Greedy text of the engine is that of transformers' generate on the exported folder, for every family: alone, in a full batch, with
prefix reuse and without."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.export.huggingface import export_huggingface
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.load import load_model
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs

BASE = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=56,
    max_seq_len=128,
)
FAMILIES: dict[str, ModelConfig] = {
    "llama": BASE,
    "mistral": BASE.with_(family="mistral", sliding_window=6, tie_embeddings=False),
    "qwen2": BASE.with_(
        family="qwen2", qkv_bias=True, sliding_window=5, window_layers=(0, 2), tie_embeddings=False
    ),
    "qwen3": BASE.with_(family="qwen3", qk_norm=True, head_dim=16),
    "deepseek_v3": BASE.with_(
        family="deepseek_v3",
        num_kv_heads=None,
        rope_interleaved=True,
        latent_attention={
            "kv_rank": 24,
            "q_rank": 20,
            "nope_head_dim": 10,
            "rope_head_dim": 6,
            "value_head_dim": 12,
        },
        experts={
            "num": 8,
            "per_token": 3,
            "ffn_size": 16,
            "shared_ffn_size": 16,
            "router": "sigmoid",
            "first_dense": 1,
            "num_groups": 2,
        },
    ),
    "gpt_oss": BASE.with_(
        family="gpt_oss",
        attention_sinks=True,
        qkv_bias=True,
        output_bias=True,
        sliding_window=5,
        window_layers=(0, 2),
        tie_embeddings=False,
        experts={"num": 4, "per_token": 2, "router_bias": True, "bias": True, "swiglu_limit": 0.8},
    ),
    "qwen3_5": BASE.with_(
        family="qwen3_5",
        norm="rmsnorm1p",
        qk_norm=True,
        attention_gate=True,
        head_dim=12,
        rotary_fraction=0.5,
        linear_attention={
            "key_heads": 2,
            "value_heads": 6,
            "key_head_dim": 10,
            "value_head_dim": 7,
            "layers": [0, 2],
        },
    ),
    "lfm2": BASE.with_(
        family="lfm2", qk_norm=True, short_convolution={"taps": 4, "bias": True, "layers": [0, 2]}
    ),
    "granitemoehybrid": BASE.with_(
        family="granitemoehybrid",
        embed_scale=2.0,
        residual_scale=0.5,
        state_space={"heads": 4, "head_dim": 8, "state_size": 5, "groups": 2, "layers": [0, 2]},
    ),
    "smollm3": BASE.with_(family="smollm3", no_rope_layers=(0, 2), head_dim=12),
}
QUICK = ("mistral", "qwen2", "qwen3_5", "lfm2", "granitemoehybrid")
"""Rings alone, rings and pages, states and pages; tests/unit/model/test_paged_cache.py has every family."""
NEW = 64
PROMPT = 17


def random_weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(11)
    for spec in param_specs(config):
        noise = torch.randn(spec.shape, generator=generator) * 0.2
        yield spec.name, noise + initial_value(spec, config, 0)


def run(engine: InferenceEngine, requests: list[EngineRequest]) -> list[list[int]]:
    numbers = [engine.submit(request) for request in requests]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for event in engine.step():
            tokens[event.request] += event.tokens
    return [tokens[number] for number in numbers]


@pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
)
def test_greedy_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers
    config = FAMILIES[family]
    export_huggingface(config, random_weights(config), tmp_path / "out", tokenizer=None)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.randint(0, 96, (2, PROMPT), generator=torch.Generator().manual_seed(5))
    generated = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    expected = generated[:, PROMPT:].tolist()
    requests = [EngineRequest(tuple(row), NEW, ignore_eos=True) for row in ids.tolist()]
    others = [EngineRequest(tuple(range(size)), 9 + size, ignore_eos=True) for size in (1, 30, 3)]
    loaded = load_model(tmp_path / "out")
    for options in (
        EngineOptions(max_running=5, page_tokens=8, prefill_tokens=20),
        EngineOptions(max_running=5, prefix_reuse=False, lag=True),
    ):
        engine = InferenceEngine(loaded, options)
        assert run(engine, requests[:1]) == expected[:1], "alone"
        assert run(engine, [*others, *requests])[3:] == expected, (
            "in a full batch, and with kept pages where they may be reused"
        )
