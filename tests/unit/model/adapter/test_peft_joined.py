"""Adapters of families whose files join or transpose linears: PEFT's modules hold the same updates, and ours come back as they were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.errors import HeadwayError
from headway.export.adapter import write_adapter
from headway.export.huggingface import export_huggingface
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.lora import merged, with_updates
from headway.model.adapter.peft import PREFIX, adapter_settings, read_adapter
from headway.model.config import ModelConfig
from headway.model.layout import param_specs
from headway.runtime.digests import DIGESTS

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_size": 48,
    "vocab_size": 40,
    "max_seq_len": 32,
}
HYBRID = {
    "linear_attention.key_heads": 2,
    "linear_attention.value_heads": 4,
    "linear_attention.key_head_dim": 5,
    "linear_attention.value_head_dim": 6,
    "linear_attention.layers": "[0]",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "phi3": {"num_kv_heads": 2},
    "glm4": {"num_kv_heads": 2, "head_dim": 8, "qkv_bias": True},
    "gpt2": {"num_kv_heads": None},
    "qwen3_next": {"num_kv_heads": 2, "head_dim": 8, **HYBRID},
    "qwen3_5": {"num_kv_heads": 2, "head_dim": 8, **HYBRID},
    "lfm2": {
        "num_kv_heads": 2,
        "short_convolution.layers": "[0]",
        "short_convolution.bias": "true",
    },
    "granitemoehybrid": {
        "num_kv_heads": 2,
        "state_space.heads": 4,
        "state_space.head_dim": 16,
        "state_space.state_size": 6,
        "state_space.groups": 2,
        "state_space.layers": "[0]",
    },
}
MIXTURES = ("qwen3_next",)
"""PEFT takes every feed-forward of these classes for fused experts, also where a model has none."""
TARGETS = [("all",), ("q_proj", "v_proj", "*.1.mlp.up_proj", "down_proj")]


def model_of(family: str) -> ModelConfig:
    from headway.config.load import load
    from headway.train.config import Recipe

    settings = {**SHAPE, **FAMILIES[family]}
    recipe = load(
        Recipe,
        None,
        [
            f"model.family={family}",
            *(f"model.{key}={'null' if v is None else v}" for key, v in settings.items()),
        ],
    )
    return recipe.model


def problem(
    family: str, targets: tuple[str, ...], **more: Any
) -> tuple[ModelConfig, AdapterConfig, dict[str, torch.Tensor]]:
    """A model, an adapter of rank 3 with updates that are not zero, and all tensors by our names."""
    model = model_of(family)
    config = AdapterConfig(rank=3, alpha=5.0, targets=targets, **more)
    drawn = torch.Generator().manual_seed(4)
    base = (
        (spec.name, torch.randn(spec.shape, generator=drawn) * 0.2) for spec in param_specs(model)
    )
    values = dict(with_updates(base, config, config.modules(model), 3, {}))
    return (
        model,
        config,
        {
            name: torch.randn(value.shape, generator=drawn) if "lora_B" in name else value
            for name, value in values.items()
        },
    )


def written(
    folder: Path, model: ModelConfig, config: AdapterConfig, values: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The base and the adapter as folders; returns the updates."""
    export_huggingface(
        model,
        ((spec.name, values[spec.name]) for spec in param_specs(model)),
        folder / "base",
        tokenizer=None,
        dtype="float32",
    )
    updates = {name: value for name, value in values.items() if ".lora_" in name}
    write_adapter(updates, config, model, folder / "adapter", base=str(folder / "base"))
    return updates


def logits(path: Path) -> torch.Tensor:
    model = load_model(path).model
    tokens = torch.arange(18).view(2, 9)
    with torch.no_grad():
        return model.logits(model(tokens, torch.arange(9).expand(2, -1), causal_mask(2, 9)))


@pytest.mark.parametrize(("targets", "rslora"), [(TARGETS[0], False), (TARGETS[1], True)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_stock_modules_hold_the_same_updates_and_ours_come_back(
    family: str, targets: tuple[str, ...], rslora: bool, tmp_path: Path
) -> None:
    model, config, values = problem(family, targets, rslora=rslora)
    updates = written(tmp_path, model, config, values)
    whole = dict(merged(values.items(), config, config.modules(model)))
    export_huggingface(model, whole.items(), tmp_path / "merged", tokenizer=None, dtype="float32")
    base = load_file(tmp_path / "base/model.safetensors")
    right = load_file(tmp_path / "merged/model.safetensors")
    exported = load_file(tmp_path / "adapter/adapter_model.safetensors")
    settings = adapter_settings(config, model, [], None)
    modules = [
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        for name in exported
        if name.endswith("lora_A.weight")
    ]
    assert {f"{module}.weight" for module in modules} == {
        name for name in base if not torch.equal(base[name], right[name])
    }
    for stock_module in modules:
        a, b = (exported[f"{PREFIX}{stock_module}.lora_{part}.weight"] for part in "AB")
        rank = settings.get("rank_pattern", {}).get(stock_module, settings["r"])
        alpha = settings.get("alpha_pattern", {}).get(stock_module, settings["lora_alpha"])
        assert len(a) == rank
        delta = alpha / (rank**0.5 if rslora else rank) * b @ a
        delta = delta.T if settings["fan_in_fan_out"] else delta
        torch.testing.assert_close(
            base[f"{stock_module}.weight"] + delta,
            right[f"{stock_module}.weight"],
            rtol=1e-4,
            atol=1e-4,
        )
    again = read_adapter(tmp_path / "adapter", model)
    assert not again.patterned
    assert again.config.same_form(config, model)
    assert set(again.updates) == set(updates)
    assert all(torch.equal(again.updates[name], value) for name, value in updates.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stock_adapter_without_notes_is_the_same_model(family: str, tmp_path: Path) -> None:
    model, config, values = problem(family, ("all",))
    written(tmp_path, model, config, values)
    right = logits(tmp_path / "adapter")
    (tmp_path / "adapter" / DIGESTS).unlink()  # as of another tool's adapter
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file(load_file(path), path, metadata={"format": "pt"})
    # of other ranks than the settings say: merged only
    assert read_adapter(tmp_path / "adapter", model).patterned
    torch.testing.assert_close(logits(tmp_path / "adapter"), right, rtol=1e-4, atol=1e-4)
    for note in ("{", '{"x": ["y"]}', "[]"):
        save_file(load_file(path), path, metadata={"format": "pt", "joined": note})
        torch.testing.assert_close(logits(tmp_path / "adapter"), right, rtol=1e-4, atol=1e-4)
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    save_file({**tensors, name: tensors[name][:-1].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(HeadwayError):
        read_adapter(tmp_path / "adapter", model)


def test_dora_keeps_our_names_where_files_join_linears(tmp_path: Path) -> None:
    model, config, values = problem("phi3", ("all",), kind="dora")
    updates = written(tmp_path, model, config, values)
    again = read_adapter(tmp_path / "adapter", model)
    assert all(torch.equal(again.updates[name], value) for name, value in updates.items())


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in MIXTURES])
def test_peft_loads_them_over_the_stock_class(
    family: str, targets: tuple[str, ...], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import transformers

    model, config, values = problem(family, targets)
    written(tmp_path, model, config, values)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    reference = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        right = reference(torch.arange(18).view(2, 9)).logits
    torch.testing.assert_close(logits(tmp_path / "adapter"), right, rtol=1e-4, atol=2e-4)
