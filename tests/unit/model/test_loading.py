"""Weights of other trainers come along: merged from shards, renamed, and read without ever running what a file holds."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support.internlm_folder import upstream_classes, write_weights

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.errors import CheckpointError
from headway.model.config import ModelConfig
from headway.model.families import z2all
from headway.model.layout import param_specs

SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "num_layers": 3,
    "num_heads": 4,
    "ffn_size": 24,
    "vocab_size": 40,
    "max_seq_len": 64,
}
INTERNLM = ModelConfig(
    family="internlm", qkv_bias=True, output_bias=True, tie_embeddings=False, **SHAPE
)


def values(config: ModelConfig) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {spec.name: torch.randn(spec.shape) for spec in param_specs(config)}


@pytest.mark.parametrize(
    ("tp", "pp", "by_hidden", "evo"),
    [(1, 1, True, False), (2, 1, True, False), (2, 2, False, True), (4, 2, True, True)],
)
def test_shards_of_internlm_are_merged_over_tensor_and_pipeline_ranks(
    tmp_path: Path, tp: int, pp: int, by_hidden: bool, evo: bool
) -> None:
    ours = values(INTERNLM)
    write_weights(ours, tmp_path / "ckpt", tp, pp, by_hidden=by_hidden, evo=evo)
    model = find_model(tmp_path / "ckpt")
    assert {name: getattr(model.config, name) for name in SHAPE if name != "max_seq_len"} == {
        k: v for k, v in SHAPE.items() if k != "max_seq_len"
    }
    read = dict(model.weights())
    assert read.keys() == ours.keys()
    assert all(torch.equal(read[name], value) for name, value in ours.items())


def test_of_foreign_classes_only_internlms_own_config_is_read_and_as_a_dict(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    write_weights(values(INTERNLM), folder, 1, 1)
    with upstream_classes() as upstream:
        torch.save(
            upstream.Config({"num_attention_heads": 4, "mode": upstream.ParallelMode.DATA}),
            folder / "model_config.pt",
        )
    with pytest.raises(
        CheckpointError, match=r"model_config\.pt: refused.*process_group_initializer\.ParallelMode"
    ):
        find_model(folder)
    with upstream_classes() as upstream:
        torch.save({"blocks.0.norm1.weight": upstream.Config(a=1)}, folder / "model_tp0_pp0.pt")
    with pytest.raises(
        CheckpointError, match=r"model_tp0_pp0\.pt: refused.*parallel_context\.Config"
    ):
        find_model(folder)


def test_what_cannot_be_mapped_and_what_is_missing_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "ckpt"
    write_weights(values(INTERNLM), folder, 2, 1)
    state = torch.load(folder / "model_tp1_pp0.pt", weights_only=True)
    torch.save({**state, "model.blocks.0.mlp.moe.gate": torch.ones(1)}, folder / "model_tp1_pp0.pt")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.mlp\.moe\.gate cannot be mapped"):
        find_model(folder)
    (folder / "model_tp1_pp0.pt").rename(folder / "model_tp2_pp0.pt")
    with pytest.raises(CheckpointError, match=r"model_tp1_pp0\.pt: no such file"):
        find_model(folder)


Z2ALL_CONFIG = json.dumps({
    "model_type": "z2all", "hidden_dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "intermediate_size": 24, "vocab_size": 40,
    "attention_bias": True, "tie_word_embeddings": False, "attention_dropout": 0.0, "dropout1": 0.0, "dropout2": 0.0,
    "initializer_range": 0.02, "loss_reduction": "none", "max_seq_len": 64, "multiple_of": 8, "pad_token_id": 6, "rms_norm_eps": 1e-5,
    "residual_in_fp32": True, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 10000.0, "transformers_version": "4.44.2",
    "use_flash": True, "use_fused_cross_entropy": True, "use_fused_dropout_add_norm": True, "use_fused_rmsnorm": True,
    "use_fused_rope": True, "use_fused_swiglu": True, "auto_map": {"AutoConfig": "configuration_z2all.Z2allConfig"},
})  # fmt: skip
"""As upstream's own class writes it."""


def zero2all_name(name: str) -> str:
    """Our name as zero2all writes it."""
    name = "model.norm1.weight" if name == "model.norm.weight" else name
    for left, right in z2all.TENSORS.items():
        name = name if left == "mlp.swiglu." else name.replace(right, left)
    return name


@pytest.mark.parametrize(
    ("file", "prefix"), [("ckpt/best1_model.pt", ""), ("last1_model.pt", "module.")]
)
def test_a_run_of_zero2all_is_read_under_its_own_names(
    tmp_path: Path, file: str, prefix: str
) -> None:
    (tmp_path / "ckpt").mkdir()
    (tmp_path / "config.json").write_text(Z2ALL_CONFIG)
    config = z2all.read(json.loads(Z2ALL_CONFIG))
    ours = values(config)
    masks = {f"model.layers.{i}.self_attn.causal_mask": torch.zeros(1, 1, 64, 64) for i in range(2)}
    torch.save(
        {prefix + zero2all_name(name): value for name, value in {**ours, **masks}.items()},
        tmp_path / file,
    )
    read = dict(find_model(tmp_path).weights())
    assert read.keys() == ours.keys()
    assert all(torch.equal(read[name], value) for name, value in ours.items())


def test_a_run_of_zero2all_with_its_tokenizer_files_generates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    monkeypatch.setattr("headway.tokenizer.zero2all_folder.FIRST", len(letters))
    backend = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.save(str(tmp_path / "my_tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "MyHFTokenizer", "added_tokens_decoder": {}}'
    )
    (tmp_path / "special_tokens_map.json").write_text("{}")
    described = json.loads(Z2ALL_CONFIG) | {"vocab_size": 320}
    (tmp_path / "config.json").write_text(json.dumps(described))
    (tmp_path / "ckpt").mkdir()
    weights = {zero2all_name(name): value for name, value in values(z2all.read(described)).items()}
    torch.save(weights, tmp_path / "ckpt" / "last1_model.pt")
    options = [
        "--model",
        str(tmp_path),
        "--prompt",
        "hello",
        "--max-new-tokens",
        "3",
        "--device",
        "cpu",
    ]
    assert main(["generate", *options]) == 0
    assert capfd.readouterr().out.startswith("hello")


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
        files = {
            name: f"pytorch_model-{1 + (i >= 5):05}-of-00002.bin" for i, name in enumerate(names)
        }
        for file in set(files.values()):
            torch.save({name: ours[name] for name in names if files[name] == file}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        torch.save(ours, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    read = dict(find_model(tmp_path).weights())
    assert all(torch.equal(read[name], value) for name, value in ours.items())
    assert read.keys() == ours.keys()


def find_shape(text: str) -> ModelConfig:
    from headway.model.families import llama

    return llama.read(json.loads(text))


class Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "last1_model.pt", "model_tp0_pp0.pt"])
@pytest.mark.parametrize("plain", [True, False])
def test_a_file_that_holds_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, plain: bool
) -> None:
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
