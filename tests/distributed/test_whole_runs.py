"""`headway train` on several ranks: one run folder, the numbers of one process, and a run that moves between numbers of ranks."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import start_processes
from support.runs import make_stores, write_recipe

from headway.config.load import load
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe
from headway.train.session import run_recipe

pytestmark = pytest.mark.slow

SAME = (
    "loss",
    "nll",
    "grad_norm",
    "tokens",
    "num_samples_in_batch",
    "num_consumed_tokens",
    "lr",
    "epoch",
    "loss_scale",
)


def run(recipe: Path, *overrides: str, world: int = 1) -> list[dict[str, Any]]:
    """Train, and read the metrics."""
    loaded = load(Recipe, recipe, list(overrides))
    if world == 1:
        train(loaded)
    else:
        start_processes(lambda: train(loaded), world)
    return read_metrics(loaded.run.folder / "metrics.jsonl")


def assert_same(got: list[dict[str, Any]], right: list[dict[str, Any]], rel: float = 1e-5) -> None:
    assert [record["step"] for record in got] == [record["step"] for record in right]
    for measured, expected in zip(got, right, strict=True):
        assert {k: measured[k] for k in SAME} == pytest.approx(
            {k: expected[k] for k in SAME}, rel=rel
        ), f"step {measured['step']}"
        for name, values in expected.get("valid", {}).items():
            assert measured["valid"][name] == pytest.approx(values, rel=rel), (
                f"step {measured['step']}"
            )


@pytest.mark.parametrize(
    "overrides",
    [("parallel.zero1.size=1",), ("parallel.bucket_bytes=9000",), ("parallel.strategy=fsdp",)],
)
def test_two_ranks_leave_what_one_process_leaves(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    stores = make_stores(tmp_path)
    right = run(write_recipe(tmp_path, stores, name="one", steps=8))
    got = run(write_recipe(tmp_path, stores, name="two", steps=8), *overrides, world=2)
    assert_same(got, right)
    alone = tmp_path / "runs" / "one"
    on_two_ranks = tmp_path / "runs" / "two"
    rest = {path.name for path in on_two_ranks.iterdir()} - {path.name for path in alone.iterdir()}
    assert not rest
    assert (on_two_ranks / "logs" / "rank-00001.log").exists()
    assert sorted(path.name for path in (on_two_ranks / "final").iterdir()) == sorted(
        path.name for path in (alone / "final").iterdir()
    )
    summary = json.loads((on_two_ranks / "summary.json").read_text())
    assert summary["steps"] == 8


def test_ranks_agree_on_the_weight_of_masked_data(tmp_path: Path) -> None:
    """Which tokens count is known only to the rank that reads them: the loader asks the others before the first forward."""
    rng = np.random.default_rng(0)
    writer = StoreWriter(
        tmp_path / "masked", dtype="uint16", tokenizer_fingerprint=None, masked=True
    )
    for _ in range(60):
        length = int(rng.integers(5, 60))
        writer.add(rng.integers(0, 64, length).astype(np.uint16), rng.random(length) < rng.random())
    writer.finish()
    stores = [tmp_path / "masked", *make_stores(tmp_path)[:1]]
    right = run(write_recipe(tmp_path, stores, name="one", steps=6))
    assert_same(run(write_recipe(tmp_path, stores, name="two", steps=6), world=2), right)


def test_a_run_moves_between_numbers_of_ranks(tmp_path: Path) -> None:
    stores = make_stores(tmp_path)
    right = run(write_recipe(tmp_path, stores, name="straight", steps=20))
    moving = write_recipe(tmp_path, stores, name="moving", steps=20)
    for stop, world, strategy in (
        (5, 2, "zero1"),
        (10, 1, "zero1"),
        (15, 2, "fsdp"),
        (20, 2, "zero1"),
    ):
        # every stage ends at its own step but follows the learning rate of the whole run
        loaded = load(Recipe, moving, [f"parallel.strategy={strategy}"])
        if world == 1:
            until(loaded, stop)
        else:
            start_processes(lambda loaded=loaded, stop=stop: until(loaded, stop), world)
    got = read_metrics(tmp_path / "runs" / "moving" / "metrics.jsonl")
    assert_same(got, right, rel=1e-4)


def until(recipe: Recipe, stop: int) -> None:
    """Train and get a signal, on one rank only, once a step has been written."""
    metrics = recipe.run.folder / "metrics.jsonl"
    if os.environ.get("RANK", "0") == "0" and stop < 20:

        def ask() -> None:
            while not metrics.exists() or metrics.read_bytes().count(b"\n") < stop:
                time.sleep(0.002)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=ask, daemon=True).start()
    run_recipe(recipe)
