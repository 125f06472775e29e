"""Where a mutant applies: an address such as `infer.chat:Chat.turns` goes in, a definition of src/headway comes out.

A definition is a function, a class, or a name that a module or a class assigns. It is found by the name behind the colon in the whole
package. The module before the colon only decides between several definitions of that name, so that a mutant follows a function that moves.
"""

from __future__ import annotations

import ast
import builtins
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PACKAGE = Path("src") / "headway"
Function = ast.FunctionDef | ast.AsyncFunctionDef
NEAR_NAMES = 3


class MisfitError(Exception):
    """A mutant does not fit the source."""


class SourceError(Exception):
    """A file of the source is no Python, e.g. in the middle of a merge."""


@dataclass(frozen=True)
class Definition:
    """Where something is defined. `file` is relative to src/headway."""

    file: str
    name: str
    is_assigned: bool

    @property
    def module(self) -> str:
        """`infer.chat` of infer/chat.py."""
        return ".".join(Path(self.file).with_suffix("").parts).removesuffix(".__init__")

    @property
    def address(self) -> str:
        """How a mutant names it."""
        return f"{self.module}:{self.name}"


@dataclass(frozen=True)
class Scope:
    """The statements of a definition in a fresh tree of its file, which may be changed.

    There are several where a name is defined twice: overloads, or the getter and the setter of a property.
    """

    tree: ast.Module
    statements: tuple[ast.stmt, ...]
    enclosing: tuple[ast.stmt, ...]

    @cached_property
    def local_names(self) -> set[str]:
        """Names that occur in the definition and in the functions around it."""
        return set().union(*(names_in(node) for node in (*self.statements, *self.enclosing)))

    @cached_property
    def known_names(self) -> set[str]:
        """All names that code inside the definition can use."""
        return self.local_names | self.global_names

    @cached_property
    def global_names(self) -> set[str]:
        """Names of the module, and those that Python brings."""
        names = {*dir(builtins), "__file__", "__name__"}
        for statement in _statements_of_scope(self.tree.body):
            match statement:
                case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                    names.add(statement.name)
                case ast.Import() | ast.ImportFrom():
                    names |= names_in(statement)
                case _:
                    names |= {
                        node.id
                        for node in ast.walk(statement)
                        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
                    }
        return names


class Source:
    """The modules below `root`/src/headway."""

    def __init__(self, root: Path) -> None:
        self.folder = root / PACKAGE

    @cached_property
    def files(self) -> list[str]:
        """All modules, as paths relative to src/headway."""
        paths = sorted(self.folder.rglob("*.py"))
        return [path.relative_to(self.folder).as_posix() for path in paths]

    @cached_property
    def by_name(self) -> dict[str, list[Definition]]:
        """All definitions, by the name behind the colon of their address."""
        by_name: dict[str, list[Definition]] = {}
        for file in self.files:
            for name, statement, _ in _definitions(self.parse(file).body):
                is_assigned = isinstance(statement, ast.Assign | ast.AnnAssign)
                definition = Definition(file, name, is_assigned)
                if definition not in by_name.setdefault(name, []):
                    by_name[name].append(definition)
        return by_name

    def parse(self, file: str) -> ast.Module:
        """A fresh tree of one file."""
        path = self.folder / file
        try:
            return ast.parse(path.read_text(encoding="utf-8"), file)
        except SyntaxError as problem:
            raise SourceError(f"{path}, line {problem.lineno}: {problem.msg}") from None

    def find(self, address: str, *, is_assigned: bool) -> Definition:
        """The definition that an address names."""
        module, _, name = address.partition(":")
        candidates = [
            definition
            for definition in self.by_name.get(name, ())
            if definition.is_assigned == is_assigned
        ]
        if len(candidates) > 1:
            common = [_common_parts(module, definition.module) for definition in candidates]
            candidates = [
                definition
                for definition, parts in zip(candidates, common, strict=True)
                if parts == max(common)
            ]
        if not candidates:
            near = ", ".join(self.near(address, is_assigned=is_assigned))
            raise MisfitError(f"there is no {name!r}; names like it: {near or 'none'}")
        if len(candidates) > 1:
            addresses = ", ".join(definition.address for definition in candidates[:NEAR_NAMES])
            raise MisfitError(f"{name!r} may be any of {len(candidates)}, e.g. {addresses}")
        return candidates[0]

    def near(self, address: str, *, is_assigned: bool) -> list[str]:
        """Addresses that may be meant: the same last name in the same package first, then similar ones."""
        last = address.rpartition(":")[2].rpartition(".")[2]
        addresses = [
            definition.address
            for definitions in self.by_name.values()
            for definition in definitions
            if definition.is_assigned == is_assigned
        ]
        namesakes = [other for other in addresses if other.endswith((f":{last}", f".{last}"))]
        namesakes.sort(key=lambda other: -_common_parts(address, other))
        package = address.partition(":")[0].partition(".")[0]
        neighbours = [
            other for other in addresses if other.startswith((f"{package}.", f"{package}:"))
        ]
        similar = difflib.get_close_matches(address, neighbours, NEAR_NAMES, cutoff=0.7)
        return list(dict.fromkeys([*namesakes, *similar]))[:NEAR_NAMES]

    def scope(self, definition: Definition) -> Scope:
        """The statements of a definition."""
        tree = self.parse(definition.file)
        places = [place for place in _definitions(tree.body) if place[0] == definition.name]
        statements = tuple(statement for _, statement, _ in places)
        return Scope(tree, statements, places[0][2])


def names_in(node: ast.AST) -> set[str]:
    """Names of variables, parameters, functions and imports anywhere below a node."""
    names: set[str] = set()
    for below in ast.walk(node):
        match below:
            case ast.Name():
                names.add(below.id)
            case ast.arg():
                names.add(below.arg)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(below.name)
            case ast.alias():
                names.add((below.asname or below.name).partition(".")[0])
            case ast.ExceptHandler() if below.name is not None:
                names.add(below.name)
            case _:
                pass
    return names


def _definitions(
    body: Sequence[ast.stmt], prefix: str = "", enclosing: tuple[ast.stmt, ...] = ()
) -> Iterator[tuple[str, ast.stmt, tuple[ast.stmt, ...]]]:
    """Name, statement and functions around it, of all definitions in a body. What a function assigns is local."""
    for statement in _statements_of_scope(body):
        if isinstance(statement, Function | ast.ClassDef):
            name = f"{prefix}{statement.name}"
            yield name, statement, enclosing
            outer = (*enclosing, statement) if isinstance(statement, Function) else enclosing
            yield from _definitions(statement.body, f"{name}.", outer)
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and not enclosing:
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target)):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield f"{prefix}{node.id}", statement, enclosing


def _statements_of_scope(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body and of its branches, but not of its functions and classes."""
    for statement in body:
        yield statement
        if isinstance(statement, Function | ast.ClassDef):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements_of_scope(getattr(statement, name, ()))
        for branch in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            yield from _statements_of_scope(branch.body)


def _common_parts(left: str, right: str) -> int:
    """How many parts of two dotted names agree from the left, and from the right."""
    ours = left.replace(":", ".").split(".")
    theirs = right.replace(":", ".").split(".")
    count = 0
    for pairs in (zip(ours, theirs, strict=False), zip(ours[::-1], theirs[::-1], strict=False)):
        for mine, other in pairs:
            if mine != other:
                break
            count += 1
    return count
