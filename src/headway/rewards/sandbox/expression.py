"""Python tests, split into what the program computes and what is known without it.

    x = [3, 1]                          both know it
    assert f(x) == [1, 3]               asked of the program: f(x); known: the value equals [1, 3]
    assert abs(g(2) - 0.5) < 1e-6       asked: g(2); known: abs(VALUE - 0.5) < 1e-6

A question is the longest chain of calls, attributes and indices that begins at a name of the
program. Everything else is trusted and never reaches the process of the program, except what
questions mention. So a program passes by giving right values, and in no other way.

Each comparison may have one question. `f(1) == f(2)` has two, so the program alone would decide
about it: such a test is refused. So are asserts inside of loops, conditions and comprehensions,
whose questions are not known in advance.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LONGEST_TEST = 1 << 20
VALUE = "_headway_value"
SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
KEEPING = ("add", "append", "extend", "insert", "remove", "setdefault", "update")
"""Methods that change their object alone."""


class TestRefusal(ValueError):
    """A test whose verdict a program could forge, or that cannot be read; says why."""

    __test__ = False


@dataclass(frozen=True)
class Step:
    """A statement that the program's process runs, or an expression whose value it sends."""

    kind: Literal["run", "value"]
    code: str


@dataclass(frozen=True)
class Claim:
    """One assert: what is known of the values of its questions."""

    questions: tuple[int, ...]
    """Numbers of the `value` steps."""
    code: str
    """An expression over `_headway_value0` and so on."""
    known: int = 0
    """How many trusted statements come before it."""
    literal: ast.expr | None = None
    """The claim is `value == literal`, which needs no further process."""


@dataclass
class TestPlan:
    """A test in Python."""

    __test__ = False

    steps: list[Step] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    trusted: list[str] = field(default_factory=list)
    """Statements that claims need: imports, constants, functions of the test."""


def plan_test(source: str, entry_point: str | None = None) -> TestPlan:
    """The plan of a test. `entry_point`: the function that `def check(candidate)` is about, where
    the test does not call it.
    """
    if len(source) > LONGEST_TEST:
        raise TestRefusal(f"a test has more than {LONGEST_TEST >> 20} MiB")
    try:
        statements = ast.parse(source).body
        return _Planner().plan(_inlined(statements, entry_point))
    except SyntaxError as problem:
        raise TestRefusal(f"a test is no Python: {problem.msg} (line {problem.lineno})") from None
    except (RecursionError, MemoryError, ValueError) as problem:
        if isinstance(problem, TestRefusal):
            raise
        raise TestRefusal("a test is nested too deeply") from None


def _inlined(statements: list[ast.stmt], entry_point: str | None) -> list[ast.stmt]:
    """The bodies of `def test_...():` in their places, and that of `def check(candidate)` in place
    of its call, about the function of the call.
    """
    flat: list[ast.stmt] = []
    for statement in statements:
        if _is_test_function(statement):
            assert isinstance(statement, ast.FunctionDef)
            flat += statement.body
        # Tests in files of their own import the program by this name.
        elif not (isinstance(statement, ast.ImportFrom) and statement.module == "solution"):
            flat.append(statement)
    return _with_check(flat, entry_point)


def _is_test_function(statement: ast.stmt) -> bool:
    """A test of pytest without fixtures and parameters."""
    if not isinstance(statement, ast.FunctionDef) or statement.decorator_list:
        return False
    return statement.name.startswith("test") and ast.unparse(statement.args) == ""


def _with_check(statements: list[ast.stmt], entry_point: str | None) -> list[ast.stmt]:
    check = None
    for statement in statements:
        if isinstance(statement, ast.FunctionDef) and statement.name == "check":
            check = statement
    if check is None or len(check.args.args) != 1:
        return statements

    parameter = check.args.args[0].arg
    result: list[ast.stmt] = []
    was_called = False
    for statement in statements:
        if statement is check:
            continue
        name = _checked_name(statement)
        if name is None:
            result.append(statement)
            continue
        was_called = True
        result += [_Renamed(parameter, name).visit(part) for part in _copies(check.body)]
    if was_called:
        return result
    if entry_point is None:
        raise TestRefusal(
            "a test defines check(candidate) and does not call it, and the record has no column "
            "entry_point"
        )
    if not entry_point.isidentifier():
        raise TestRefusal(f"entry_point is {entry_point[:80]!r}, which is no name of a function")
    return [*result, *(_Renamed(parameter, entry_point).visit(part) for part in check.body)]


def _checked_name(statement: ast.stmt) -> str | None:
    """NAME of the statement `check(NAME)`."""
    match statement:
        case ast.Expr(ast.Call(ast.Name("check"), [ast.Name(name)], [])):
            return name
        case _:
            return None


def _copies(statements: list[ast.stmt]) -> list[ast.stmt]:
    return ast.parse(ast.unparse(ast.Module(statements, []))).body


class _Renamed(ast.NodeTransformer):
    def __init__(self, before: str, after: str) -> None:
        self.before = before
        self.after = after

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id == self.before:
            return ast.copy_location(ast.Name(self.after, node.ctx), node)
        return node


@dataclass
class _Known:
    """A trusted statement, in its place among the steps."""

    code: str
    changes: set[str]
    """Names that it binds, and those whose values it may change."""
    reads: set[str]


class _Planner:
    def __init__(self) -> None:
        self.trusted: set[str] = set(dir(builtins))
        self.constants: set[str] = set()
        """Trusted names of values, which a program may change where it gets them."""
        self.entries: list[_Known | Step] = []
        """Trusted statements and steps, in order."""
        self.asked: set[str] = set()
        """Names that steps mention."""
        self.claims: list[Claim] = []
        self.num_values = 0

    def plan(self, statements: list[ast.stmt]) -> TestPlan:
        for statement in statements:
            self._read(statement)
        if not self.claims:
            raise TestRefusal("a test has no assert")

        # The program's process gets a trusted statement only if a question needs it: what claims
        # alone mention may be an expected value.
        needed = set(self.asked)
        steps: list[Step] = []
        for entry in reversed(self.entries):
            if isinstance(entry, Step):
                steps.append(entry)
            elif entry.changes & needed:
                needed |= entry.reads
                steps.append(Step("run", entry.code))
        known = [entry.code for entry in self.entries if isinstance(entry, _Known)]
        return TestPlan(steps[::-1], self.claims, known)

    def _read(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Assert):
            for condition in _conjuncts(statement.test):
                self._claim(condition, statement.lineno)
            return
        if isinstance(statement, (ast.Pass, ast.Global)) or _is_text(statement):
            return
        if any(isinstance(node, ast.Assert) for node in ast.walk(statement)):
            kind = type(statement).__name__
            raise TestRefusal(
                f"line {statement.lineno} of a test has an assert inside of {kind}; what it asks "
                "is not known in advance"
            )

        code = ast.unparse(statement)
        binds = set(_bound(statement))
        foreign = self.foreign(statement)
        if not foreign:
            self.trusted |= binds
            if isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                self.constants |= binds
            changes = binds | (set(_changed(statement)) & self.constants)
            self.entries.append(_Known(code, changes, set(_loaded(statement))))
            return
        if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Expr)):
            raise TestRefusal(
                f"line {statement.lineno} of a test uses {', '.join(sorted(foreign))} inside of "
                f"{type(statement).__name__}"
            )
        # What the program gets here it may change, so its former value is known no more. Modules and
        # functions of the test stay trusted: claims use them where the program never was.
        mentioned = set(_loaded(statement))
        self.asked |= mentioned
        self.trusted -= binds | (mentioned & self.constants)
        self.entries.append(Step("run", code))

    def _claim(self, condition: ast.expr, line: int) -> None:
        """A claim that is true or false by itself, with its question."""
        questions = _Questions(self)
        claim = questions.visit(condition)
        if len(questions.codes) != 1:
            raise TestRefusal(
                f"line {line} of a test has a comparison with {len(questions.codes)} values of the "
                "program; it must be one, compared with what the test itself says"
            )
        if _is_bare(claim) and questions.nested:
            # `assert same(f(1), 2)`: a function of the program would say whether another is right.
            raise TestRefusal(
                f"line {line} of a test lets {', '.join(sorted(questions.nested))} and a function "
                "around it decide; compare with == instead"
            )
        self.asked |= questions.mentioned
        numbers: list[int] = []
        for code in questions.codes:
            self.entries.append(Step("value", code))
            numbers.append(self.num_values)
            self.num_values += 1
        literal = None
        match claim:
            case ast.Compare(ast.Name(left), [ast.Eq()], [right]) if left == f"{VALUE}0":
                literal = _literal(right)
            case ast.Compare(left, [ast.Eq()], [ast.Name(right)]) if right == f"{VALUE}0":
                literal = _literal(left)
            case _:
                pass
        known = sum(isinstance(entry, _Known) for entry in self.entries)
        self.claims.append(Claim(tuple(numbers), ast.unparse(claim), known, literal))

    def foreign(self, node: ast.AST) -> set[str]:
        """Names that come from the program."""
        inner = set(_inner_names(node))
        return {name for name in _loaded(node) if name not in self.trusted and name not in inner}


class _Questions(ast.NodeTransformer):
    """Puts names of values in place of the questions of an expression."""

    def __init__(self, planner: _Planner) -> None:
        self.planner = planner
        self.codes: list[str] = []
        self.mentioned: set[str] = set()
        self.nested: set[str] = set()
        """Names of the program in the arguments of a question."""

    def visit(self, node: ast.AST) -> Any:
        root = node
        while isinstance(root, (ast.Attribute, ast.Subscript, ast.Call)):
            root = root.func if isinstance(root, ast.Call) else root.value
        if isinstance(root, ast.Name) and root.id not in self.planner.trusted:
            name = f"{VALUE}{len(self.codes)}"
            self.codes.append(ast.unparse(node))
            self.mentioned |= set(_loaded(node))
            self.nested |= self.planner.foreign(node) - {root.id}
            return ast.copy_location(ast.Name(name, ast.Load()), node)
        if isinstance(node, SCOPES):
            foreign = self.planner.foreign(node)
            if foreign:
                raise TestRefusal(
                    f"an assert of a test uses {', '.join(sorted(foreign))} inside of "
                    f"{type(node).__name__}; what it asks is not known in advance"
                )
            return node
        return self.generic_visit(node)


def _conjuncts(condition: ast.expr) -> Iterator[ast.expr]:
    """`a and b` as two claims."""
    if isinstance(condition, ast.BoolOp) and isinstance(condition.op, ast.And):
        for value in condition.values:
            yield from _conjuncts(value)
        return
    yield condition


def _is_bare(claim: ast.expr) -> bool:
    """Whether a claim is the truth of the value alone."""
    while isinstance(claim, ast.UnaryOp) and isinstance(claim.op, ast.Not):
        claim = claim.operand
    return isinstance(claim, ast.Name)


def _literal(node: ast.expr) -> ast.expr | None:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None
    return node


def _is_text(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _loaded(node: ast.AST) -> Iterator[str]:
    """All names that are read in a node."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id
        # `x += 1` reads x, and so does a change of a part of it.
        if isinstance(part, ast.AugAssign):
            yield from _names(part.target)
        if isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load):
            yield from _names(part)


def _names(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id


def _bound(statement: ast.stmt) -> Iterator[str]:
    """Names that a statement gives values to, in the scope of the test."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        yield statement.name
        return
    for part in ast.walk(statement):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            yield part.id
        if isinstance(part, ast.alias):
            yield (part.asname or part.name).partition(".")[0]


def _changed(statement: ast.stmt) -> Iterator[str]:
    """Names whose values a statement may change: `x.append(1)`, `x[0] = 1`, `shuffle(x)`."""
    if isinstance(statement, (*FUNCTIONS, ast.ClassDef)):
        return
    for part in ast.walk(statement):
        if isinstance(part, (ast.Attribute, ast.Subscript)) and not isinstance(part.ctx, ast.Load):
            yield _root_name(part)
        if not isinstance(part, ast.Expr) or not isinstance(part.value, ast.Call):
            continue
        call = part.value
        # A method changes its object; a function, what it is given.
        if isinstance(call.func, (ast.Attribute, ast.Subscript)):
            yield _root_name(call.func)
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            if isinstance(argument, ast.Name) and not _is_method_of_value(call.func):
                yield argument.id


def _is_method_of_value(function: ast.expr) -> bool:
    """Whether this is a method that keeps what it is given as it is: those of lists, sets, dicts."""
    return isinstance(function, ast.Attribute) and function.attr in KEEPING


def _root_name(node: ast.expr) -> str:
    """x of `x.a[0].b`; empty where no name is the root."""
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _inner_names(node: ast.AST) -> Iterator[str]:
    """Names that a node binds for itself: parameters, loops of comprehensions, local names."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg):
            yield part.arg
        elif isinstance(part, ast.comprehension):
            yield from _names(part.target)
        elif isinstance(part, FUNCTIONS):
            yield part.name
            for inner in ast.walk(part):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id
        elif isinstance(part, (ast.For, ast.With, ast.NamedExpr)):
            for inner in ast.walk(part):
                if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                    yield inner.id


def source_of(value: Any) -> str:
    """A plain value as an expression of Python, exactly."""
    if isinstance(value, bool) or value is None or isinstance(value, (str, bytes)):
        return repr(value)
    if isinstance(value, int):
        return f"({hex(value)})"
    if isinstance(value, float):
        return f"float.fromhex({value.hex()!r})"
    if isinstance(value, complex):
        return f"complex({source_of(value.real)}, {source_of(value.imag)})"
    if isinstance(value, Mapping):
        items = (f"{source_of(key)}: {source_of(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    items = "".join(f"{source_of(item)}, " for item in value)
    if isinstance(value, list):
        return f"[{items}]"
    return f"{type(value).__name__}([{items}])"
