"""The page of settings is what the declarations say."""

from pathlib import Path

from support.recipe_settings import setting_paths

from headway.train.config import Recipe
from headway.train.settings_page import settings_page


def test_the_page_is_current() -> None:
    page = Path(__file__).parents[3] / "docs" / "settings.md"
    assert page.read_text(encoding="utf-8") == settings_page(), "run `make docs`"


def test_every_setting_is_on_the_page() -> None:
    page = settings_page()
    for path in setting_paths(Recipe):
        assert f"`{path.rsplit('.', 1)[-1]}`" in page
