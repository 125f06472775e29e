"""Running out of memory ends in one message with remedies; micro_rows=auto finds what fits and trains as if it had been given."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.runs import deterministic

from headway.config.load import load
from headway.plan.memory import GIB, estimate
from headway.runtime.device import choose_compute
from headway.train import train
from headway.train.config import Recipe
from headway.train.memory import OutOfMemoryError, choices, describe_job, fit_by_estimate
from headway.train.resolve import resolve

SMALL = (
    "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2", "model.ffn_size=64", "model.vocab_size=64", "model.max_seq_len=128",
    "data.seq_len=64", "batch.rows=12", "steps=3", "device=cpu", "checkpoint.at_end=false",
)  # fmt: skip


def recipe_of(folder: Path, *settings: str) -> Recipe:
    return load(Recipe, None, [*SMALL, f"run.dir={folder}", *settings])


@contextmanager
def allocator_fails_after_two_steps(run: Any) -> Iterator[None]:
    def after(step: int) -> None:
        if step == 2:
            torch.empty(1 << 60, dtype=torch.uint8)

    run.on_step(after)
    yield


def test_running_out_of_memory_ends_in_one_line_with_bytes_by_kind_and_remedies(
    tmp_path: Path,
) -> None:
    with pytest.raises(OutOfMemoryError) as caught:
        train(
            recipe_of(tmp_path, "batch.micro_rows=6", "model.vocab_size=4096"),
            hook=allocator_fails_after_two_steps,
        )
    message = str(caught.value)
    assert caught.value.exit_code == 1
    assert "\n" not in message
    assert re.match(
        r"out of memory on cpu \(\d+\.\d [GM]iB of \d+\.\d [GM]iB of this machine's memory free\): ",
        message,
    )
    for kind in ("weights", "gradients", "optimizer state", "activations", "logits and head"):
        assert re.search(rf"{kind} \d+\.\d MiB", message), (kind, message)
    assert re.search(r"memory\.recompute=1 would free \d+\.\d MiB", message)
    assert re.search(r"batch\.micro_rows=3 would free \d+\.\d MiB", message)
    assert "memory.offload" not in message  # a CPU has nowhere to put it


def test_a_model_too_large_for_memory_ends_with_exit_code_1_and_no_traceback(
    tmp_path: Path,
) -> None:
    program = "import resource, sys; from headway.cli import main; resource.setrlimit(resource.RLIMIT_AS, (32 << 30, 32 << 30)); sys.exit(main())"
    settings = [
        "model.hidden_size=131072",
        "model.ffn_size=524288",
        "steps=1",
        "device=cpu",
        f"run.dir={tmp_path}",
    ]
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *settings],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "out of memory on cpu" in errors[0]
    assert "weights" in errors[0]
    assert "Traceback" not in done.stderr


def test_a_limit_on_the_cpu_is_kept_before_training_starts(tmp_path: Path) -> None:
    with pytest.raises(
        OutOfMemoryError, match=r"memory.limit_gib is 0.0001. A step needs an estimated"
    ):
        train(recipe_of(tmp_path, "memory.limit_gib=1e-4"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("limit_rows", "expected"), [(1, 1), (5, 4), (12, 12), (100, 12)])
def test_auto_takes_the_largest_microbatch_that_divides_the_batch_and_fits(
    tmp_path: Path, limit_rows: int, expected: int
) -> None:
    recipe = recipe_of(tmp_path, "batch.micro_rows=auto")
    model = resolve(recipe).model
    compute = choose_compute("cpu", "fp32")
    job = describe_job(recipe, model, compute, recipe.batch.resolve(64, 1), 1)
    from dataclasses import replace

    limit = estimate(replace(job, rows=limit_rows, accumulate=1)).total
    assert fit_by_estimate(job, choices(12), limit) == expected
    train(
        recipe_of(
            tmp_path,
            "batch.micro_rows=auto",
            "run.name=auto",
            f"memory.limit_gib={limit / GIB}",
            "steps=2",
        )
    )
    train(recipe_of(tmp_path, f"batch.micro_rows={expected}", "run.name=given", "steps=2"))
    assert deterministic(tmp_path / "auto" / "metrics.jsonl") == deterministic(
        tmp_path / "given" / "metrics.jsonl"
    )
    said = (tmp_path / "auto" / "train.log").read_text()
    assert f"microbatches x {expected} rows" in said


def test_the_batch_and_its_losses_do_not_depend_on_what_auto_finds(tmp_path: Path) -> None:
    seen = []
    for name, limit in (("small", 1e-3), ("large", 1.0)):
        train(
            recipe_of(
                tmp_path, "batch.micro_rows=auto", f"run.name={name}", f"memory.limit_gib={limit}"
            )
        )
        seen.append(deterministic(tmp_path / name / "metrics.jsonl"))
    assert [r["micro_num"] for r in seen[0]] != [r["micro_num"] for r in seen[1]]
    assert [r["tokens"] for r in seen[0]] == [r["tokens"] for r in seen[1]]
    assert [r["loss"] for r in seen[0]] == pytest.approx([r["loss"] for r in seen[1]], rel=1e-5)
