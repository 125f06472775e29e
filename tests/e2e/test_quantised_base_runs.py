"""Runs with an adapter over a quantised base (QLoRA): exact resume, a merged final/, and every way to go on from one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import assert_same_run, make_stores

from headway.checkpoint.load import open_checkpoint
from headway.config.load import load
from headway.errors import ConfigError, HeadwayError
from headway.infer.load import find_model, load_model
from headway.kernels.attention import causal_mask
from headway.kernels.packed_layout import PackedLayout, form_of
from headway.kernels.packed_weight import pack, unpack
from headway.train import train
from headway.train.config import Recipe

SHAPE = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48", "model.vocab_size=64",
    "model.max_seq_len=64",
)  # fmt: skip
QLORA = ("adapter.rank=4", "adapter.base=nf4", "adapter.targets=[q_proj, up_proj]", "optim.lr=1e-2", "checkpoint.every=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores, a base run, and a QLoRA run over it."""
    folder = tmp_path_factory.mktemp("quantised")
    make_stores(folder)
    go(folder, "base", *SHAPE)
    go(folder, "nf4", f"init.from={folder}/base", *QLORA)
    return folder


def go(folder: Path, name: str, *more: str) -> dict[str, Any]:
    settings = [
        f"run.dir={folder}", f"run.name={name}", f"data.train=[{folder}/store0]", "data.seq_len=64", "data.tokenizer_unchecked=true",
        "data.valid.fraction=0.1", f"data.cache_dir={folder}/cache", "batch.rows=4", "batch.micro_rows=2", "steps=6", "device=cpu", *more,
    ]  # fmt: skip
    return train(load(Recipe, None, settings))


@torch.no_grad()
def logits(path: Path) -> torch.Tensor:
    model = load_model(path).model
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(5))
    return model.logits(model(tokens, torch.arange(20).expand(2, -1), causal_mask(2, 20)))


def stored(path: Path) -> dict[str, torch.Tensor]:
    """Everything a checkpoint holds of the model, as it is stored."""
    with open_checkpoint(path / "checkpoints" / "latest") as found:
        return {name: found.weight(name) for role in ("param", "master") for name in found.names(role)}


def test_a_run_is_merged_into_final_and_its_base_is_saved_as_bytes(folder: Path) -> None:
    run, base = folder / "nf4", dict(find_model(folder / "base").weights())
    held = stored(run)
    names = [name for name in held if form_of(name)]
    assert len(names) == 14
    for name in names:
        plain = name.removesuffix("_nf4")
        assert torch.equal(held[name], pack(base[plain], "nf4")), name
    final = dict(find_model(run).weights())
    name = "model.layers.0.self_attn.k_proj"  # frozen, without an update
    assert torch.equal(final[f"{name}.weight"], unpack(held[f"{name}.weight_nf4"], PackedLayout("nf4", 16, 32), torch.float32))
    assert (logits(run / "checkpoints" / "latest") - logits(run)).abs().max() <= 1e-5
    # the adapter folder names the original base: merged there, it differs by the rounding of the base alone
    gap = (logits(run / "final" / "adapter") - logits(run)).abs().max()
    assert 1e-4 < gap < (logits(folder / "base") - logits(run)).abs().max() + 0.5
    log = (run / "train.log").read_text()
    assert "the layers' matrices are stored in nf4" in log
    assert "18,720 parameters, 1,152 train, 17,568 frozen" in log


def test_a_stopped_run_ends_like_the_undisturbed_one(folder: Path) -> None:
    more = (f"init.from={folder}/base", *QLORA)
    go(folder, "again", *more)
    (folder / "again/checkpoints/step-00000006/manifest.json").write_text("{}")  # as if it had been killed after step 3
    go(folder, "again", *more)
    assert_same_run(folder / "nf4", folder / "again", 6)
    ours, theirs = stored(folder / "nf4"), stored(folder / "again")
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    with pytest.raises(HeadwayError, match=r"adapter\.base"):
        go(folder, "again", *more, "adapter.base=int8", "steps=8")


@pytest.mark.slow
def test_an_adapter_goes_on_over_the_same_bytes(folder: Path) -> None:
    before = stored(folder / "nf4")
    more = (*QLORA[:3], "optim.lr=0", "steps=1")
    go(folder, "on", f"init.from={folder}/nf4/checkpoints/latest", *more)
    go(folder, "folders", f"init.from={folder}/base", f"init.adapter={folder}/nf4/final/adapter", *more)
    for name in ("on", "folders"):
        after = stored(folder / name)
        assert after.keys() == before.keys()
        assert all(torch.equal(after[key], value) for key, value in before.items()), name
    go(folder, "plain", f"init.from={folder}/nf4/checkpoints/latest", "adapter.rank=4", "adapter.targets=[q_proj, up_proj]", "steps=1")
    assert not any(form_of(name) for name in stored(folder / "plain"))


def test_mistakes_are_said_before_work_starts(folder: Path) -> None:
    base = f"init.from={folder}/base"
    for more, message in (
        ((base, *QLORA, "train=['*.mlp.*']"), "which adapter.base stores quantised"),
        ((base, *QLORA, "precision=fp8"), "fp8"),
        ((base, "adapter.rank=4", "adapter.base=nf3"), "adapter.base"),
    ):
        with pytest.raises(ConfigError, match=message):
            go(folder, "wrong", *more)
        assert not (folder / "wrong").exists()
