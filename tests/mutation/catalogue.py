"""The mutants, as data: `catalogue/*.toml` come in, checked `Mutant`s go out. CONTRIBUTING.md shows how one is written.

A mutant belongs to the package whose file it changes. One that no longer fits the source is an error, so that the catalogue stays true.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advice import Advice, homes_of_test
from change import Change
from source import PACKAGE, Definition, MisfitError, Source

FOLDER = Path(__file__).parent / "catalogue"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Move:
    """The address of a function or a test in an entry is another one now."""

    page: Path
    name: str
    old: str
    new: str


@dataclass(frozen=True)
class Misfit:
    """An entry of the catalogue that does not fit the source."""

    page: Path
    id: str
    address: str
    problem: str
    moves: tuple[Move, ...] = ()
    """How to mend it, where there is no doubt."""

    def __str__(self) -> str:
        return f"{self.id} ({self.page.name}, {self.address})\n    {self.problem}"


class CatalogueError(Exception):
    """The catalogue and the source do not belong together."""

    def __init__(self, misfits: Sequence[Misfit], moves: Sequence[Move]) -> None:
        self.moves = [*moves, *(move for misfit in misfits for move in misfit.moves)]
        count = f"mutants that do not fit the source: {len(misfits)}"
        super().__init__("\n".join([*(str(misfit) for misfit in misfits), count]))


@dataclass(frozen=True)
class Mutant:
    """One small change of the source that some test must notice."""

    package: str
    name: str
    file: str
    why: str
    text: str
    """The content of the file with the change."""
    digest: str
    """Changes with what the mutant does."""
    tests: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    renamed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Local variables that have another name in the source than in the catalogue."""
    move: Move | None = None

    @property
    def id(self) -> str:
        """How people call it."""
        return f"{self.package}: {self.name}"

    @property
    def module(self) -> str:
        """The module it changes; for a template's file, the one that reads it."""
        if self.file.endswith(".jinja"):
            return "headway.tokenizer.chat_template"
        return ".".join(("headway", *Path(self.file).with_suffix("").parts)).removesuffix(
            ".__init__"
        )

    def source(self, root: Path) -> Path:
        """The file it changes."""
        return root / PACKAGE / self.file

    def targets(self, root: Path) -> tuple[list[str], list[str]]:
        """What to run: the tests it names, and where those do not notice it, those of its package."""
        tests = self.tests
        if root != ROOT:
            # another tree may be older than a test: there whole files are tried
            tests = tuple(dict.fromkeys(test.partition("::")[0] for test in self.tests))
        folder = root / "tests" / "unit" / self.package
        stem = Path(self.file).stem.strip("_")
        files = sorted(
            folder.rglob("test_*.py"), key=lambda path: (stem not in path.name, path.name)
        )
        rest = [str(path.relative_to(root)) for path in files]
        rest += [test for test in self.fallback if (root / test).is_file()]
        return [test for test in tests if (root / test.partition("::")[0]).is_file()], rest


def read_catalogue(
    root: Path = ROOT, folder: Path = FOLDER, only: Sequence[str] = ()
) -> list[Mutant]:
    """The mutants whose id contains one of `only`, every one of which fits the source below `root`."""
    pages = {path: tomllib.loads(path.read_text(encoding="utf-8")) for path in _pages(folder)}
    fallback = {path.stem: tuple(page.get("fallback", ())) for path, page in pages.items()}
    source = Source(root)
    advice = Advice(source)
    mutants: list[Mutant] = []
    misfits: list[Misfit] = []
    # Another tree may be older than a test.
    checks_tests = root == ROOT
    if checks_tests and not only:
        misfits += _lost_fallbacks(pages, root)
    entries = [(path, entry) for path, page in pages.items() for entry in page["mutant"]]
    for path, entry in entries:
        name = entry["name"]
        address = entry.get("function") or entry.get("constant") or entry.get("file") or ""
        # while it is not found, a mutant belongs where it was
        identity = f"{address.replace('/', '.').partition(':')[0].partition('.')[0]}: {name}"
        try:
            mutant = _read(path, entry, source, fallback)
            identity = mutant.id
        except MisfitError as problem:
            if _is_chosen(identity, only):
                lines, home = advice.on(entry)
                explained = "\n    ".join([str(problem), *lines])
                moves = () if home is None else (Move(path, name, address, home),)
                misfits.append(Misfit(path, identity, address, explained, moves))
                if checks_tests:
                    misfits += _lost_tests(path, entry, identity, address, root)
            continue
        if not _is_chosen(identity, only):
            continue
        if any(other.id == mutant.id for other in mutants):
            misfits.append(Misfit(path, identity, address, "two mutants have this name"))
        mutants.append(mutant)
        if checks_tests:
            misfits += _lost_tests(path, entry, identity, address, root)
    if misfits:
        raise CatalogueError(misfits, [mutant.move for mutant in mutants if mutant.move])
    return mutants


def _lost_tests(
    path: Path, entry: Mapping[str, Any], identity: str, address: str, root: Path
) -> list[Misfit]:
    """The tests that an entry names and that are not there."""
    misfits: list[Misfit] = []
    for test in entry.get("tests", ()):
        homes = homes_of_test(test, root)
        if test in homes:
            continue
        moves: tuple[Move, ...] = ()
        if len(homes) == 1:
            moves = (Move(path, entry["name"], test, homes[0]),)
        explained = _no_test(test, homes)
        misfits.append(Misfit(path, identity, address, explained, moves))
    return misfits


def _lost_fallbacks(pages: Mapping[Path, Mapping[str, Any]], root: Path) -> list[Misfit]:
    """The tests that pages name for a whole package and that are not there."""
    misfits: list[Misfit] = []
    for path, page in pages.items():
        for test in page.get("fallback", ()):
            homes = homes_of_test(test, root)
            if test not in homes:
                misfits.append(
                    Misfit(path, f"{path.stem}: all of them", "fallback", _no_test(test, homes))
                )
    return misfits


def _no_test(test: str, homes: Sequence[str]) -> str:
    return f"there is no {test}; it may be {' or '.join(homes) or 'gone'}"


def mend(moves: Sequence[Move]) -> None:
    """Write new addresses into the catalogue."""
    for move in moves:
        entries = move.page.read_text(encoding="utf-8").split("[[mutant]]\n")
        for index, entry in enumerate(entries[1:], 1):
            if tomllib.loads(entry)["name"] == move.name:
                entries[index] = entry.replace(f'"{move.old}"', f'"{move.new}"', 1)
        move.page.write_text("[[mutant]]\n".join(entries), encoding="utf-8")


def _pages(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.toml"))


def _is_chosen(identity: str, only: Sequence[str]) -> bool:
    return not only or any(word in identity for word in only)


def _read(
    page: Path, entry: Mapping[str, Any], source: Source, fallback: Mapping[str, tuple[str, ...]]
) -> Mutant:
    renamed: dict[str, str] = {}
    move: Move | None = None
    if "file" in entry:
        file = entry["file"]
        text = _replaced_text(entry, source)
    else:
        definition = _definition(entry, source)
        file = definition.file
        address = entry.get("function") or entry["constant"]
        if definition.address != address:
            move = Move(page, entry["name"], address, definition.address)
        scope = source.scope(definition)
        renamed = _change(entry).apply(scope)
        text = ast.unparse(ast.fix_missing_locations(scope.tree)) + "\n"
        try:
            compile(text, file, "exec")
        except SyntaxError as problem:
            raise MisfitError(f"is no Python: {problem}") from None
    package = Path(file).parts[0]
    told = {"name", "why", "tests"}
    return Mutant(
        package,
        entry["name"],
        file,
        entry["why"],
        text,
        hashlib.sha256(
            repr(sorted((key, entry[key]) for key in entry if key not in told)).encode()
        ).hexdigest(),
        tuple(entry.get("tests", ())),
        fallback.get(package, ()),
        renamed,
        move,
    )


def _definition(entry: Mapping[str, Any], source: Source) -> Definition:
    if ("function" in entry) == ("constant" in entry):
        raise MisfitError("names a function, a constant or a file")
    address: str = entry.get("function") or entry["constant"]
    definition = source.find(address, is_assigned="constant" in entry)
    package = address.partition(":")[0].partition(".")[0]
    if definition.module.partition(".")[0] != package and not _quotes_code(entry):
        # a namesake in another package may be something else, and nothing here would tell
        raise MisfitError(f"it is gone from {package}; is it {definition.address} now?")
    return definition


def _quotes_code(entry: Mapping[str, Any]) -> bool:
    return "change" in entry or (
        "drop" in entry and not entry["drop"].replace(".", "").isidentifier()
    )


def _change(entry: Mapping[str, Any]) -> Change:
    told = {"name", "why", "tests", "function", "constant"}
    unknown = entry.keys() - told - Change.__dataclass_fields__.keys()
    if unknown:
        raise MisfitError(f"has an unknown key {min(unknown)!r}")
    return Change(**{key: entry[key] for key in entry if key not in told})


def _replaced_text(entry: Mapping[str, Any], source: Source) -> str:
    """Files that are not Python have no syntax tree here: their text is replaced."""
    path = source.folder / entry["file"]
    if path.suffix == ".py":
        raise MisfitError("a change of Python names a function or a constant, not a file")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    count = text.count(entry["find"])
    if count != 1:
        raise MisfitError(f"its text occurs {count} times, not once")
    return text.replace(entry["find"], entry["replace"])
