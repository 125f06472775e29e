"""Whole runs with the other optimizers: a resumed run has the numbers of an unbroken one, and what is kept is what was validated."""

from pathlib import Path
from typing import Any

import pytest
from support.runs import make_stores
from support.setting_runs import BASE

from headway.config.load import load
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

COMMON = (
    "eval.every=2",
    "eval.rows=8",
    "data.valid.fraction=0.2",
    "checkpoint.every=2",
    "optim.schedule.warmup=2",
    "log.every=1",
)


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stores")
    make_stores(folder)
    return folder


def run(folder: Path, name: str, *settings: str, stores: Path) -> tuple[Path, list[dict[str, Any]]]:
    data = f"data.train=[{stores}/store0, {stores}/store1]"
    recipe = load(
        Recipe, None, [*BASE, data, *COMMON, f"run.dir={folder}", f"run.name={name}", *settings]
    )
    train(recipe)
    records = [
        {key: value for key, value in record.items() if key != "time"}
        for record in read_metrics(recipe.run.folder / "metrics.jsonl")
    ]
    return recipe.run.folder, records


@pytest.mark.parametrize(
    "kind", ["muon", pytest.param("adafactor", marks=pytest.mark.drill), "schedule_free"]
)
def test_a_resumed_run_has_the_numbers_of_an_unbroken_one(
    kind: str, tmp_path: Path, stores: Path
) -> None:
    chosen = (f"optim.kind={kind}", "optim.lr=0.02", "optim.schedule.kind=constant")
    _, straight = run(tmp_path, "straight", *chosen, "steps=4", stores=stores)
    run(tmp_path, "broken", *chosen, "steps=2", stores=stores)
    folder, broken = run(tmp_path, "broken", *chosen, "steps=4", stores=stores)
    assert [record for record in broken if record["step"] > 2] == [
        record for record in straight if record["step"] > 2
    ]
    _, again = run(
        tmp_path,
        "again",
        f"init.from={folder}/final",
        "optim.lr=0",
        "eval.at_start=true",
        "steps=1",
        stores=stores,
    )
    assert flat(again[0]["valid_at_start"]) == pytest.approx(flat(broken[-1]["valid"]), rel=1e-6), (
        "final/ is what was validated"
    )


def flat(value: Any) -> list[float]:
    return (
        [value]
        if isinstance(value, (int, float))
        else [number for name in sorted(value) for number in flat(value[name])]
    )
