"""Runs with an adapter: exact resume, a merged final/ with the adapter beside it, and every way to go on from one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.runs import assert_same_run, headway, make_stores

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.config.load import load
from headway.errors import ConfigError
from headway.export.adapter import export_adapter
from headway.export.huggingface import export_model
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.train import train
from headway.train.config import Recipe

SHAPE = (
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.ffn_size=48",
    "model.vocab_size=64",
)
ADAPTER = ("adapter.rank=4", "adapter.dropout=0.1", "optim.lr=1e-2", "checkpoint.every=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, a base run, and a LoRA run over it."""
    folder = tmp_path_factory.mktemp("adapters")
    make_stores(folder)
    go(folder, "base", *SHAPE, "model.max_seq_len=64")
    go(folder, "lora", f"init.from={folder}/base", *ADAPTER)
    return folder


def settings(folder: Path, name: str, *more: str) -> list[str]:
    return [
        f"run.dir={folder}", f"run.name={name}", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.tokenizer_unchecked=true",
        "data.valid.fraction=0.1", f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "steps=6", "device=cpu", *more,
    ]  # fmt: skip


def go(folder: Path, name: str, *more: str) -> dict[str, Any]:
    return train(load(Recipe, None, settings(folder, name, *more)))


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    model = load_model(path).model
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(5))
    return model.logits(model(tokens, torch.arange(20).expand(2, -1), causal_mask(2, 20)))


def weights(path: Path) -> dict[str, torch.Tensor]:
    return dict(find_model(path).weights())


def test_final_checkpoint_and_adapter_folder_are_one_model(folder: Path) -> None:
    run = folder / "lora"
    final = logits(run)
    for other in (run / "checkpoints" / "latest", run / "final" / "adapter"):
        assert (logits(other) - final).abs().max() <= 1e-5
    assert (logits(folder / "base") - final).abs().max() > 1e-3
    assert json.loads((run / "final" / "adapter" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(folder / "base/final")
    log = (run / "train.log").read_text()
    assert "adapter lora of rank 4 on 14 linear layers: 3,712 parameters" in log


def test_a_stopped_adapter_run_ends_like_the_undisturbed_one(folder: Path) -> None:
    more = (f"init.from={folder}/base", *ADAPTER)
    go(folder, "again", *more)
    for path in (folder / "again" / "checkpoints").glob("step-00000006"):
        (path / "manifest.json").write_text("{}")  # as if it had been killed after step 3
    go(folder, "again", *more)
    assert_same_run(folder / "lora", folder / "again", 6)


def test_export_merges_unless_only_the_adapter_is_asked_for(folder: Path, tmp_path: Path) -> None:
    for model in (folder / "lora", folder / "lora" / "checkpoints" / "latest"):
        export_adapter(model, tmp_path / "adapter")
        ours = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
        stored = load_file(folder / "lora/final/adapter" / "adapter_model.safetensors")
        assert ours.keys() == stored.keys()
        assert all(torch.equal(ours[name], stored[name]) for name in stored)
    export_model(folder / "lora/checkpoints/latest", tmp_path / "whole")
    assert (logits(tmp_path / "whole") - logits(folder / "lora")).abs().max() <= 1e-5
    with pytest.raises(ConfigError, match="contains something other"):
        export_adapter(folder / "lora", tmp_path / "whole")
    refused = headway(
        "export",
        "hf",
        "--model",
        str(folder / "base"),
        "--adapter",
        "--out",
        str(tmp_path / "none"),
    )
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "trained without an adapter" in refused.stderr


@pytest.mark.parametrize("source", ["folders", "checkpoint", "adapter"])
def test_an_adapter_of_the_same_form_goes_on(folder: Path, source: str) -> None:
    starts = {
        "folders": (f"init.from={folder}/base", f"init.adapter={folder}/lora/final/adapter"),
        "checkpoint": (f"init.from={folder}/lora/checkpoints/latest",),
        "adapter": (f"init.from={folder}/lora/final/adapter",),
    }[source]
    name = f"on-{source}"
    go(folder, name, *starts, "adapter.rank=4", "optim.lr=0", "steps=1")
    with (
        open_checkpoint(folder / name / "checkpoints" / "latest") as after,
        open_checkpoint(folder / "lora/checkpoints/latest") as before,
    ):
        names = before.names("master")
        assert names == after.names("master")
        for run_name in names:
            assert torch.equal(after.weight(run_name), before.weight(run_name)), run_name
    assert json.loads((folder / name / "final/adapter/adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(folder / "base/final")


def test_an_adapter_is_merged_into_a_run_without_one_or_with_another(folder: Path) -> None:
    over = (
        f"init.from={folder}/base",
        f"init.adapter={folder}/lora/final/adapter",
        "optim.lr=0",
        "steps=1",
    )
    for name, more in (
        ("plain", ()),
        ("other", ("adapter.rank=2",)),
        ("told", ("adapter.rank=4", "init.merge=true")),
    ):
        go(folder, name, *over, *more)
        for key, value in weights(folder / "lora").items():
            assert torch.allclose(weights(folder / name)[key], value, atol=1e-6), f"{name}: {key}"


def test_parameters_trained_beside_an_adapter_are_saved_with_it(folder: Path) -> None:
    go(
        folder,
        "beside",
        f"init.from={folder}/base",
        *ADAPTER,
        "adapter.kind=dora",
        "train=[norms, embeddings]",
    )
    written = json.loads((folder / "beside" / "final/adapter/adapter_config.json").read_text())
    assert sorted(written["modules_to_save"]) == [
        "embed_tokens",
        "input_layernorm",
        "norm",
        "post_attention_layernorm",
    ]
    assert (
        logits(folder / "beside" / "final/adapter") - logits(folder / "beside")
    ).abs().max() <= 1e-5
    assert not torch.equal(
        weights(folder / "beside")["model.norm.weight"],
        weights(folder / "base")["model.norm.weight"],
    )


def test_settings_that_contradict_an_adapter_are_refused_before_work_starts(folder: Path) -> None:
    base = f"init.from={folder}/base"
    for more, message in (
        (("adapter.targets=[q_porj]", base), "Did you mean 'q_proj'"),
        (("adapter.rank=4", base, "train=['*.mlp.*']"), "whose layer has an adapter"),
        (("init.adapter=somewhere",), "without from"),
        (
            (base, f"init.adapter={folder}/base/final"),
            "init.adapter: .*adapter_config.json: no such file",
        ),
        ((base, "init.merge=true"), "carries no adapter"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(folder, "wrong", *more)
        assert not (folder / "wrong").exists()
