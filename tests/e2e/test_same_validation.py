"""Every validation reads the same rows, whatever the microbatch, the ranks or the way batches are filled."""

from pathlib import Path
from typing import Any

import pytest
from support.ranks import start_processes
from support.runs import deterministic, make_stores, tiny_settings

from headway.config.load import load
from headway.train import train
from headway.train.config import Recipe

ROWS = 5
"""No size of a microbatch but 1 divides it, and the set has more."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("validation")
    make_stores(folder)
    return folder


def recipe(folder: Path, name: str, *more: str) -> Recipe:
    settings = [
        *tiny_settings(folder, name),
        "data.valid.fraction=0.4",
        f"eval.rows={ROWS}",
        "eval.every=1",
        "steps=1",
        "optim.lr=0",
    ]
    return load(Recipe, None, [*settings, "batch.rows=12", "checkpoint.at_end=false", *more])


def validation(folder: Path, name: str) -> dict[str, Any]:
    (record,) = deterministic(folder / name / "metrics.jsonl")
    return record["valid"]["valid"]


@pytest.fixture(scope="module")
def one_by_one(folder: Path) -> dict[str, Any]:
    train(recipe(folder, "one-by-one", "batch.micro_rows=1"))
    return validation(folder, "one-by-one")


@pytest.mark.parametrize(
    "more",
    [
        ["2"],
        ["3"],
        ["4"],
        ["6"],
        ["auto"],
        ["4", "data.balance=true"],
        ["3", "data.max_tokens=150"],
    ],
)
def test_the_microbatch_does_not_change_what_is_validated(
    folder: Path, one_by_one: dict[str, Any], more: list[str]
) -> None:
    name = f"of-{'-'.join(more)}"
    train(recipe(folder, name, f"batch.micro_rows={more[0]}", *more[1:]))
    assert validation(folder, name)["tokens"] == one_by_one["tokens"]
    assert validation(folder, name)["loss"] == pytest.approx(one_by_one["loss"], rel=1e-6)


@pytest.mark.parametrize("micro_rows", [1, 2, 3])
def test_two_ranks_validate_what_one_does(
    folder: Path, one_by_one: dict[str, Any], micro_rows: int
) -> None:
    name = f"two-ranks-{micro_rows}"
    start_processes(
        lambda: train(recipe(folder, name, f"batch.micro_rows={micro_rows}")), 2, timeout=120
    )
    assert validation(folder, name)["tokens"] == one_by_one["tokens"]
    assert validation(folder, name)["loss"] == pytest.approx(one_by_one["loss"], rel=1e-6)
