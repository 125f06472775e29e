"""Which settings of a recipe differ from their defaults, without importing what the recipe names."""

from typing import Any

import pytest

from headway.config.load import load
from headway.train.config import Recipe
from headway.train.settings_page import changed_settings


def plain(*overrides: str) -> dict[str, Any]:
    return load(Recipe, None, list(overrides)).model_dump(mode="json", by_alias=True)


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        ([], []),
        (["optim.lr=0.5"], ["optim.lr"]),
        (["objective.kind=dpo", "objective.beta=0.7"], ["objective.kind", "objective.beta"]),
        (["data.seq_len=96", "eval.every=7"], ["data.seq_len", "eval.every"]),
    ],
)
def test_changed_settings_are_those_given(overrides: list[str], changed: list[str]) -> None:
    untouched = changed_settings(plain())
    assert sorted(set(changed_settings(plain(*overrides))) - set(untouched)) == sorted(changed)


def test_a_recipe_as_it_is_changes_nearly_nothing() -> None:
    assert len(changed_settings(plain())) < 10


def test_code_that_a_recipe_names_is_not_imported() -> None:
    recipe = plain() | {"objective": {"kind": "no_such_package.loss", "strength": 3}}
    assert "objective" in changed_settings(recipe)
