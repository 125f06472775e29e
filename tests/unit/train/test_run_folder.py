"""What is read of a run folder without its run."""

from __future__ import annotations

from pathlib import Path

import pytest

from headway.train.run_folder import read_sparsity_target


@pytest.mark.parametrize(
    ("recipe", "target"),
    [
        ("objective: {kind: head_sparsity, target: 0.6}", 0.6),
        ("objective: {kind: head_sparsity, target: 1}", 1.0),
        ("objective: {kind: next_token}", None),
        ("objective: next_token", None),
        ("steps: 4", None),
        ("- a list", None),
        ("objective: {", None),
        ("objective: {target: high}", None),
    ],
)
def test_the_sparsity_that_gates_were_trained_for_is_that_of_the_recipe(
    tmp_path: Path, recipe: str, target: float | None
) -> None:
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert read_sparsity_target(tmp_path) == target


def test_a_folder_that_is_no_run_has_no_such_target(tmp_path: Path) -> None:
    assert read_sparsity_target(tmp_path) is None
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe")
    assert read_sparsity_target(tmp_path) is None
