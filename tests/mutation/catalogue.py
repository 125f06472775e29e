"""The mutants, as data: `catalogue/*.toml` come in, checked `Mutant`s go out. A mutant belongs to the package whose file it changes.

    fallback = ["tests/e2e/test_heal.py"]        tried after the tests of the package's own folder, tests/unit/<package>

    [[mutant]]
    name = "a word or two, unique in the file"
    file = "train/health.py"                     below src/headway
    find = '''text that occurs exactly once in the file'''
    replace = '''what stands there instead'''
    why = "what would go wrong"
    tests = ["tests/unit/train/test_heal.py"]    tried first; files, or single tests as pytest names them

Text that no longer occurs exactly once in the source is an error, so that the catalogue stays true.
"""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "catalogue"
ROOT = Path(__file__).parents[2]
PACKAGE = Path("src") / "headway"


class CatalogueError(Exception):
    """The catalogue and the source do not belong together."""


@dataclass(frozen=True)
class Mutant:
    """One small change of the source that some test must notice."""

    package: str
    name: str
    file: str
    find: str
    replace: str
    why: str
    tests: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """How people call it."""
        return f"{self.package}: {self.name}"

    @property
    def digest(self) -> str:
        """Changes with what the mutant does."""
        return hashlib.sha256("\0".join((self.file, self.find, self.replace)).encode()).hexdigest()

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

    def mutated(self, root: Path) -> str:
        """The content of the file with the change."""
        path = self.source(root)
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.count(self.find) != 1:
            raise CatalogueError(
                f"{self.id}: its text occurs {text.count(self.find)} times in {path.relative_to(root)}, not once"
            )
        changed = text.replace(self.find, self.replace)
        try:
            if path.suffix == ".py":
                compile(changed, self.file, "exec")
        except SyntaxError as problem:
            raise CatalogueError(f"{self.id}: is no Python: {problem}") from None
        return changed

    def targets(self, root: Path) -> tuple[list[str], list[str]]:
        """What to run: the tests it names, and where those do not notice it, those of its package."""
        # another tree may be older than a test: there whole files are tried
        tests = (
            self.tests
            if root == ROOT
            else tuple(dict.fromkeys(test.partition("::")[0] for test in self.tests))
        )
        missing = [test for test in tests if not (root / test.partition("::")[0]).is_file()]
        if missing and root == ROOT:
            raise CatalogueError(f"{self.id}: there is no {missing[0]}")
        folder = root / "tests" / "unit" / self.package
        stem = Path(self.file).stem.strip("_")
        files = sorted(
            folder.rglob("test_*.py"), key=lambda path: (stem not in path.name, path.name)
        )
        rest = [str(path.relative_to(root)) for path in files]
        return [test for test in tests if test not in missing], [
            *rest,
            *(one for one in self.fallback if (root / one).is_file()),
        ]


def read_catalogue(root: Path = ROOT, folder: Path = FOLDER) -> list[Mutant]:
    """All mutants, every one of which fits the source below `root`."""
    found: list[Mutant] = []
    problems: list[str] = []
    pages = {
        path.stem: tomllib.loads(path.read_text(encoding="utf-8"))
        for path in sorted(folder.glob("*.toml"))
    }
    for page in pages.values():
        for one in page["mutant"]:
            package = Path(one["file"]).parts[0]
            tests = tuple(one.pop("tests", ()))
            mutant = Mutant(
                package,
                **one,
                tests=tests,
                fallback=tuple(pages.get(package, {}).get("fallback", ())),
            )
            found.append(mutant)
            try:
                mutant.mutated(root)
                mutant.targets(root)
            except CatalogueError as problem:
                problems.append(str(problem))
    names = [mutant.id for mutant in found]
    problems += sorted(
        {f"{name}: two mutants have this name" for name in names if names.count(name) > 1}
    )
    if problems:
        raise CatalogueError("\n".join(problems))
    return found
