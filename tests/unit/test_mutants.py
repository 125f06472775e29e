"""The catalogue of mutants follows the source, and says so where it cannot."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

MUTATION = Path(__file__).parents[1] / "mutation"

SOURCE = '''
LIMIT = 3


def clip(values, most):
    """Leave out what is too large."""
    kept = []
    for value in values:
        if value is None:
            continue
        if (
            value < most
            and len(kept) < LIMIT  # a comment
        ):
            kept.append(abs(value))
    return kept
'''
ENTRY = """
[[mutant]]
name = "a mistake"
function = "data.limits:clip"
{change}
why = "wrong"
"""


class Tree:
    """A source of one module, and a catalogue of one mutant of it."""

    def __init__(self, root):
        self.root = root
        self.page = root / "catalogue" / "page.toml"
        self.page.parent.mkdir()

    def write(self, source, file="data/limits.py"):
        path = self.root / "src" / "headway" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
        return path

    def read(self, change, entry=ENTRY):
        from catalogue import read_catalogue

        self.page.write_text(entry.format(change=change))
        (mutant,) = read_catalogue(self.root, self.page.parent)
        return mutant


@pytest.fixture
def tree(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(MUTATION)
    tree = Tree(tmp_path)
    tree.write(SOURCE)
    yield tree
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file is not None and Path(file).parent == MUTATION:
            del sys.modules[name]


def difference(mutant):
    """The lines that the mutant changes, as they are and as it writes them."""
    before = ast.unparse(ast.parse(SOURCE)).splitlines()
    after = mutant.text.splitlines()
    return [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize(
    ("change", "before", "after"),
    [
        ('change = "(value<most)"\nto = "value <= most"', "value < most", "value <= most"),
        ('change = "kept.append(abs(value))"\nto = "break"', "kept.append(abs(value))", "break"),
        ('drop = "append"', "kept.append(abs(value))", "pass"),
        ('drop = "kept = []"', "kept = []", "pass"),
        ('operator = "and"\nto = "or"', "and len", "or len"),
        ('operator = "<"\nto = "<="\nwhich = "2 of 2"', "< LIMIT", "<= LIMIT"),
        ('condition = "1 of 2"\nto = "not"', "if value is None", "if not value is None"),
        ('unwrap = "abs"', "abs(value)", "value"),
    ],
)
def test_a_change_is_made_where_it_says_and_nowhere_else(tree, change, before, after):
    ((old, new),) = difference(tree.read(change))
    assert old.replace(before, after) == new


def test_a_constant_has_another_value(tree):
    entry = ENTRY.replace('function = "data.limits:clip"', 'constant = "data.limits:LIMIT"')
    assert difference(tree.read('to = "4"', entry)) == [("LIMIT = 3", "LIMIT = 4")]


def test_a_mutant_follows_a_function_that_moves_and_variables_that_are_renamed(tree):
    path = tree.write(SOURCE)
    path.unlink()
    tree.write(SOURCE.replace("kept", "result"), "text/clip.py")
    mutant = tree.read('drop = "kept.append(abs(value))"')
    assert mutant.file == "text/clip.py"
    assert mutant.renamed == {"kept": "result"}
    assert (mutant.move.old, mutant.move.new) == ("data.limits:clip", "text.clip:clip")
    assert "append" not in mutant.text


def test_a_new_name_of_a_function_is_found_by_its_code_and_written_into_the_catalogue(tree):
    from catalogue import CatalogueError, mend

    change = 'change = "value < most"\nto = "value <= most"'
    tree.write(SOURCE.replace("def clip", "def shorten"))
    with pytest.raises(CatalogueError, match=r"its code is in data\.limits:shorten") as caught:
        tree.read(change)
    mend(caught.value.moves)
    assert 'function = "data.limits:shorten"' in tree.page.read_text()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ('operator = "<"\nto = "<="', "it occurs in lines 12, 13: `which` must say which"),
        ('operator = "<"\nto = "<="\nwhich = "1 of 3"', "but there are 2 times it occurs"),
        ('condition = "1 of 3"\nto = "True"', "but there are 2 conditions"),
        ('change = "value > most"\nto = "True"', "similar code is in line 12 of data/limits.py"),
        ('change = "value < most"\nto = "limit"', "`to` has the name 'limit', which is not known"),
        ('change = "value < most"', "'change' is written with 'to'"),
        ('remove = "append"', "has an unknown key 'remove'"),
    ],
)
def test_a_mutant_that_does_not_fit_says_why(tree, change, problem):
    from catalogue import CatalogueError

    with pytest.raises(CatalogueError, match=problem.replace("(", r"\(")):
        tree.read(change)


def test_a_namesake_in_another_package_is_not_changed_unless_it_has_the_code(tree):
    from catalogue import CatalogueError

    tree.write(SOURCE).unlink()
    tree.write(SOURCE, "text/clip.py")
    with pytest.raises(CatalogueError, match=r"is it text\.clip:clip now"):
        tree.read('operator = "and"\nto = "or"')


@pytest.mark.parametrize("change", ['drop = "append"', 'drop = "extend"'])
def test_a_test_that_is_gone_is_said_whether_the_mutant_fits_or_not(tree, monkeypatch, change):
    import catalogue

    monkeypatch.setattr(catalogue, "ROOT", tree.root)
    named = 'tests = ["tests/test_clip.py::test_it"]'
    gone = r"there is no tests/test_clip\.py::test_it; it may be gone"
    with pytest.raises(catalogue.CatalogueError, match=gone):
        tree.read(f"{change}\n{named}")
    moved = tree.root / "tests" / "test_limits.py"
    moved.parent.mkdir()
    moved.write_text("def test_it():\n    pass\n")
    with pytest.raises(catalogue.CatalogueError, match=r"tests/test_limits\.py::test_it") as caught:
        tree.read(f"{change}\n{named}")
    catalogue.mend(caught.value.moves)
    assert 'tests = ["tests/test_limits.py::test_it"]' in tree.page.read_text()


def test_a_fallback_that_is_gone_is_said(tree, monkeypatch):
    import catalogue

    monkeypatch.setattr(catalogue, "ROOT", tree.root)
    page = f'fallback = ["tests/test_clip.py"]\n{ENTRY}'
    with pytest.raises(catalogue.CatalogueError, match=r"all of them \(page\.toml, fallback\)"):
        tree.read('drop = "append"', page)
