"""No dead settings: a second legal value of every setting changes something that can be seen.

Each row (tests/support/rows/) names a setting, the overrides that go before it, two values, and what to look at. No row: a failure.
"""

import json
import shutil
from typing import Any

import pytest
from support.recipe_settings import setting_paths
from support.rows import all_rows
from support.rows.aligner import encoded_by
from support.setting_runs import data_folder, trained_run

from headway.train.config import Recipe

TABLE = all_rows()


def as_override(path: str, value: Any) -> str:
    """`optim[adamw].lr`, 1e-3 -> `optim.lr=0.001`; a list stands for the whole list that holds the setting."""
    key = path.split("[")[0] + (path.split("]")[1] if "]" in path else "")
    if path.startswith("model.aligner.encoders["):
        key = f"model.aligner.encoders.{encoded_by(path.split('[')[1].split(']')[0])}{path.split(']')[1]}"
    if isinstance(value, list) and (
        ".groups." in path or path.startswith(("data.train.", "track[", "stages.", "reward["))
    ):
        key = (
            key.split(".")[0]
            if path.startswith(("track", "stages", "reward"))
            else ".".join(key.split(".")[:2])
        )
        return f"{key}=[{', '.join(value)}]"
    if path.startswith("data.valid.sets."):
        return f"data.valid.sets={value}"
    text = (
        "null"
        if value is None
        else json.dumps(value)
        if not isinstance(value, str)
        else value or '""'
    )
    return f"{key}={text}"


@pytest.fixture(scope="module", autouse=True)
def restored() -> Any:
    import torch

    yield
    torch.use_deterministic_algorithms(False)
    shutil.rmtree(data_folder(), ignore_errors=True)


def test_every_setting_has_a_row() -> None:
    assert set(setting_paths(Recipe)) == set(TABLE)


@pytest.mark.parametrize("path", TABLE)
def test_a_second_value_changes_what_is_seen(path: str) -> None:
    before, first, second, look = TABLE[path]
    if path in ("init.from", "init.content"):
        trained_run(("run.dir=$/runs1",))
    seen = [
        look(
            tuple(
                text.replace("$", str(data_folder()))
                for text in (*before, as_override(path, value))
            )
        )
        for value in (first, second)
    ]
    assert seen[0] != seen[1], f"{path}={first} and {path}={second} look the same: {seen[0]}"
