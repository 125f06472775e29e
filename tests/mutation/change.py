"""What a mutant changes inside a definition: text of the catalogue goes in, a changed syntax tree comes out.

Code is compared as a syntax tree, so that layout, quotes and comments do not matter. A local variable may have been renamed since: a name
that the definition no longer has stands for whichever variable is in its place now.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

from source import MisfitError, Scope, names_in

OPERATORS: dict[str, tuple[type[ast.AST], type[ast.AST]]] = {
    **{
        text: (ast.Compare, operator)
        for text, operator in {
            "==": ast.Eq,
            "!=": ast.NotEq,
            "<": ast.Lt,
            "<=": ast.LtE,
            ">": ast.Gt,
            ">=": ast.GtE,
            "is": ast.Is,
            "is not": ast.IsNot,
            "in": ast.In,
            "not in": ast.NotIn,
        }.items()
    },
    **{
        f"{text}{suffix}": (holder, operator)
        for suffix, holder in (("", ast.BinOp), ("=", ast.AugAssign))
        for text, operator in {
            "+": ast.Add,
            "-": ast.Sub,
            "*": ast.Mult,
            "/": ast.Div,
            "//": ast.FloorDiv,
            "%": ast.Mod,
            "**": ast.Pow,
            "@": ast.MatMult,
            "&": ast.BitAnd,
            "|": ast.BitOr,
            "^": ast.BitXor,
            "<<": ast.LShift,
            ">>": ast.RShift,
        }.items()
    },
    "and": (ast.BoolOp, ast.And),
    "or": (ast.BoolOp, ast.Or),
}
"""An operator as it is written: the node that has it, and its class."""

IGNORED_FIELDS = ("ctx", "type_comment", "kind")
KINDS = ("change", "drop", "operator", "condition", "unwrap")


@dataclass(frozen=True)
class Change:
    """One change. One of the first five says of what; without any, `to` is the new value of a constant."""

    change: str | None = None
    drop: str | None = None
    operator: str | None = None
    condition: str | None = None
    unwrap: str | None = None
    to: str | None = None
    which: str | None = None

    @property
    def fields(self) -> dict[str, str]:
        """What the catalogue says."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def apply(self, scope: Scope) -> dict[str, str]:
        """Change the tree of `scope`; returns the local variables that were renamed."""
        kinds = [name for name in KINDS if name in self.fields]
        if len(kinds) > 1:
            raise MisfitError(f"has both {kinds[0]!r} and {kinds[1]!r}")
        if not kinds:
            return self._apply_value(scope)
        if (self.to is None) != (kinds[0] in ("drop", "unwrap")):
            raise MisfitError(f"{kinds[0]!r} is written {'without' if self.to else 'with'} 'to'")
        return getattr(self, f"_apply_{kinds[0]}")(scope)

    def _apply_change(self, scope: Scope) -> dict[str, str]:
        pattern, replacement = parse_pair(self.change or "", self.to or "")
        places, renamed = find_pattern(pattern, scope)
        place = self._choose(places)
        for node in replacement:
            _rename(node, renamed)
        _require_known(replacement, scope)
        place.put(replacement)
        return renamed

    def _apply_drop(self, scope: Scope) -> dict[str, str]:
        text = self.drop or ""
        if re.fullmatch(r"[\w.]+", text):
            places = [
                place for place in statement_places(scope, 1) if is_call(place.nodes[0], text)
            ]
            renamed: dict[str, str] = {}
        else:
            places, renamed = find_pattern(_parse_statements(text), scope)
        self._choose(places).put([ast.Pass()])
        return renamed

    def _apply_unwrap(self, scope: Scope) -> dict[str, str]:
        places = [
            place
            for place in expression_places(scope)
            if is_call(place.nodes[0], self.unwrap or "") and cast("ast.Call", place.nodes[0]).args
        ]
        place = self._choose(places)
        place.put([cast("ast.Call", place.nodes[0]).args[0]])
        return {}

    def _apply_operator(self, scope: Scope) -> dict[str, str]:
        for text in (self.operator, self.to):
            if text not in OPERATORS:
                raise MisfitError(f"{text!r} is no operator")
        holder, operator = OPERATORS[self.operator or ""]
        new_holder, new_operator = OPERATORS[self.to or ""]
        if holder is not new_holder:
            raise MisfitError(f"{self.operator!r} cannot become {self.to!r}")
        places = list(_operator_places(scope, holder, operator))
        self._choose(places).put([new_operator()])
        return {}

    def _apply_condition(self, scope: Scope) -> dict[str, str]:
        places = list(_condition_places(scope))
        place = _choose(places, self.condition or "", "conditions")
        match self.to:
            case "not":
                place.put([ast.UnaryOp(ast.Not(), cast("ast.expr", place.nodes[0]))])
            case "True" | "False":
                place.put([ast.Constant(self.to == "True")])
            case _:
                raise MisfitError("a condition becomes 'not', 'True' or 'False'")
        return {}

    def _apply_value(self, scope: Scope) -> dict[str, str]:
        statement = scope.statements[0]
        if self.to is None or not isinstance(statement, ast.Assign | ast.AnnAssign):
            raise MisfitError(f"lacks one of {', '.join(KINDS)}")
        value = ast.parse(self.to, mode="eval").body
        _require_known([value], scope)
        statement.value = value
        return {}

    def _choose(self, places: Sequence[Place]) -> Place:
        if not places:
            raise MisfitError("it does not occur there")
        return _choose(places, self.which, "times it occurs")


@dataclass(frozen=True)
class Place:
    """Neighbours in one field of a node: one expression, operator, or some statements in a row."""

    parent: ast.AST
    field: str
    index: int | None
    nodes: tuple[ast.AST, ...]

    @property
    def position(self) -> tuple[int, int]:
        """Line and column. An operator has those of what follows it."""
        node = self.nodes[0]
        if isinstance(self.parent, ast.Compare) and self.field == "ops":
            node = self.parent.comparators[self.index or 0]
        elif isinstance(self.parent, ast.BinOp) and self.field == "op":
            node = self.parent.right
        elif isinstance(self.parent, ast.BoolOp | ast.AugAssign) and self.field == "op":
            node = self.parent
        return getattr(node, "lineno", 0), getattr(node, "col_offset", 0)

    def put(self, nodes: Sequence[ast.AST]) -> None:
        """Put others there."""
        if self.index is None:
            setattr(self.parent, self.field, nodes[0])
        else:
            getattr(self.parent, self.field)[self.index : self.index + len(self.nodes)] = nodes


def parse_pair(before: str, after: str) -> tuple[list[ast.AST], list[ast.AST]]:
    """Both as an expression, or where one of them is none, both as statements."""
    try:
        return [ast.parse(before.strip(), mode="eval").body], [
            ast.parse(after.strip(), mode="eval").body
        ]
    except SyntaxError:
        return _parse_statements(before), _parse_statements(after) or [ast.Pass()]


def parse_code(code: str, replacement: str | None) -> list[ast.AST]:
    """What `change` or `drop` says, as nodes."""
    if replacement is None:
        return _parse_statements(code)
    return parse_pair(code, replacement)[0]


def _parse_statements(text: str) -> list[ast.AST]:
    try:
        return list(ast.parse(textwrap.dedent(text.strip("\n"))).body)
    except SyntaxError as problem:
        raise MisfitError(f"{text!r} is no Python: {problem}") from None


def find_pattern(pattern: Sequence[ast.AST], scope: Scope) -> tuple[list[Place], dict[str, str]]:
    """Where the pattern occurs as it is, or else with other names for variables that are gone."""
    if isinstance(pattern[0], ast.expr):
        places = list(expression_places(scope))
    else:
        places = list(statement_places(scope, len(pattern)))
    exact = [place for place in places if match(pattern, place.nodes, {}) is not None]
    if exact:
        return exact, {}
    names = set().union(*(names_in(node) for node in pattern))
    gone = names - scope.known_names
    if not gone or not _has_anchor(pattern, gone):
        return [], {}
    renamed = {
        index: bound
        for index, place in enumerate(places)
        if (bound := match(pattern, place.nodes, dict.fromkeys(gone, ""))) is not None
        and set(bound.values()) <= scope.local_names - names
    }
    if len({tuple(sorted(bound.items())) for bound in renamed.values()}) != 1:
        return [], {}
    return [places[index] for index in renamed], next(iter(renamed.values()))


def expression_places(scope: Scope) -> Iterator[Place]:
    """All expressions that another may replace."""
    for parent in _walk(scope):
        if isinstance(parent, ast.JoinedStr):
            continue
        for field, value in ast.iter_fields(parent):
            if field in ("format_spec", "targets", "target"):
                continue
            for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(node, ast.expr) and not isinstance(
                    getattr(node, "ctx", None), ast.Store | ast.Del
                ):
                    yield Place(parent, field, index, (node,))


def statement_places(scope: Scope, count: int) -> Iterator[Place]:
    """All sequences of `count` neighbouring statements."""
    for parent in _walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for index in range(len(value) - count + 1):
                    yield Place(parent, field, index, tuple(value[index : index + count]))


def _operator_places(
    scope: Scope, holder: type[ast.AST], operator: type[ast.AST]
) -> Iterator[Place]:
    for node in _walk(scope):
        if isinstance(node, holder):
            field = "ops" if isinstance(node, ast.Compare) else "op"
            value: Any = getattr(node, field)
            for index, each in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(each, operator):
                    yield Place(node, field, index, (each,))


def _condition_places(scope: Scope) -> Iterator[Place]:
    for node in _walk(scope):
        match node:
            case ast.If() | ast.While() | ast.IfExp() | ast.Assert():
                yield Place(node, "test", None, (node.test,))
            case ast.comprehension():
                for index, test in enumerate(node.ifs):
                    yield Place(node, "ifs", index, (test,))
            case ast.match_case() if node.guard is not None:
                yield Place(node, "guard", None, (node.guard,))
            case _:
                pass


def _walk(scope: Scope) -> Iterator[ast.AST]:
    for statement in scope.statements:
        yield from ast.walk(statement)


def _choose(places: Sequence[Place], which: str | None, meaning: str) -> Place:
    """The place that `which` ("2 of 3") names. The count is said too, so that a new one beside it does not go unseen."""
    ordered = sorted(places, key=lambda place: place.position)
    lines = ", ".join(str(place.position[0]) for place in ordered)
    if which is None:
        if len(ordered) == 1:
            return ordered[0]
        raise MisfitError(
            f"it occurs in lines {lines}: `which` must say which, as in '1 of {len(ordered)}'"
        )
    numbers = re.fullmatch(r"(\d+) of (\d+)", which)
    if numbers is None:
        raise MisfitError(f"{which!r} is not of the form '1 of 2'")
    number, count = int(numbers[1]), int(numbers[2])
    if count != len(ordered) or not 1 <= number <= count:
        raise MisfitError(
            f"{which!r}, but there are {len(ordered)} {meaning} (lines {lines or 'none'})"
        )
    return ordered[number - 1]


def match(
    pattern: Sequence[ast.AST], nodes: Sequence[ast.AST], free: dict[str, str]
) -> dict[str, str] | None:
    """The names that free names of the pattern stand for; None where the two differ otherwise."""
    bound = dict(free)
    if not all(_matches(mine, other, bound) for mine, other in zip(pattern, nodes, strict=True)):
        return None
    used = [name for name in bound.values() if name]
    return bound if len(set(used)) == len(used) else None


def _matches(mine: Any, other: Any, bound: dict[str, str]) -> bool:
    if type(mine) is not type(other):
        return False
    if isinstance(mine, list):
        return len(mine) == len(other) and all(
            _matches(left, right, bound) for left, right in zip(mine, other, strict=True)
        )
    if not isinstance(mine, ast.AST):
        return mine == other
    for field in mine._fields:
        if field in IGNORED_FIELDS:
            continue
        left, right = getattr(mine, field, None), getattr(other, field, None)
        is_variable = isinstance(mine, ast.Name | ast.arg | ast.ExceptHandler)
        if is_variable and isinstance(left, str) and left in bound:
            if not isinstance(right, str) or bound[left] not in ("", right):
                return False
            bound[left] = right
        elif not _matches(left, right, bound):
            return False
    return True


def _has_anchor(pattern: Sequence[ast.AST], gone: set[str]) -> bool:
    """Whether the pattern has something beside free names, so that it does not fit anything."""
    return any(
        isinstance(node, ast.Attribute | ast.Constant | ast.keyword)
        or (isinstance(node, ast.Name) and node.id not in gone)
        for root in pattern
        for node in ast.walk(root)
    )


def _rename(node: ast.AST, renamed: dict[str, str]) -> None:
    for below in ast.walk(node):
        if isinstance(below, ast.Name):
            below.id = renamed.get(below.id, below.id)
        elif isinstance(below, ast.arg):
            below.arg = renamed.get(below.arg, below.arg)


def _require_known(nodes: Sequence[ast.AST], scope: Scope) -> None:
    """A replacement with a name that is gone would fail wherever it runs, and any test would notice."""
    used: set[str] = set()
    bound: set[str] = set()
    for below in (below for node in nodes for below in ast.walk(node)):
        if isinstance(below, ast.arg):
            bound.add(below.arg)
        elif isinstance(below, ast.Name) and isinstance(below.ctx, ast.Load):
            used.add(below.id)
        elif isinstance(below, ast.Name):
            bound.add(below.id)
    unknown = used - bound - scope.known_names
    if unknown:
        raise MisfitError(f"`to` has the name {min(unknown)!r}, which is not known there")


def is_call(node: ast.AST, name: str) -> bool:
    """Whether a node calls `name`, or is a statement that does nothing else."""
    if isinstance(node, ast.Expr):
        node = node.value
    if isinstance(node, ast.Await):
        node = node.value
    if not isinstance(node, ast.Call):
        return False
    return f".{ast.unparse(node.func)}".endswith(f".{name}")
