"""Weights of other trainers come along: merged from shards, renamed, and read without ever running what a file holds."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.errors import CheckpointError
from headway.infer.load import find_model
from headway.model.config import ModelConfig
from headway.model.families import z2all
from headway.model.layout import param_specs

SHAPE: dict[str, Any] = {"hidden_size": 16, "num_layers": 3, "num_heads": 4, "ffn_size": 24, "vocab_size": 40, "max_seq_len": 64}
INTERNLM = ModelConfig(family="internlm", qkv_bias=True, output_bias=True, tie_embeddings=False, **SHAPE)


def values(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: torch.randn(spec.shape) for spec in param_specs(config)}


def internlm_shards(ours: dict[str, torch.Tensor], folder: Path, tp: int, pp: int, *, by_hidden: bool, evo: bool) -> None:
    """Cut our weights as InternLM's trainer leaves them."""
    folder.mkdir()
    torch.save({"num_attention_heads": 4, "layer_norm_epsilon": 1e-5, "mlp_ratio": 1.5}, folder / "model_config.pt")
    cut = lambda value, dim: value.chunk(tp, dim)  # noqa: E731
    stages = [[0, 1, 2]] if pp == 1 else [[0], [1, 2]]
    for stage, layers in enumerate(stages):
        for rank in range(tp):
            state: dict[str, torch.Tensor] = {}
            if stage == 0:
                state["embedding.weight"] = cut(ours["model.embed_tokens.weight"], 1 if by_hidden else 0)[rank]
            if stage == len(stages) - 1:
                state |= {"norm.weight": ours["model.norm.weight"], "head.weight": cut(ours["lm_head.weight"], 0)[rank]}
            for local, layer in enumerate(layers):
                mine = {name.split(f"layers.{layer}.")[1]: value for name, value in ours.items() if f"layers.{layer}." in name}
                parts = {f"norm{n}.weight": mine[f"{name}_layernorm.weight"] for n, name in ((1, "input"), (2, "post_attention"))}
                for leaf in ("weight", "bias"):
                    parts[f"mixer.Wqkv.{leaf}"] = torch.cat([cut(mine[f"self_attn.{x}_proj.{leaf}"], 0)[rank] for x in "qkv"])
                parts["mixer.out_proj.weight"] = cut(mine["self_attn.o_proj.weight"], 1)[rank]
                if rank == 0:
                    parts["mixer.out_proj.bias"] = mine["self_attn.o_proj.bias"]
                up, down = cut(mine["mlp.up_proj.weight"], 0)[rank], cut(mine["mlp.down_proj.weight"], 1)[rank]
                parts |= {"mlp.w1.weight": cut(mine["mlp.gate_proj.weight"], 0)[rank]}
                parts |= {"mlp.w2.weight": down, "mlp.w3.weight": up} if evo else {"mlp.w2.weight": up, "mlp.w3.weight": down}
                state |= {f"blocks.{local}.{key}": value for key, value in parts.items()}
            torch.save({f"model.{key}": value.clone() for key, value in state.items()}, folder / f"model_tp{rank}_pp{stage}.pt")


@pytest.mark.parametrize(
    ("tp", "pp", "by_hidden", "evo"), [(1, 1, True, False), (2, 1, True, False), (2, 2, False, True), (4, 2, True, True)]
)
def test_shards_of_internlm_are_merged_over_tensor_and_pipeline_ranks(tmp_path: Path, tp: int, pp: int, by_hidden: bool, evo: bool) -> None:
    ours = values(INTERNLM)
    internlm_shards(ours, tmp_path / "ckpt", tp, pp, by_hidden=by_hidden, evo=evo)
    found = find_model(tmp_path / "ckpt")
    assert {name: getattr(found.config, name) for name in SHAPE if name != "max_seq_len"} == {
        k: v for k, v in SHAPE.items() if k != "max_seq_len"
    }
    read = dict(found.weights())
    assert read.keys() == ours.keys()
    assert all(torch.equal(read[name], value) for name, value in ours.items())


def test_what_cannot_be_mapped_and_what_is_missing_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    internlm_shards(values(INTERNLM), folder, 2, 1, by_hidden=True, evo=False)
    state = torch.load(folder / "model_tp1_pp0.pt", weights_only=True)
    torch.save({**state, "model.blocks.0.mlp.moe.gate": torch.ones(1)}, folder / "model_tp1_pp0.pt")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.moe\.gate cannot be mapped"):
        find_model(folder)
    (folder / "model_tp1_pp0.pt").rename(folder / "model_tp2_pp0.pt")
    with pytest.raises(CheckpointError, match=r"model_tp1_pp0\.pt: no such file"):
        find_model(folder)


Z2ALL_CONFIG = json.dumps({
    "model_type": "z2all", "hidden_dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "intermediate_size": 24, "vocab_size": 40,
    "attention_bias": True, "tie_word_embeddings": False,
})  # fmt: skip


def theirs(name: str) -> str:
    """Our name as zero2all writes it."""
    name = "model.norm1.weight" if name == "model.norm.weight" else name
    for left, right in z2all.TENSORS.items():
        name = name if left == "mlp.swiglu." else name.replace(right, left)
    return name


@pytest.mark.parametrize(("place", "prefix"), [("ckpt/best1_model.pt", ""), ("last1_model.pt", "module.")])
def test_a_run_of_zero2all_is_read_under_its_own_names(tmp_path: Path, place: str, prefix: str) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "config.json").write_text(Z2ALL_CONFIG)
    config = z2all.read(json.loads(Z2ALL_CONFIG))
    ours = values(config)
    torch.save({prefix + theirs(name): value for name, value in ours.items()}, tmp_path / place)
    read = dict(find_model(tmp_path).weights())
    assert read.keys() == ours.keys() and all(torch.equal(read[name], value) for name, value in ours.items())


LLAMA_CONFIG = json.dumps({
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24, "vocab_size": 40,
    "tie_word_embeddings": False,
})  # fmt: skip


@pytest.mark.parametrize("sharded", [False, True])
def test_pytorch_model_bin_is_read_whole_or_sharded(tmp_path: Path, sharded: bool) -> None:
    (tmp_path / "config.json").write_text(LLAMA_CONFIG)
    ours = values(find_shape(LLAMA_CONFIG))
    if sharded:
        names = sorted(ours)
        files = {name: f"pytorch_model-{1 + (i >= 5):05}-of-00002.bin" for i, name in enumerate(names)}
        for file in set(files.values()):
            torch.save({name: ours[name] for name in names if files[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(ours, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    read = dict(find_model(tmp_path).weights())
    assert all(torch.equal(read[name], value) for name, value in ours.items()) and read.keys() == ours.keys()


def find_shape(text: str) -> ModelConfig:
    from headway.model.families import llama

    return llama.read(json.loads(text))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "last1_model.pt", "model_tp0_pp0.pt"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_file_that_holds_code_is_refused_and_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, plain: bool) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(LLAMA_CONFIG)
    if name.startswith("model_tp"):
        (tmp_path / "config.json").unlink()
    if plain:
        (tmp_path / name).write_bytes(pickle.dumps({"weights": Payload()}))
    else:
        torch.save({"model.embed_tokens.weight": torch.ones(1), "x": Payload()}, tmp_path / name)
    with pytest.raises(CheckpointError, match=r"refused|cannot be read"):
        list(find_model(tmp_path).weights())
    assert not (tmp_path / "executed").exists()
