"""The page of settings is what the declarations say; changed settings are found without importing what a recipe names."""

from pathlib import Path
from typing import Any

import pytest
from support.recipe_settings import setting_paths

from headway.config.load import load
from headway.train.config import Recipe
from headway.train.settings_page import changed_settings, settings_page


def test_the_page_of_settings_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_page(), "run `make docs`"


def test_every_setting_is_on_the_page() -> None:
    page = settings_page()
    for path in setting_paths(Recipe):
        assert f"`{path.rsplit('.', 1)[-1]}`" in page


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
