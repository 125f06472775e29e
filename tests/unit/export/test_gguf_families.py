"""A model of every family that is written as GGUF is read back as the same model, and what its architecture of llama.cpp would compute
otherwise is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_cases import BASE, CASES, WHOLE_BLOCKS, gguf_config, gguf_folder

from headway.checkpoint.stored_model import find_model
from headway.errors import ConfigError
from headway.export.gguf_writer import GgufType, export_gguf, gguf_target
from headway.infer.load import load_model
from headway.model.config import ModelConfig
from headway.model.loading.gguf_names import ARCHITECTURE_OF

gguf = pytest.importorskip("gguf")
READ_AS = {"mistral": "llama"}
"""Families that have no architecture of their own, and what a file of them is read as."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def shape(config: ModelConfig) -> dict[str, Any]:
    """What a model computes; how a mixture is balanced in training is not in a file."""
    settings = config.with_(head_dim=config.head_size, num_kv_heads=config.kv_heads).model_dump()
    if config.experts is not None:
        experts = settings["experts"]
        settings["experts"] = {key: experts[key] for key in experts if not key.startswith("aux")}
    return settings


@torch.no_grad()
def logits(model: Path) -> torch.Tensor:
    loaded = load_model(model).model
    tokens = torch.arange(30)[None] * 7 % 300
    return loaded.logits(loaded.hidden_states(tokens, torch.arange(30)[None]))


def test_every_architecture_has_a_case() -> None:
    assert CASES.keys() == ARCHITECTURE_OF.keys()


@pytest.mark.parametrize("family", CASES)
def test_a_file_is_read_back_as_the_same_model(family: str, tmp_path: Path) -> None:
    folder = gguf_folder(gguf_config(family), tmp_path)
    file = export_gguf(folder, tmp_path / "m.gguf", kind="f32").out
    before = shape(find_model(folder).config)
    before["family"] = READ_AS.get(family, family)
    assert shape(find_model(file).config) == before
    expected = logits(folder)
    assert (logits(file) - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize(
    ("kind", "near"), [("q4_k_m", 0.4), ("q5_k_m", 0.2), ("q6_k", 0.1), ("q8_0", 0.03)]
)
def test_a_finer_type_is_nearer(kind: GgufType, near: float, tmp_path: Path) -> None:
    folder = gguf_folder(gguf_config("gemma3", **WHOLE_BLOCKS), tmp_path, spread=0.04)
    result = export_gguf(folder, tmp_path / "m.gguf", kind=kind)
    assert "f16" not in result.stored, "every matrix has whole blocks"
    expected = logits(folder)
    assert (logits(result.out) - expected).abs().max() < near * expected.abs().max()


def test_rows_that_are_no_whole_blocks_take_a_type_with_smaller_ones(tmp_path: Path) -> None:
    folder = gguf_folder(gguf_config("llama"), tmp_path)
    stored = export_gguf(folder, tmp_path / "m.gguf", kind="q5_k_m").stored
    assert stored["q5_1"] > 0
    assert stored["q8_0"] > 0


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("cohere2", {"sliding_window": None, "window_layers": None, "no_rope_layers": (0, 1, 2, 3)}, "sliding_window"),
        ("cohere2", {"no_rope_layers": (0,)}, "no_rope_layers"),
        ("gemma2", {"attention_softcap": None}, "attention_softcap"),
        ("gemma2", {"tie_embeddings": False}, "tie_embeddings"),
        ("gemma3", {"rope_local_theta": None}, "rope_local_theta"),
        ("gemma3", {"attention_scale": 0.3}, "attention_scale"),
        ("olmo2", {"tie_embeddings": True}, "tie_embeddings"),
        ("olmoe", {"num_kv_heads": 2}, "num_kv_heads"),
        ("granite", {"experts": {"num": 4}}, "experts"),
        ("qwen3_moe", {"experts": {"num": 4, "normalize": False}}, "normalize"),
        ("glm4_moe", {"experts": {"num": 4, "router": "sigmoid", "bias_rate": 0.0, "num_groups": 2}}, "num_groups"),
        ("seed_oss", {"output_bias": True}, "output_bias"),
        ("phi3", {"rope_scaling": {"kind": "longrope", "short_factor": (1.0,) * 6, "long_factor": (2.0,) * 6}}, "longrope"),
    ],
)  # fmt: skip
def test_what_an_architecture_computes_otherwise_is_refused(
    family: str, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        gguf_target(gguf_config(family, **changes))


@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_a_family_without_an_architecture_is_refused(family: str) -> None:
    with pytest.raises(ConfigError, match="knows llama"):
        gguf_target(ModelConfig(**{**BASE, "family": family, "num_kv_heads": 4}))
