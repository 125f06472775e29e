"""Runs that begin with a model of text and pictures: its text part trains, final/ and exports of checkpoints hold the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.runs import assert_same_run, make_stores
from support.whole_cases import build_whole

from headway.config.load import load
from headway.export.huggingface import export_model
from headway.infer.load import load_model
from headway.train import train
from headway.train.config import Recipe

pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    make_stores(folder)
    for kind in ("qwen2_5_vl", "gemma4"):
        build_whole(kind).save_pretrained(folder / kind)
    return folder


def go(folder: Path, name: str, kind: str, *more: str) -> dict[str, Any]:
    settings = [
        f"run.dir={folder}", f"run.name={name}", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.tokenizer_unchecked=true",
        f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "steps=4", "device=cpu", "checkpoint.every=2",
        f"init.from={folder}/{kind}", "optim.lr=1e-2", *more,
    ]  # fmt: skip
    return train(load(Recipe, None, settings))


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return {
        name: value
        for file in path.glob("*.safetensors")
        for name, value in load_file(file).items()
    }


@pytest.mark.parametrize(
    ("kind", "more"), [("qwen2_5_vl", ()), ("gemma4", ("model.family=transformers",))]
)
def test_the_text_part_trains_and_the_whole_model_comes_out(
    folder: Path, kind: str, more: tuple[str, ...]
) -> None:
    import transformers

    go(folder, f"run-{kind}", kind, *more)
    run = folder / f"run-{kind}"
    before = tensors(folder / kind)
    after = tensors(run / "final")
    assert before.keys() == after.keys()
    towers = {name for name in before if "visual" in name or "vision" in name}
    assert towers
    assert all(torch.equal(before[name], after[name]) for name in towers)
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - towers)
    tokens = torch.randint(3, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    model = transformers.AutoModelForMultimodalLM.from_pretrained(
        run / "final", attn_implementation="eager"
    ).eval()
    assert type(model).__name__ == type(build_whole(kind)).__name__
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
        for path in (run / "final", run / "checkpoints/latest"):
            ours = load_model(path).model
            gap = (
                (ours.logits(ours.hidden_states(tokens, torch.arange(12)[None])) - wanted)
                .abs()
                .max()
            )
            assert gap < 1e-5

    # A checkpoint alone gives the whole model as well, also where the first folder is gone.
    export_model(run / "checkpoints/latest", folder / f"out-{kind}")
    again = tensors(folder / f"out-{kind}")
    assert again.keys() == after.keys()
    assert all(torch.equal(again[name], after[name]) for name in after)


def test_a_run_on_a_text_part_resumes_bit_for_bit_and_a_second_run_continues_the_whole(
    folder: Path,
) -> None:
    for name in ("whole", "cut"):
        go(folder, name, "qwen2_5_vl")
    # as if it had been killed after step 2
    (folder / "cut/checkpoints/step-00000004/manifest.json").write_text("{}")
    go(folder, "cut", "qwen2_5_vl")
    assert_same_run(folder / "whole", folder / "cut", 4)
    go(folder, "second", "whole/checkpoints/latest")
    towers = [name for name in tensors(folder / "qwen2_5_vl") if "visual" in name]
    first = tensors(folder / "qwen2_5_vl")
    last = tensors(folder / "second/final")
    assert all(torch.equal(first[name], last[name]) for name in towers)


def test_an_adapter_on_a_text_part_is_merged_into_the_whole(folder: Path) -> None:
    go(folder, "lora", "qwen2_5_vl", "adapter.rank=4")
    before = tensors(folder / "qwen2_5_vl")
    after = tensors(folder / "lora/final")
    assert before.keys() == after.keys()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed
    assert not [name for name in changed if "visual" in name]
    tokens = torch.randint(3, 50, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        merged, adapted = (
            load_model(path).model
            for path in (folder / "lora/final", folder / "lora/final/adapter")
        )
        position = torch.arange(12)[None]
        gap = merged.logits(merged.hidden_states(tokens, position)) - adapted.logits(
            adapted.hidden_states(tokens, position)
        )
    assert gap.abs().max() < 1e-4
