"""docs/api-reference.md is what the docstrings say, and has every public name."""

import importlib.util
import inspect
from pathlib import Path
from types import ModuleType

import pytest

import headway as hw
from headway import plugin

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def site_pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "_site_pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_names_is_current(site_pages: ModuleType) -> None:
    page = (DOCS / "api-reference.md").read_text(encoding="utf-8")
    assert page == site_pages.api_page(), "run `make reference`"


def test_every_public_name_is_on_the_page(site_pages: ModuleType) -> None:
    headings = {
        line.removeprefix("## ") for line in site_pages.api_page().splitlines() if line[:3] == "## "
    }
    names = {f"hw.{name}" for name in hw.__all__ if not name.startswith("_")}
    # Names that both modules have are shown once.
    names |= {f"plugin.{name}" for name in plugin.__all__ if name not in hw.__all__}
    assert names <= headings, sorted(names - headings)


def test_every_public_function_and_method_has_a_docstring() -> None:
    without: list[str] = []
    for name in hw.__all__:
        thing = getattr(hw, name)
        if not inspect.isclass(thing):
            if inspect.isfunction(thing) and not thing.__doc__:
                without.append(name)
            continue
        without += [
            f"{name}.{member}"
            for member in vars(thing)
            if not member.startswith("_")
            and (callable(getattr(thing, member)) or isinstance(vars(thing)[member], property))
            and not inspect.getdoc(getattr(thing, member))
        ]
    assert not without
