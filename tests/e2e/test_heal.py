"""A batch that spoils training is told, skipped, or left out by going back; what is left is the run that never saw it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic, write_recipe

from headway.config.load import load
from headway.errors import GaveUpError
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe
from headway.train.health import add_skipped_batches

pytestmark = pytest.mark.slow

STEPS = 30
RULE = (
    "heal.window=8",
    "heal.sigma=6",
    "objective.kind=support.my_lab.poison",
    "checkpoint.keep_last=1",
    "data.workers=2",
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two stores in which one document alone holds token 63."""
    folder = tmp_path_factory.mktemp("poisoned")
    paths = []
    for number in range(2):
        rng = np.random.default_rng(number)
        writer = StoreWriter(folder / f"store{number}", dtype="uint16", tokenizer_fingerprint=None)
        for document in range(150):
            start, step = rng.integers(0, 60, 2)
            ids = ((start + step * np.arange(rng.integers(20, 60))) % 60).astype(np.uint16)
            if (number, document) == (0, 41):
                ids[5] = 63
            writer.add(ids)
        writer.finish()
        paths.append(folder / f"store{number}")
    return paths


def run(folder: Path, stores: list[Path], name: str, *overrides: str, world: int = 1) -> Path:
    recipe = load(Recipe, write_recipe(folder, stores, name=name, steps=STEPS), [*RULE, *overrides])
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world)
    return recipe.run.folder


def events(folder: Path, *names: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] in names]


@pytest.fixture(scope="module")
def bad(stores: list[Path], tmp_path_factory: pytest.TempPathFactory) -> int:
    """The step that meets the document."""
    folder = run(tmp_path_factory.mktemp("bad"), stores, "plain")
    (told,) = events(folder, "spike")
    records = read_metrics(folder / "metrics.jsonl")
    spiked = [record["step"] for record in records if record.get("anomaly") == "spike"]
    assert len(spiked) == 1
    assert 10 < spiked[0] < STEPS
    assert f"step {spiked[0]}" in told["text"]
    return spiked[0]


def test_a_skipped_spike_changes_nothing_and_names_its_documents(
    stores: list[Path], bad: int, tmp_path: Path
) -> None:
    folder = run(tmp_path, stores, "skips", "heal.on_spike=skip")
    (told,) = events(folder, "spike")
    assert "skipped" in told["text"]
    assert told["batches"] == [bad - 1, bad - 1]
    assert (
        41 in told["documents"][next(name for name in told["documents"] if name.endswith("store0"))]
    )
    assert read_metrics(folder / "metrics.jsonl")[-1]["inf_nan_skip_batches"] == 1


@pytest.mark.parametrize("factor", ["100", "0"], ids=["spike", "nan"])
def test_going_back_ends_as_a_run_that_never_saw_the_batch(
    factor: str, stores: list[Path], bad: int, tmp_path: Path
) -> None:
    healing = ("heal.on_spike=rollback", "heal.on_nan=rollback", f"objective.factor={factor}")
    healed = run(tmp_path, stores, "healed", *healing)
    right = run(tmp_path, stores, "right", f"data.skip_batches='{bad - 1}'", *healing)
    assert_same_run(healed, right, STEPS)
    (told,) = events(healed, "spike", "nan")
    assert told["event"] == ("spike" if factor == "100" else "nan")
    assert told["batches"] == [
        bad - 1,
        bad - 1,
    ]
    assert 41 in next(
        documents for name, documents in told["documents"].items() if name.endswith("store0")
    )
    assert [record["step"] for record in read_metrics(healed / "metrics.jsonl")] == list(
        range(1, STEPS + 1)
    )
    assert not events(right, "spike", "nan")


def test_a_healed_run_that_is_stopped_resumes_exactly(
    stores: list[Path], bad: int, tmp_path: Path
) -> None:
    right = run(tmp_path, stores, "right", "heal.on_spike=rollback")
    # its last checkpoint is before its end
    run(tmp_path, stores, "parts", "heal.on_spike=rollback", "checkpoint.at_end=false")
    (tmp_path / "runs" / "parts" / "summary.json").unlink()
    parts = run(tmp_path, stores, "parts", "heal.on_spike=rollback")
    assert_same_run(parts, right, STEPS)
    assert len(json.loads((parts / "heal.json").read_text())) == 1


def test_two_ranks_go_back_together(stores: list[Path], bad: int, tmp_path: Path) -> None:
    healed = run(tmp_path, stores, "healed", "heal.on_spike=rollback", world=2)
    right = run(tmp_path, stores, "right", f"data.skip_batches='{bad - 1}'", world=2)
    assert deterministic(healed / "metrics.jsonl") == deterministic(right / "metrics.jsonl")


def test_it_gives_up_after_the_limit_with_exit_code_3(stores: list[Path], tmp_path: Path) -> None:
    always = ("objective.token=1", "heal.sigma=0.0001", "heal.window=2")
    with pytest.raises(GaveUpError, match="2 times already") as caught:
        run(
            tmp_path,
            stores,
            "back",
            "heal.on_spike=rollback",
            "heal.limit=2",
            "checkpoint.every=null",
            *always,
        )
    assert caught.value.exit_code == 3
    with pytest.raises(GaveUpError, match="3 steps in a row"):
        run(
            tmp_path,
            stores,
            "skip",
            "heal.on_nan=skip",
            "heal.limit=2",
            "objective.token=1",
            "objective.factor=0",
        )


def test_ranges_join_what_is_skipped_already() -> None:
    recipe = load(Recipe, None, ["data.skip_batches='3-5,9'"])
    assert add_skipped_batches(recipe, [(6, 7), (20, 20)]).data.skip_batches == "3-7,9-9,20-20"
