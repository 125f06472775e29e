"""On a CUDA device: preference training with compiled blocks, a live and a cached reference, against the CPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.preference_pairs import make_pair_store

from headway.config.load import load
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = (
    "model.hidden_size=128", "model.num_layers=2", "model.num_heads=4", "model.ffn_size=256", "model.vocab_size=64",
    "model.max_seq_len=128", "data.seq_len=128", "data.tokenizer_unchecked=true", "batch.rows=8", "batch.micro_rows=4", "steps=6",
    "optim.lr=1e-3", "objective.kind=dpo", "data.valid.fraction=0.2", "eval.rows=8",
)  # fmt: skip


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    where = (
        f"run.dir={folder}/runs",
        f"run.name={name}",
        f"data.train=[{folder}/pairs]",
        f"data.cache_dir={folder}/cache",
    )
    train(load(Recipe, None, [*SHAPE, *where, *overrides]))
    return read_metrics(folder / "runs" / name / "metrics.jsonl")


@pytest.mark.parametrize(
    "kind", ["objective.loss_type=sigmoid", "objective.loss_type=kto_pair", "objective.kind=kto"]
)
def test_preference_on_the_gpu_follows_the_cpu(tmp_path: Path, kind: str) -> None:
    make_pair_store(tmp_path / "pairs", pairs=80)
    right = run(tmp_path, "cpu", kind, "device=cpu")
    exact = run(
        tmp_path,
        "gpu",
        kind,
        "device=cuda",
        "precision=fp32",
        "kernels.tf32=false",
        "kernels.compile=true",
    )
    for one, other in zip(exact, right, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-3)
        assert one["rewards/margins"] == pytest.approx(other["rewards/margins"], abs=2e-3)
    narrow = run(
        tmp_path, "bf16", kind, "device=cuda", "precision=bf16", "objective.reference_logps=cached"
    )
    assert narrow[0]["loss"] == pytest.approx(
        math.log(2) if kind.endswith("sigmoid") else 0.5, abs=5e-3
    )
    assert narrow[-1]["valid"]["valid"]["rewards/accuracies"] == pytest.approx(
        right[-1]["valid"]["valid"]["rewards/accuracies"], abs=0.2
    )
