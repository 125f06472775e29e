"""On a CUDA device: held-out prompts are answered as on a CPU, and the second model leaves nothing behind."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.config.load import load
from headway.train import train
from headway.train.config import Recipe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def run(folder: Path, name: str, *more: str) -> list[dict[str, Any]]:
    summary = train(load(Recipe, None, [
        f"run.dir={folder}/runs", f"run.name={name}", f"init.from={folder}/base/out", f"data.train={folder}/chat.jsonl", "data.seq_len=128",
        "data.valid.fraction=0.2", f"data.cache_dir={folder}/cache", "batch.rows=4", "steps=2", "eval.rows=4", "eval.at_start=true", *more,
    ]))  # fmt: skip
    assert summary["peak_memory_bytes"] > 0
    return summary["samples"]


def test_answers_before_the_first_step_are_those_of_the_cpu(tmp_path: Path) -> None:
    write_model(
        tmp_path / "base",
        CONFIG.with_(max_seq_len=192),
        byte_tokenizer("<|im_start|>", "<|im_end|>"),
    )
    records = [{"instruction": f"Say {n}.", "output": f"{n}"} for n in range(60)]
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    right = run(tmp_path, "cpu", "device=cpu")
    found = run(
        tmp_path,
        "gpu",
        "device=cuda",
        "precision=fp32",
        "kernels.tf32=false",
        "kernels.compile=true",
    )
    assert [one["before"] for one in found] == [one["before"] for one in right]
    layouts = {
        "fsdp": ("parallel.strategy=fsdp",),
        "bf16": ("precision=bf16",),
        "lora": ("adapter={rank: 4, targets: [q_proj, v_proj]}",),
        "nf4": ("adapter={rank: 4, targets: [q_proj, v_proj], base: nf4}",),
    }
    for name, more in layouts.items():
        answered = run(tmp_path, name, "device=cuda", *more)
        assert len(answered) == 2 and all(
            one["before"] is not None and one["after"] is not None for one in answered
        ), name
