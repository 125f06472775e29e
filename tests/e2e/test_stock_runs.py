"""Runs of family transformers, from a folder headway has no family for to its export: exact resume, adapters, pairs, text, refusals."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from support.byte_model import byte_tokenizer
from support.preference_pairs import make_pair_store
from support.runs import assert_same_run, headway, make_stores, start_headway, wait_for_step
from support.stock_cases import CASES, build_stock, save_stock
from support.stock_walk import build

from headway.config.load import load
from headway.errors import HeadwayError
from headway.export.adapter import export_adapter
from headway.infer.load import load_model
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe
from headway.train.resolve import resolve

pytest.importorskip("transformers", minversion="5.0")
TEXT = "the cat sat on the mat. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, pairs, and folders of two classes; one has a tokenizer of bytes."""
    folder = tmp_path_factory.mktemp("stock")
    make_stores(folder)
    make_pair_store(folder / "pairs", pairs=40)
    save_stock(build_stock("starcoder2"), folder / "star")
    CASES["stablelm"] = {"vocab_size": 258, "use_qkv_bias": True, "hidden_size": 64}
    save_stock(build_stock("stablelm"), folder / "stable")
    byte_tokenizer().save(folder / "stable")
    return folder


def settings(folder: Path, name: str, *more: str) -> list[str]:
    return [
        f"run.dir={folder}", f"run.name={name}", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.tokenizer_unchecked=true",
        f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "steps=4", "device=cpu", "checkpoint.every=2",
        "model.family=transformers", f"init.from={folder}/star", "optim.lr=1e-2", *more,
    ]  # fmt: skip


def go(folder: Path, name: str, *more: str) -> dict[str, Any]:
    return train(load(Recipe, None, settings(folder, name, *more)))


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


@torch.no_grad()
def logits(path: Path, tokens: torch.Tensor) -> torch.Tensor:
    ours = load_model(path).model
    return ours.logits(ours.hidden_states(tokens, torch.arange(tokens.shape[1])[None]))


def test_a_run_resumes_bit_for_bit_and_leaves_a_folder_of_transformers(folder: Path) -> None:
    import transformers

    more = (
        "memory.recompute=true",
        "model.hf_config={residual_dropout: 0.1, embedding_dropout: 0.1}",
    )
    for name in ("whole", "cut"):
        go(folder, name, *more)
    # as if it had been killed after step 2
    (folder / "cut/checkpoints/step-00000004/manifest.json").write_text("{}")
    go(folder, "cut", *more)
    assert_same_run(folder / "whole", folder / "cut", 4)
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder / "whole/final")
    assert type(exported).__name__ == "Starcoder2ForCausalLM"
    assert exported.config.residual_dropout == 0.1
    tokens = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = exported.eval()(tokens).logits
    for path in ("whole", "whole/checkpoints/latest"):
        assert (logits(folder / path, tokens) - wanted).abs().max() < 1e-5


def test_an_adapter_has_the_names_of_the_class_and_trains_on(folder: Path, tmp_path: Path) -> None:
    targets = ("adapter.rank=4", "adapter.targets=[q_proj, c_fc]")
    go(folder, "lora", *targets)
    export_adapter(folder / "lora", tmp_path / "adapter")
    names = load_file(tmp_path / "adapter/adapter_model.safetensors").keys()
    assert len(names) == 8
    assert "base_model.model.model.layers.1.mlp.c_fc.lora_B.weight" in names
    tokens = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    whole = logits(folder / "lora", tokens)
    apart = logits(folder / "lora/final/adapter", tokens)
    plain = logits(folder / "star", tokens)
    assert (whole - apart).abs().max() < 1e-5 < 1e-3 < (whole - plain).abs().max()
    go(folder, "more", f"init.from={folder}/lora/checkpoints/latest", *targets, "steps=2")
    assert losses(folder / "more")[-1] < losses(folder / "lora")[0]


@pytest.mark.drill
def test_peft_loads_an_exported_adapter(folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    import transformers

    go(folder, "peft", "adapter.rank=4", "adapter.targets=[q_proj, c_fc]")
    export_adapter(folder / "peft", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "star")
    exported = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    tokens = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert (logits(folder / "peft", tokens) - exported(tokens).logits).abs().max() < 1e-5


@pytest.mark.slow
def test_pairs_and_random_weights_train(folder: Path) -> None:
    go(folder, "dpo", f"data.train=[{folder}/pairs]", "objective.kind=dpo", "steps=3")
    # the policy is the reference
    assert losses(folder / "dpo")[0] == pytest.approx(0.6931, abs=1e-3)
    shape = "{model_type: gpt_neox, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 4, intermediate_size: 48, vocab_size: 64}"
    go(
        folder,
        "random",
        "init.from=null",
        f"model.hf_config={shape}",
        "model.hf_config.hidden_dropout=0.0",
        "steps=3",
    )
    first = losses(folder / "random")[0]
    assert first == pytest.approx(float(torch.tensor(64.0).log()), abs=0.2)


def test_text_comes_out_of_the_engine_as_out_of_transformers(folder: Path, tmp_path: Path) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(folder / "stable").eval()
    tokenizer = byte_tokenizer()
    wanted = []
    for prompt in (TEXT, "a"):
        ids = torch.tensor([tokenizer.encode(prompt)])
        out = reference.generate(
            ids, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_id, pad_token_id=0
        )
        wanted.append(out[0, ids.shape[1] :].tolist())
    both = headway(
        "generate",
        "--model",
        str(folder / "stable"),
        "--prompt",
        TEXT,
        "--prompt",
        "a",
        "--max-new-tokens",
        "12",
        "--json",
    )
    assert both.returncode == 0, both.stderr
    assert [
        generation["token_ids"] for generation in json.loads(both.stdout)["generations"]
    ] == wanted
    (tmp_path / "text.txt").write_text(TEXT * 2)
    scored = headway(
        "eval",
        "ppl",
        "--model",
        str(folder / "stable"),
        "--data",
        str(tmp_path / "text.txt"),
        "--json",
    )
    assert scored.returncode == 0, scored.stderr
    ids = torch.tensor([tokenizer.encode(TEXT * 2)])
    with torch.no_grad():
        wanted_loss = float(F.cross_entropy(reference(ids[:, :-1]).logits[0], ids[0, 1:]))
    assert json.loads(scored.stdout)["loss"] == pytest.approx(wanted_loss, abs=1e-4)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (
            ["model.family=llama"],
            "has model_type 'starcoder2', which headway has no family for. Set model.family=transformers",
        ),
        (["parallel.tensor=2"], "parallel.tensor is 2 and model.family is transformers"),
        (["parallel.pipeline=2"], "parallel.pipeline is 2 and model.family is transformers"),
        (["parallel.context=2"], "parallel.context is 2 and model.family is transformers"),
        (
            ["objective.kind=head_sparsity"],
            "objective.kind=head_sparsity is given with model.family transformers",
        ),
        (["objective.kind=reward"], "reward models are of headway's own families"),
        (["kernels.compile=true"], "a class of transformers runs uncompiled"),
        (["precision=fp8"], "its matrix products run in bf16"),
        (
            ["model.hidden_size=8"],
            "model.hidden_size is 8 with model.family transformers, whose class has 32",
        ),
        (["init.from=null"], "Give init.from, or model.hf_config"),
        (["adapter.targets=[qq_proj]"], "matches no linear; there are q_proj"),
        (["model.hf_config={attention_dropout: 0.1}"], "attention has dropout 0.1"),
        (["model.hf_config={hidden_size: 40}"], "has shape"),
    ],
)
def test_what_a_wrapped_class_cannot_do_is_one_line(
    folder: Path, more: list[str], named: str
) -> None:
    with pytest.raises(HeadwayError) as caught:
        resolve(load(Recipe, None, settings(folder, "bad", *more)))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.drill
def test_a_killed_run_ends_bit_for_bit_like_the_undisturbed_one(folder: Path) -> None:
    more = settings(
        folder,
        "undisturbed",
        "steps=12",
        "checkpoint.every=3",
        "model.hf_config={residual_dropout: 0.1}",
    )
    train(load(Recipe, None, more))
    killed = [*more, "run.name=killed"]
    recipe = folder / "recipe.yaml"
    recipe.write_text("{}")
    process = start_headway("train", str(recipe), *killed)
    wait_for_step(folder / "killed" / "metrics.jsonl", 4, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert headway("train", str(recipe), *killed).returncode == 0
    assert_same_run(folder / "undisturbed", folder / "killed", 12)


@pytest.mark.parametrize("kind", ["diffllama", "gemma4_text", "glm4_moe"])
def test_text_of_an_unusual_class_comes_out_of_the_engine_as_out_of_transformers(
    kind: str, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    reference = build(
        kind,
        vocab_size=tokenizer.vocab_size,
        max_position_embeddings=128,
        eos_token_id=tokenizer.eos_id,
    )
    save_stock(reference, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    wanted: list[list[int]] = []
    for prompt in (TEXT, "a"):
        ids = torch.tensor([tokenizer.encode(prompt)])
        count = ids.shape[1]
        while ids.shape[1] < count + 12 and int(ids[0, -1]) != tokenizer.eos_id:
            with torch.no_grad():
                ids = torch.cat([ids, reference(ids).logits[:, -1:].argmax(-1)], 1)
        wanted.append(ids[0, count:].tolist())
    out = headway(
        "generate", "--model", str(tmp_path / "model"), "--prompt", TEXT, "--prompt", "a",
        "--max-new-tokens", "12", "--json",
    )  # fmt: skip
    assert out.returncode == 0, out.stderr
    generations = json.loads(out.stdout)["generations"]
    assert [generation["token_ids"] for generation in generations] == wanted
