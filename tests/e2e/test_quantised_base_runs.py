"""Runs with an adapter over a quantised base (QLoRA): exact resume, a merged final/, and every way to go on from one."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.base_runs import logits, train_on_store
from support.preference_pairs import make_pair_store
from support.runs import assert_same_run, make_stores

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.errors import ConfigError, HeadwayError
from headway.export.adapter import export_adapter
from headway.export.huggingface import export_huggingface
from headway.infer.check_checkpoint import check_checkpoint
from headway.kernels.packed_layout import PackedLayout, form_of
from headway.kernels.packed_weight import pack, unpack
from headway.model.config import ModelConfig
from headway.model.layout import num_parameters, param_specs

SHAPE = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48", "model.vocab_size=64",
    "model.max_seq_len=64",
)  # fmt: skip
QLORA = (
    "adapter.rank=4",
    "adapter.base=nf4",
    "adapter.targets=[q_proj, up_proj]",
    "optim.lr=1e-2",
    "checkpoint.every=3",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, a base run, and a QLoRA run over it."""
    folder = tmp_path_factory.mktemp("quantised")
    make_stores(folder)
    go(folder, "base", *SHAPE)
    go(folder, "nf4", f"init.from={folder}/base", *QLORA)
    return folder


def go(folder: Path, name: str, *more: str) -> dict[str, Any]:
    return train_on_store(folder, name, "steps=6", *more)


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds of the model, as it is stored."""
    with open_checkpoint(path / "checkpoints" / "latest") as checkpoint:
        return {
            name: checkpoint.weight(name)
            for role in ("param", "master")
            for name in checkpoint.names(role)
        }


def test_a_run_is_merged_into_final_and_its_base_is_saved_as_bytes(folder: Path) -> None:
    run = folder / "nf4"
    base = dict(find_model(folder / "base").weights())
    held = stored(run)
    names = [name for name in held if form_of(name)]
    assert len(names) == 14
    for name in names:
        plain = name.removesuffix("_nf4")
        assert torch.equal(held[name], pack(base[plain], "nf4")), name
    final = dict(find_model(run).weights())
    name = "model.layers.0.self_attn.k_proj"  # frozen, without an update
    assert torch.equal(
        final[f"{name}.weight"],
        unpack(held[f"{name}.weight_nf4"], PackedLayout("nf4", 16, 32), torch.float32),
    )
    assert (logits(run / "checkpoints" / "latest") - logits(run)).abs().max() <= 1e-5
    # the adapter folder names the original base: merged there, it differs by the rounding of the base alone
    gap = (logits(run / "final" / "adapter") - logits(run)).abs().max()
    assert 1e-4 < gap < (logits(folder / "base") - logits(run)).abs().max() + 0.5
    assert check_checkpoint(run).problems == []
    log = (run / "train.log").read_text()
    assert "the layers' matrices are stored in nf4" in log
    assert "18,720 parameters, 1,152 train, 17,568 frozen" in log


def test_a_stopped_run_ends_like_the_undisturbed_one(folder: Path) -> None:
    more = (f"init.from={folder}/base", *QLORA)
    go(folder, "again", *more)
    # as if it had been killed after step 3
    (folder / "again/checkpoints/step-00000006/manifest.json").write_text("{}")
    go(folder, "again", *more)
    assert_same_run(folder / "nf4", folder / "again", 6)
    ours = stored(folder / "nf4")
    resumed = stored(folder / "again")
    assert all(torch.equal(resumed[name], value) for name, value in ours.items())
    with pytest.raises(HeadwayError, match=r"adapter\.base"):
        go(folder, "again", *more, "adapter.base=int8", "steps=8")


@pytest.mark.slow
def test_an_adapter_goes_on_over_the_same_bytes(folder: Path) -> None:
    before = stored(folder / "nf4")
    more = (*QLORA[:3], "optim.lr=0", "steps=1")
    go(folder, "on", f"init.from={folder}/nf4/checkpoints/latest", *more)
    go(
        folder,
        "folders",
        f"init.from={folder}/base",
        f"init.adapter={folder}/nf4/final/adapter",
        *more,
    )
    for name in ("on", "folders"):
        after = stored(folder / name)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items()), name
    go(
        folder,
        "plain",
        f"init.from={folder}/nf4/checkpoints/latest",
        "adapter.rank=4",
        "adapter.targets=[q_proj, up_proj]",
        "steps=1",
    )
    assert not any(form_of(name) for name in stored(folder / "plain"))


@pytest.mark.slow
def test_a_mixture_trains_updates_of_quantised_experts_and_is_merged(folder: Path) -> None:
    """A stopped run ends like the undisturbed one; checkpoint and final/ compute the same; nothing is written that PEFT could not read."""
    go(
        folder,
        "experts",
        *SHAPE,
        "model.experts={num: 4, per_token: 2, ffn_size: 24}",
        "model.family=olmoe",
        "steps=1",
    )
    more = (
        f"init.from={folder}/experts",
        *QLORA,
        "adapter.targets=[all, experts]",
        "steps=4",
        "checkpoint.every=2",
        "data.valid=null",
    )
    go(folder, "mixture", *more)
    go(folder, "mixture2", *more)
    (folder / "mixture2/checkpoints/step-00000004/manifest.json").write_text("{}")
    go(folder, "mixture2", *more)
    assert_same_run(folder / "mixture", folder / "mixture2", 4)
    held = stored(folder / "mixture")
    assert sum(form_of(name) == "nf4" and ".mlp.experts." in name for name in held) == 6
    assert held["model.layers.0.mlp.experts.gate_proj.lora_B.weight"].abs().max() > 0
    assert (
        logits(folder / "mixture" / "checkpoints" / "latest") - logits(folder / "mixture")
    ).abs().max() <= 1e-5
    assert (logits(folder / "experts") - logits(folder / "mixture")).abs().max() > 1e-3
    assert not (folder / "mixture" / "final" / "adapter").exists()
    with pytest.raises(ConfigError, match="no form in PEFT"):
        export_adapter(folder / "mixture" / "checkpoints" / "latest", folder / "peft")
    go(
        folder,
        "mixture3",
        f"init.from={folder}/mixture/checkpoints/latest",
        *more[1:],
        "steps=1",
        "optim.lr=0",
        "checkpoint.every=1",
    )
    after = stored(folder / "mixture3")
    assert all(torch.equal(after[name], value) for name, value in held.items())


def test_settings_that_contradict_a_quantised_base_are_refused_before_a_run_folder_exists(
    folder: Path,
) -> None:
    base = f"init.from={folder}/base"
    for more, message in (
        ((base, *QLORA, "train=['*.mlp.*']"), "which adapter.base stores quantised"),
        ((base, *QLORA, "precision=fp8"), "fp8"),
        ((base, "adapter.rank=4", "adapter.base=nf3"), "adapter.base"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(folder, "wrong", *more)
        assert not (folder / "wrong").exists()


@pytest.mark.slow
def test_dpo_begins_at_its_reference_which_is_quantised_too(folder: Path) -> None:
    pairs = make_pair_store(folder / "pairs")
    more = ("objective.kind=dpo", f"data.train=[{pairs}]", "steps=2", *QLORA[:3], "optim.lr=1e-2")
    losses: dict[str, list[float]] = {}
    for name, source, logps in (
        ("live", "base", "live"),
        ("cached", "base", "cached"),
        ("goes-on", "nf4/checkpoints/latest", "live"),
    ):
        go(
            folder,
            name,
            f"init.from={folder}/{source}",
            *more,
            f"objective.reference_logps={logps}",
        )
        records = (folder / name / "metrics.jsonl").read_text().splitlines()
        losses[name] = [json.loads(line)["loss"] for line in records if "loss" in json.loads(line)]
        assert losses[name][0] == pytest.approx(math.log(2), abs=1e-6), name
        assert losses[name][1] != losses[name][0]
    assert losses["live"] == pytest.approx(losses["cached"], abs=1e-6)
    assert "in nf4" in (folder / "live" / "train.log").read_text()


@pytest.mark.slow
def test_head_gates_and_stages_work_over_a_quantised_base(folder: Path) -> None:
    sparse = (
        "objective.kind=head_sparsity",
        "objective.window=16",
        "objective.sinks=2",
        "objective.start=0.5",
        "objective.target=0.5",
    )
    go(folder, "gates", f"init.from={folder}/base", *QLORA[:3], *sparse, "steps=2")
    assert find_model(folder / "gates").config.head_gates is not None
    go(
        folder,
        "staged",
        f"init.from={folder}/base",
        *QLORA[:3],
        "steps=2",
        "stages=[{name: a}, {name: b, optim: {lr: 1e-3}}]",
    )
    first, second = (stored(path) for path in sorted((folder / "staged" / "stages").iterdir()))
    assert all(torch.equal(second[name], value) for name, value in first.items() if form_of(name))


LOADING = """
import sys, threading, time
from pathlib import Path
import torch
from headway.config.load import load
from headway.train.config import Recipe
from headway.train.build import engine_spec, fill
from headway.train.resolve import resolve
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroups
from headway.runtime.device import choose_compute

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) * 1024

highest, is_done = [0], threading.Event()
def watch():
    while not is_done.wait(0.002):
        highest[0] = max(highest[0], anonymous())

texts = [f"init.from={sys.argv[1]}", "adapter.rank=4", "device=cpu", "precision=bf16", "data.seq_len=64", "batch.rows=1", "steps=1"]
resolved = resolve(load(Recipe, None, [*texts, *sys.argv[2:]]))
compute = choose_compute("cpu", "bf16", 0)
torch.set_num_threads(1)
before = anonymous()
threading.Thread(target=watch, daemon=True).start()
engine = assemble(engine_spec(resolved.recipe, resolved.model, compute, RankGroups()))
fill(engine, resolved, compute.device)
is_done.set()
print("RESULT", highest[0] - before, anonymous() - before)
"""


@pytest.mark.drill
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_loading_never_holds_the_model_in_16_bits(tmp_path: Path) -> None:
    """Half a billion parameters, 1.1 GB in bf16: the peak while loading is little above a third of it."""
    shape = ModelConfig(
        hidden_size=2048,
        num_layers=8,
        num_heads=16,
        ffn_size=8192,
        vocab_size=4096,
        max_seq_len=64,
        tie_embeddings=True,
    )
    whole = 2 * num_parameters(shape)
    drawn = (
        (spec.name, torch.randn(spec.shape).mul_(0.02).bfloat16()) for spec in param_specs(shape)
    )
    export_huggingface(shape, drawn, tmp_path / "model", tokenizer=None, dtype="bfloat16")
    seen = {}
    for base in ("nf4", "null"):
        command = [sys.executable, "-c", LOADING, str(tmp_path / "model"), f"adapter.base={base}"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
        seen[base] = [int(word) for word in done.stdout.split("RESULT ")[1].split()]
    assert seen["nf4"][0] < 0.42 * whole and seen["nf4"][1] < 0.36 * whole, (seen, whole)
    assert seen["null"][0] > 0.95 * whole
