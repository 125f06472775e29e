"""A folder of AWQ or GPTQ computes and trains as the plain folder with the same weights does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.base_runs import logits, train_on_store
from support.packed_folders import Packing, pack_folder, write_exact
from support.runs import make_stores

from headway.checkpoint.stored_model import find_model

SHAPE = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=4", "model.num_kv_heads=2", "model.ffn_size=48", "model.vocab_size=64",
    "model.max_seq_len=64",
)  # fmt: skip
LORA = ("adapter.rank=4", "adapter.targets=[q_proj, up_proj]", "optim.lr=1e-2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store, a base, and of it a packed folder of each method beside its plain twin."""
    folder = tmp_path_factory.mktemp("packed")
    make_stores(folder)
    go(folder, "base", *SHAPE)
    for how in (Packing("awq"), Packing("gptq", is_reordered=True)):
        exact = pack_folder(folder / "base/final", folder / how.method, how)
        write_exact(folder / how.method, folder / f"{how.method}-plain", exact)
    return folder


def go(folder: Path, name: str, *more: str) -> dict[str, Any]:
    return train_on_store(folder, name, "steps=3", *more)


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_logits_are_those_of_the_plain_folder(folder: Path, method: str) -> None:
    assert torch.equal(logits(folder / method), logits(folder / f"{method}-plain"))
    assert not torch.equal(logits(folder / method), logits(folder / "base"))


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("awq", LORA),
        ("gptq", LORA),
        ("gptq", (*LORA, "adapter.base=nf4")),
        ("awq", ("optim.lr=1e-3",)),
    ],
)
def test_a_run_from_it_is_the_run_from_the_plain_folder(
    folder: Path, method: str, more: tuple[str, ...]
) -> None:
    name = f"{method}-{len(more)}"
    go(folder, f"{name}-a", f"init.from={folder}/{method}", *more)
    go(folder, f"{name}-b", f"init.from={folder}/{method}-plain", *more)
    assert losses(folder / f"{name}-a") == losses(folder / f"{name}-b")
    trained = dict(find_model(folder / f"{name}-a").weights())
    expected = dict(find_model(folder / f"{name}-b").weights())
    assert trained.keys() == expected.keys()
    assert all(torch.equal(trained[key], value) for key, value in expected.items())
