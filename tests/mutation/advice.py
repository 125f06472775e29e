"""What to do with a mutant that no longer fits: the code it changes is looked for in the whole source."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from change import Place, expression_places, is_call, match, parse_code, statement_places
from source import Definition, Function, MisfitError, Source

SIMILAR = 0.6
"""How similar code must be to be shown for what is gone."""
SHOWN_HOMES = 4
SHOWN_CHARACTERS = 120


class Advice:
    """What may be meant by entries that do not fit."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def on(self, entry: Mapping[str, Any]) -> tuple[list[str], str | None]:
        """Lines for people, and the address of the function that is meant, where there is no doubt."""
        code = entry.get("change") or entry.get("drop")
        if code is None:
            return [], None
        address = entry.get("function") or entry["constant"]
        lines: list[str] = []
        try:
            pattern = parse_code(code, entry.get("to"))
        except MisfitError:
            return [], None
        try:
            definition = self.source.find(address, is_assigned="constant" in entry)
        except MisfitError:
            definition = None
        if definition is not None:
            lines += self._similar(pattern, definition)
        homes = self._homes(pattern, code if "drop" in entry else None)
        homes = [home for home in homes if definition is None or home != definition.address]
        if homes:
            lines.append(f"its code is in {', '.join(homes[:SHOWN_HOMES])}")
        is_sure = len(homes) == 1 and "constant" not in entry
        return lines, homes[0] if is_sure else None

    def _similar(self, pattern: list[ast.AST], definition: Definition) -> list[str]:
        """The most similar code of the definition that is still there."""
        scope = self.source.scope(definition)
        places: list[Place]
        if isinstance(pattern[0], ast.expr):
            places = list(expression_places(scope))
        else:
            places = list(statement_places(scope, len(pattern)))
        wanted = _text(pattern)
        matcher = difflib.SequenceMatcher(b=wanted, autojunk=False)
        best = (SIMILAR, 0, "")
        for place in places:
            text = _text(place.nodes)
            matcher.set_seq1(text)
            if matcher.real_quick_ratio() > best[0] and matcher.ratio() > best[0]:
                best = (matcher.ratio(), place.position[0], text)
        if not best[2]:
            return []
        shown = best[2].replace("\n", " ; ")[:SHOWN_CHARACTERS]
        return [f"similar code is in line {best[1]} of {definition.file}: {shown}"]

    def _homes(self, pattern: list[ast.AST], dropped: str | None) -> list[str]:
        """Functions that have the code."""
        homes: list[str] = []
        for address, nodes in self._code.get(type(pattern[0]), ()):
            if len(nodes) < len(pattern):
                continue
            is_dropped = dropped is not None and is_call(nodes[0], dropped)
            if is_dropped or match(pattern, nodes[: len(pattern)], {}) is not None:
                homes.append(address)
        return list(dict.fromkeys(homes))

    @cached_property
    def _code(self) -> dict[type[ast.AST], list[tuple[str, tuple[ast.AST, ...]]]]:
        """All code of the source by the type of its first node, with the innermost function around it."""
        code: dict[type[ast.AST], list[tuple[str, tuple[ast.AST, ...]]]] = {}

        def visit(node: ast.AST, file: str, name: str) -> None:
            if isinstance(node, Function | ast.ClassDef):
                name = f"{name}.{node.name}" if name else node.name
            for _, value in ast.iter_fields(node):
                children = value if isinstance(value, list) else [value]
                for index, child in enumerate(children):
                    if isinstance(child, ast.stmt) or (isinstance(child, ast.expr) and name):
                        neighbours = (
                            tuple(children[index:]) if isinstance(child, ast.stmt) else (child,)
                        )
                        address = Definition(file, name, is_assigned=False).address
                        code.setdefault(type(child), []).append((address, neighbours))
                    if isinstance(child, ast.AST):
                        visit(child, file, name)

        for file in self.source.files:
            visit(self.source.parse(file), file, "")
        return code


def homes_of_test(test: str, root: Path) -> list[str]:
    """Where a test is: `test` itself, or the files that have a test (or are files) of that name."""
    file, _, name = test.partition("::")
    path = root / file
    definition = f"def {name.partition('[')[0]}("
    if path.is_file() and (not name or definition in path.read_text(encoding="utf-8")):
        return [test]
    files = sorted((root / "tests").rglob("test_*.py" if name else path.name))
    if name:
        files = [other for other in files if definition in other.read_text(encoding="utf-8")]
    suffix = f"::{name}" if name else ""
    return [f"{other.relative_to(root)}{suffix}" for other in files]


def _text(nodes: tuple[ast.AST, ...] | list[ast.AST]) -> str:
    return "\n".join(ast.unparse(node) for node in nodes)
