"""Configurations that are programs, read without running them. In: the text of a Python or shell file; out: names and plain values.

Python: assignments of literals, names, dict(), arithmetic on numbers, subscripts.
Shell: NAME=value, export, ${NAME:-default}, --option value.
Anything else becomes an `Unread`: the report names it, and nothing is executed.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.errors import ConfigError

MOST = 10**30
"""Numbers above this are refused: `9**9**9` would take forever."""
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow,
}  # fmt: skip


@dataclass(frozen=True)
class Unread:
    """A value that the file computes; its text is kept for the report."""

    source: str

    def __str__(self) -> str:
        return self.source


class _Computed(Exception):
    pass


@dataclass(frozen=True)
class PythonConfig:
    """The values of a Python file, the names that other values use, and the lines that are not plain assignments."""

    values: dict[str, Any]
    used: frozenset[str]
    skipped: tuple[str, ...]


def read_python(content: str, path: Path) -> PythonConfig:
    """Names and values of a Python configuration."""
    try:
        tree = ast.parse(content, str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{path}:{getattr(error, 'lineno', None) or 1}: not a Python file: {getattr(error, 'msg', error)}."
        ) from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path}: nested too deeply to be read.") from None
    values: dict[str, Any] = {}
    used: set[str] = set()
    skipped: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            names = node.targets if isinstance(node, ast.Assign) else [node.target]
            used |= {one.id for one in ast.walk(node.value) if isinstance(one, ast.Name)}
            found = _value(node.value, values)
            for name in names:
                if isinstance(name, ast.Name):
                    values[name.id] = found
                else:
                    skipped.append(_line(node))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            skipped.append(_line(node))
    return PythonConfig(values, frozenset(used), tuple(skipped))


def _line(node: ast.AST) -> str:
    try:
        return ast.unparse(node).splitlines()[0][:120]
    except RecursionError:  # Python 3.14 parses what it cannot write
        return "an expression nested too deeply"


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression; parts of a dict that cannot be read are marked, the rest is kept."""
    try:
        return _evaluate(node, names)
    except (
        _Computed,
        ArithmeticError,
        TypeError,
        KeyError,
        IndexError,
        ValueError,
        RecursionError,
    ):
        return Unread(_line(node))


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(one, names) for one in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            str(key.value): _value(one, names)
            for key, one in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, names)[_evaluate(node.slice, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        found = _evaluate(node.operand, names)
        return not found if isinstance(node.op, ast.Not) else -_bounded(found)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _bounded(_evaluate(node.left, names)), _bounded(_evaluate(node.right, names))
        if isinstance(node.op, ast.Pow) and abs(right) > 100:
            raise _Computed
        return _bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id, names)
    raise _Computed


def _call(node: ast.Call, name: str, names: Mapping[str, Any]) -> Any:
    if name == "dict" and not node.args and all(one.arg for one in node.keywords):
        return {str(one.arg): _value(one.value, names) for one in node.keywords}
    if name in ("int", "float") and len(node.args) == 1 and not node.keywords:
        found = _evaluate(node.args[0], names)
        return int(_bounded(found)) if name == "int" else float(found)
    raise _Computed


def _bounded(value: Any) -> Any:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or (abs(value) > MOST and value != float("inf"))
    ):
        raise _Computed
    return value


NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"^\s*(?:export\s+)?({NAME})=(\S.*)?$")
REFERENCE = re.compile(rf"\$(?:\{{({NAME})\}}|({NAME}))")
WITH_DEFAULT = re.compile(rf"^\$\{{({NAME}):?-(.*)\}}$")


def read_shell(content: str, path: Path) -> dict[str, Any]:
    """Variables of a shell script by upper-case name (`bsz=${BSZ:-16}` is BSZ) and `--options` of its commands; later lines win."""
    found: dict[str, Any] = {}
    options: dict[str, Any] = {}
    known: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", content).splitlines():
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quote that continues on the next line: no assignment of a plain value
        if not tokens:
            continue
        assigned = ASSIGNMENT.match(" ".join(tokens[1:] if tokens[0] == "export" else tokens))
        if assigned and len(tokens) <= 2:
            name, value = assigned[1], (assigned[2] or "").strip()
            if default := WITH_DEFAULT.match(value):
                value = default[2].strip("\"'")
            value = REFERENCE.sub(lambda m: known.get(m[1] or m[2], m[0]), value)
            known[name] = value
            shown_name = (default[1] if default else name).upper()
            found[shown_name] = Unread(value) if re.search(r"[$`]", value) else plain_value(value)
        else:
            options.update(_options(tokens))
    return found | options


def _options(tokens: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for index, token in enumerate(tokens):
        if re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", token):
            name, equals, value = token[2:].partition("=")
            rest: list[str] = []
            for other in tokens[index + 1 :] if not equals else ():
                if other.startswith("--") or other == ")":
                    break
                rest.append(other)
            values = [value] if equals else rest
            if any(re.search(r"[$`]", one) for one in values):
                continue  # a variable of the script, which is read where it is assigned
            found[name] = (
                plain_value(values[0])
                if len(values) == 1
                else [plain_value(one) for one in values] or True
            )
    return found


def plain_value(value: str) -> Any:
    """Text of a shell as a number, a truth value or text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value or None)
