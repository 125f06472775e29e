"""Configurations that are programs, read without running them. In: the text of a Python or shell
file; out: names and plain values.

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
MOST_EXPONENT = 100
LINE_CHARACTERS = 120
"""Of a line that the report shows."""
OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


@dataclass(frozen=True)
class Unread:
    """A value that the file computes; its text is kept for the report."""

    source: str

    def __str__(self) -> str:
        return self.source


class _Computed(Exception):
    """An expression that only running it would evaluate."""


@dataclass(frozen=True)
class PythonConfig:
    """The values of a Python file, the names that other values use, and the lines that are not
    plain assignments.
    """

    values: dict[str, Any]
    used: frozenset[str]
    skipped: tuple[str, ...]


def read_python(content: str, path: Path) -> PythonConfig:
    """Names and values of a Python configuration."""
    try:
        tree = ast.parse(content, str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(
            f"{path}:{getattr(error, 'lineno', None) or 1}: not a Python file: "
            f"{getattr(error, 'msg', error)}."
        ) from None
    except (RecursionError, MemoryError):
        raise ConfigError(f"{path}: nested too deeply to be read.") from None
    values: dict[str, Any] = {}
    used: set[str] = set()
    skipped: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            used |= {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}
            value = _value(node.value, values)
            for target in targets:
                if isinstance(target, ast.Name):
                    values[target.id] = value
                else:
                    skipped.append(_line(node))
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            # A constant alone is a docstring, which assigns nothing.
            skipped.append(_line(node))
    return PythonConfig(values, frozenset(used), tuple(skipped))


def _line(node: ast.AST) -> str:
    try:
        return ast.unparse(node).splitlines()[0][:LINE_CHARACTERS]
    except RecursionError:  # Python 3.14 parses what it cannot write
        return "an expression nested too deeply"


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression, or an `Unread`. In a dict or list only the parts that cannot be
    read are marked.
    """
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
    """The value of an expression of the few forms that configurations need; others raise.

    Invariant: no code of the file runs, and time and memory are bounded by the file's size.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | bool | None):
        return node.value
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [_value(element, names) for element in node.elts]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        return {
            str(key.value): _value(value, names)
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.Subscript):
        return _evaluate(node.value, names)[_evaluate(node.slice, names)]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
        operand = _evaluate(node.operand, names)
        if isinstance(node.op, ast.Not):
            return not operand
        return -_bounded(operand)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left = _bounded(_evaluate(node.left, names))
        right = _bounded(_evaluate(node.right, names))
        # The bound on the result comes too late for a power.
        if isinstance(node.op, ast.Pow) and abs(right) > MOST_EXPONENT:
            raise _Computed
        return _bounded(OPERATORS[type(node.op)](left, right))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _call(node, node.func.id, names)
    raise _Computed


def _call(node: ast.Call, name: str, names: Mapping[str, Any]) -> Any:
    """`dict(a=1)`, `int(x)` and `float(x)`: the calls that are read."""
    # `dict(**other)` has a keyword without a name.
    if name == "dict" and not node.args and all(keyword.arg for keyword in node.keywords):
        return {str(keyword.arg): _value(keyword.value, names) for keyword in node.keywords}
    if name in ("int", "float") and len(node.args) == 1 and not node.keywords:
        argument = _evaluate(node.args[0], names)
        if name == "int":
            return int(_bounded(argument))
        return float(argument)
    raise _Computed


def _bounded(value: Any) -> Any:
    """A number of moderate size, or infinity, which configurations use for `never`.

    Texts and lists are refused too: `[0] * 10**9` is arithmetic in Python.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Computed
    if abs(value) > MOST and value != float("inf"):
        raise _Computed
    return value


NAME = r"[A-Za-z_][A-Za-z0-9_]*"
ASSIGNMENT = re.compile(rf"^\s*(?:export\s+)?({NAME})=(\S.*)?$")
REFERENCE = re.compile(rf"\$(?:\{{({NAME})\}}|({NAME}))")
WITH_DEFAULT = re.compile(rf"^\$\{{({NAME}):?-(.*)\}}$")
EXPANSION = re.compile(r"[$`]")
"""What a shell replaces: a value that holds one of these is computed."""


def read_shell(content: str, path: Path) -> dict[str, Any]:
    """Variables of a shell script by upper-case name (`bsz=${BSZ:-16}` is BSZ) and `--options` of
    its commands; later lines win.
    """
    variables: dict[str, Any] = {}
    options: dict[str, Any] = {}
    # The text of each variable under its name in the script, for `$name` in later lines.
    texts: dict[str, str] = {}
    for line in re.sub(r"\\\n", " ", content).splitlines():
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quote that continues on the next line: no assignment of a plain value
        if not tokens:
            continue
        words = tokens
        if tokens[0] == "export":
            words = tokens[1:]
        assigned = ASSIGNMENT.match(" ".join(words))
        # More words make it a command with a variable in its environment.
        if not assigned or len(tokens) > 2:
            options.update(_options(tokens))
            continue

        name = assigned[1]
        value = (assigned[2] or "").strip()
        public_name = name
        if default := WITH_DEFAULT.match(value):
            public_name = default[1]
            value = default[2].strip("\"'")
        value = REFERENCE.sub(lambda match: texts.get(match[1] or match[2], match[0]), value)
        texts[name] = value
        if EXPANSION.search(value):
            variables[public_name.upper()] = Unread(value)
        else:
            variables[public_name.upper()] = plain_value(value)
    return variables | options


COMMAND = re.compile(
    r"(?m)^\s*(#!.*sh\b|(?:export\s+\S+=|set -|python3?\s|torchrun\s|ray\s|deepspeed\s))"
)
OVERRIDE = re.compile(rf"^\+{{0,2}}({NAME}(?:\.{NAME})+)=(.*)$", re.DOTALL)


def is_shell(content: str) -> bool:
    """Whether a text is a shell script, by its first line or a command in it."""
    return COMMAND.search(content) is not None


def read_overrides(content: str) -> dict[str, Any]:
    """The `section.key=value` words of the commands of a shell script; later ones win.

    `$name` is replaced where the script assigns it as plain text.
    """
    texts: dict[str, str] = {}
    values: dict[str, Any] = {}
    for line in re.sub(r"\\\n", " ", content).splitlines():
        try:
            tokens = shlex.split(line, comments=True)
        except ValueError:
            continue  # a quote that continues on the next line
        if len(tokens) == 1 and (assigned := ASSIGNMENT.match(tokens[0])):
            text = assigned[2] or ""
            if default := WITH_DEFAULT.match(text):
                text = default[2].strip("\"'")
            texts[assigned[1]] = _replaced(text, texts)
            continue
        for token in tokens:
            override = OVERRIDE.match(token)
            if override is None:
                continue
            value = _replaced(override[2], texts)
            if EXPANSION.search(value) and not value.startswith("$HOME"):
                values[override[1]] = Unread(value)
            else:
                values[override[1]] = plain_value(value.strip("\"'"))
    return values


def _replaced(text: str, texts: Mapping[str, str]) -> str:
    return REFERENCE.sub(lambda match: texts.get(match[1] or match[2], match[0]), text)


def _options(tokens: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name a b` (a list) and `--name` (true) of one command."""
    options: dict[str, Any] = {}
    for index, token in enumerate(tokens):
        if not re.fullmatch(r"--[A-Za-z][\w-]*(=.*)?", token):
            continue
        name, equals, value = token[2:].partition("=")
        values: list[str] = []
        if equals:
            values = [value]
        else:
            for following in tokens[index + 1 :]:
                # `arguments=( --a 1 )`: the parenthesis ends an array.
                if following.startswith("--") or following == ")":
                    break
                values.append(following)

        if any(EXPANSION.search(value) for value in values):
            continue  # a variable of the script, which is read where it is assigned
        if len(values) == 1:
            options[name] = plain_value(values[0])
        else:
            options[name] = [plain_value(value) for value in values] or True
    return options


def plain_value(value: str) -> Any:
    """Text of a shell as a number, a truth value or text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(value.lower(), value or None)
