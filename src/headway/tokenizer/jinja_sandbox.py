"""Where chat templates run: jinja's sandbox with a budget, because a template is a program that
came with a downloaded model.

In: a template's source; out: a compiled template whose every loop pass, call, filter and
operator is counted against `Budget`, and whose texts and lists may not outgrow it. Invariant: no
single operation makes more than the budget's size, so none can take long or much memory; the
count of operations is bounded as well. Nothing depends on signals or threads: a template that
exceeds its budget stops at the same operation everywhere. Only the last resort, a deadline for
operations that count little and take long, depends on the clock. The built-in templates are our
code and run in `trusted_environment`, which counts nothing and is three times faster.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any, cast

import jinja2
import jinja2.nodes as nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from headway.errors import DataError

# The limits are far above what any published template needs, and low enough that a rendering ends
# in seconds and within some megabytes.
MAX_TEXT = 1_000_000
TEXT_PER_CHARACTER = 20
"""Characters or elements of one text or list: MAX_TEXT, and so many more per character of the
conversation."""
MAX_STEPS = 200_000
STEPS_PER_CHARACTER = 50
"""Counted operations of one rendering: MAX_STEPS, and so many more per character of the
conversation."""
MAX_SECONDS = 10.0
MAX_BITS = 1 << 14
"""Bits of a number: products and powers grow far faster than texts."""
MAX_SOURCE = 1_000_000
"""Characters of a template."""
UNITS_PER_STEP = 64
"""How many characters or elements a single operation may make for the price of one step."""
MAX_PRECISION = 300
"""Digits after the decimal point that `round` may ask for."""
WIDE_FORMAT = re.compile(r"\d{6}|\{[^{}]*:[^{}]*\{|%[^a-zA-Z%]*\*")
"""A format whose width is huge (six digits) or comes from a value (`{:{}}`, `%*d`)."""
REMOVED_GLOBALS = ("lipsum",)
"""It writes random text of any length."""
SIZED = (str, bytes, range, dict, list, tuple, set, frozenset)
SHALLOW_FILTERS = frozenset(
    {
        "abs",
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "float",
        "int",
        "items",
        "last",
        "length",
        "list",
        "map",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "round",
        "select",
        "selectattr",
        "slice",
    }
)
"""Filters that look at the elements of a list, not into them."""
MAX_MESSAGE = 300
"""Characters of an error that a template raises."""


def render(template: jinja2.Template, name: str, **variables: Any) -> str:
    """What a compiled template writes; every failure as one DataError."""
    try:
        return template.render(variables)
    except jinja2.TemplateError as error:
        raise DataError(
            f"chat template {name} refuses the conversation: {one_line(error)}."
        ) from None
    except Exception as error:
        # A template may do anything with the values it gets: a TypeError, a ZeroDivisionError.
        raise DataError(
            f"chat template {name} cannot write the conversation: {one_line(error)}."
        ) from None


def one_line(error: Exception) -> str:
    """The message of an error in one line."""
    message = " ".join(str(error).split())[:MAX_MESSAGE]
    if isinstance(error, jinja2.TemplateError) and message:
        return message
    if not message:
        return type(error).__name__
    return f"{type(error).__name__}: {message}"


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any
) -> str:
    """The filter `tojson` as transformers defines it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def raise_exception(message: str) -> None:
    """How a template refuses a conversation."""
    raise jinja2.TemplateError(message)


class GenerationTags(Extension):
    """Reads `{% generation %}` in built-in templates: writes the variables `generation_start`
    and `generation_end` around its body.
    """

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start = nodes.Output([nodes.Name("generation_start", "load")], lineno=line)
        end = nodes.Output([nodes.Name("generation_end", "load")], lineno=line)
        return [start, *body, end]


@cache
def trusted_environment() -> jinja2.Environment:
    """Where the built-in templates run."""
    environment = jinja2.Environment(extensions=[GenerationTags])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


class OverBudget(jinja2.TemplateRuntimeError):
    """A template did more, or wrote more, than any conversation needs."""


class Budget:
    """How much one rendering may do; larger conversations may do more."""

    def __init__(self, characters: int) -> None:
        self.text = MAX_TEXT + TEXT_PER_CHARACTER * characters
        self.steps = MAX_STEPS + STEPS_PER_CHARACTER * characters
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self, units: int = 0) -> None:
        """Count one operation and the characters or elements it made."""
        self.steps -= 1 + units // UNITS_PER_STEP
        # The deadline is a last resort for operations that count little and take long.
        if self.steps < 0 or time.monotonic() > self.deadline:
            raise OverBudget(
                "it does not end (more loop passes and calls than any conversation needs)"
            )
        if units > self.text:
            self.room(units)

    def room(self, units: int) -> None:
        """Reject a result of this many characters or elements before it is made."""
        if units > self.text:
            raise OverBudget(
                f"it makes a text or list of more than {self.text} characters or elements"
            )


def size_of(value: Any, most: int) -> int:
    """Characters and elements of a value, all levels counted; counting ends above `most`."""
    if isinstance(value, (str, bytes, range)):
        return len(value)

    total = 0
    waiting = [value]
    while waiting and total <= most:
        item = waiting.pop()
        total += 1
        # A range counts 1: it makes its elements one by one.
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, dict):
            waiting += [*cast(dict[Any, Any], item).keys(), *cast(dict[Any, Any], item).values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += list(cast(Iterable[Any], item))
        elif isinstance(item, Namespace):
            # jinja's Namespace hides its values from getattr, under a mangled name.
            waiting.append(object.__getattribute__(item, "_Namespace__attrs"))

    return total


def length_of(value: Any) -> int:
    """Characters or elements of a value, its top level alone."""
    if isinstance(value, SIZED):
        return len(cast(str, value))
    return 1


class CountingTags(Extension):
    """Puts the counting calls into a template, and reads `{% generation %}`, which encloses the
    assistant's text.
    """

    tags = {"generation"}
    environment: Sandbox

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def counted(self, tree: nodes.Template) -> None:
        """Change the tree: each loop pass counts, joined texts and made lists are measured."""
        for loop in tree.find_all(nodes.For):
            # In the body for passes that run, in the test for passes that a filter leaves out.
            loop.body.insert(
                0, nodes.ExprStmt(self.attr("counts", lineno=loop.lineno)).set_lineno(loop.lineno)
            )
            if loop.test is not None:
                loop.test = nodes.And(
                    self.attr("counts", lineno=loop.lineno), loop.test
                ).set_lineno(loop.lineno)

        _replace(tree, self._measured)

    def _measured(self, node: nodes.Node) -> nodes.Node:
        """The node, or a call around it that measures what it makes."""
        if isinstance(node, nodes.Concat):
            return self._call("_join", node.nodes, node)

        makes_container = isinstance(node, (nodes.List, nodes.Dict)) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        )
        # A list of constants is as large as its source, which is bounded already.
        if (
            makes_container
            and next(node.find_all((nodes.Name, nodes.Call, nodes.BinExpr, nodes.Filter)), None)
            is not None
        ):
            return self._call("_make", [cast(nodes.Expr, node)], node)

        return node

    def _call(self, method: str, arguments: list[nodes.Expr], node: nodes.Node) -> nodes.Call:
        call = self.call_method(method, arguments, lineno=node.lineno)
        # New nodes have no environment yet, and the compiler asks for it.
        call.set_environment(self.environment)
        return call

    def _mark(self, caller: Any) -> str:
        opening, closing = self.environment.marks
        return opening + caller() + closing

    @property
    def counts(self) -> bool:
        """True; reading it counts one pass of a loop.

        A property, because templates read it faster than they call a method.
        """
        self.environment.budget.step()
        return True

    def _join(self, *parts: Any) -> str:
        """`a ~ b`, which jinja compiles to a join that no operator hook sees."""
        self.environment.budget.room(
            sum(size_of(part, self.environment.budget.text) for part in parts)
        )
        return "".join(map(str, parts))

    def _make(self, value: Any) -> Any:
        """A list, tuple or object that was just made, counted with all its levels."""
        self.environment.budget.step(size_of(value, self.environment.budget.text))
        return value


def _replace(node: nodes.Node, change: Callable[[nodes.Node], nodes.Node]) -> None:
    """Change every node below one, the innermost first."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            _replace(value, change)
            setattr(node, name, change(value))
        elif isinstance(value, list):
            for index, child in enumerate(cast(list[Any], value)):
                if isinstance(child, nodes.Node):
                    _replace(child, change)
                    value[index] = change(child)


class Sandbox(ImmutableSandboxedEnvironment):
    """jinja's sandbox with a budget; `marks` enclose the text that the template attributes to
    the assistant.
    """

    # The operators whose result can be much larger than their operands.
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        self.budget = Budget(0)
        self.marks: tuple[str, str] = ("", "")
        # The settings of white space and the loop controls are those of transformers.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[CountingTags, "jinja2.ext.loopcontrols"],
            finalize=self._written,
        )
        self.filters["tojson"] = to_json
        self.globals["raise_exception"] = raise_exception
        for name in REMOVED_GLOBALS:
            self.globals.pop(name)

        for name, function in list(self.filters.items()):
            self.filters[name] = self._guarded(name, function)

    def compiled(self, source: str) -> jinja2.Template:
        """A template ready to render; raises jinja's errors."""
        self.budget = Budget(0)
        if len(source) > MAX_SOURCE:
            raise jinja2.TemplateError(
                f"it is {len(source)} characters long; at most {MAX_SOURCE} are read"
            )
        return self.from_string(source)

    def _generate(
        self,
        source: nodes.Template,
        name: str | None,
        filename: str | None,
        defer_init: bool = False,
    ) -> str:
        # The last step before Python code is made: the tree is complete, and no template, not even
        # one made by a template, passes around it.
        for extension in self.iter_extensions():
            if isinstance(extension, CountingTags):
                extension.counted(source)
        return super()._generate(source, name, filename, defer_init)

    def concat(self, parts: Iterable[str]) -> str:  # pyright: ignore[reportIncompatibleMethodOverride, reportIncompatibleVariableOverride]
        """What a template, macro or block wrote, as one text."""
        return "".join(self._fitting(parts))

    def _fitting(self, parts: Iterable[str]) -> Iterator[str]:
        """The parts, as long as their sum is within the budget."""
        total = 0
        for part in parts:
            total += len(part)
            self.budget.room(total)
            yield part

    # The parameters are named as in jinja: a template may pass keywords `self` or `context`.
    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something for a template: a function, method or macro, with the size of its result
        counted.
        """
        budget = __self.budget
        budget.step()
        _check_method(budget, getattr(__obj, "__wrapped__", __obj), [*args, *kwargs.values()])
        result = super().call(__context, __obj, *args, **kwargs)

        # Only what is newly made of given values can be larger than they are.
        if __obj in (Namespace, dict):
            size = size_of(result, budget.text)
        else:
            size = length_of(result)
        budget.step(size)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, if its result is not too large."""
        budget = self.budget
        # Joining texts is by far the most frequent operation, so it takes the shortest way.
        if operator == "+" and isinstance(left, str) and isinstance(right, str):
            budget.step(len(left) + len(right))
            return left + right

        if (
            operator == "**"
            and isinstance(left, int)
            and isinstance(right, int)
            and left.bit_length() * abs(right) > MAX_BITS
        ):
            raise OverBudget("it makes a number of too many digits")

        if operator == "*":
            _check_product(budget, left, right)
        if operator == "%" and isinstance(left, (str, bytes)):
            _check_format(budget, left, right)
        if operator == "+" and not isinstance(left, (int, float)):
            budget.room(length_of(left) + length_of(right))

        result = super().call_binop(context, operator, left, right)
        budget.step(length_of(result))
        return result

    def _written(self, value: Any) -> Any:
        """A value that is about to be written out; a list becomes a text of all its levels."""
        if not isinstance(value, str):
            self.budget.step(size_of(value, self.budget.text))
        return value

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that checks its result's size before it runs."""
        # Some filters get the environment or context as a first argument.
        hidden = 0
        if getattr(function, "jinja_pass_arg", None) is not None:
            hidden = 1

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self.budget
            value = None
            if len(args) > hidden:
                value = args[hidden]
            options = [*args[hidden + 1 :], *kwargs.values()]
            if name in SHALLOW_FILTERS:
                size = length_of(value)
            else:
                size = size_of(value, budget.text)

            budget.step(size)
            _check_filter(budget, name, value, size, options)

            result = function(*args, **kwargs)
            budget.step(length_of(result))
            return result

        return guarded


def _whole(values: Iterable[Any]) -> int:
    """The largest integer among some values, by magnitude; 0 if there is none."""
    return max((abs(number) for number in values if isinstance(number, int)), default=0)


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    """Refuse a product that makes a huge number, or repeats a text or list too often."""
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS:
            raise OverBudget("it makes a number of too many digits")
    elif isinstance(left, int) or isinstance(right, int):
        # A number times a text or list repeats it.
        times = right
        repeated = left
        if isinstance(left, int):
            times = left
            repeated = right

        if not isinstance(repeated, float):
            budget.room(max(0, times) * size_of(repeated, budget.text))


def _check_format(budget: Budget, pattern: str | bytes, values: Any) -> None:
    """Refuse a format whose result would be too large: at most, each field writes all values."""
    if isinstance(pattern, str):
        text = pattern
    else:
        text = pattern.decode("latin-1")

    if WIDE_FORMAT.search(text):
        raise OverBudget("it formats a value with a width that is too large or unknown")
    budget.room(len(text) + (text.count("%") + text.count("{") + 1) * size_of(values, budget.text))


def _check_replace(budget: Budget, text: str | bytes, old: Any, new: Any) -> None:
    if isinstance(old, (str, bytes)) and isinstance(new, (str, bytes)) and type(old) is type(text):
        budget.room(len(text) + text.count(old) * len(new))  # pyright: ignore[reportArgumentType]


def _check_method(budget: Budget, function: Any, arguments: list[Any]) -> None:
    """Refuse a method of a text or number whose result would be too large."""
    value = getattr(function, "__self__", None)
    name = getattr(function, "__name__", "")
    if not isinstance(value, (str, bytes, int)):
        return

    if isinstance(value, int):
        # to_bytes(length) and its like.
        budget.room(_whole(arguments))
    elif name in ("format", "format_map"):
        _check_format(budget, value, arguments)
    elif name == "replace" and len(arguments) > 1:
        _check_replace(budget, value, arguments[0], arguments[1])
    elif name == "join" and arguments:
        budget.room(size_of(arguments[0], budget.text) * (1 + len(value)))
    else:
        # The number may be a width (center, ljust, zfill); expandtabs takes it once for each tab.
        if isinstance(value, str):
            tabs = value.count("\t")
        else:
            tabs = value.count(b"\t")

        times = 1
        if name == "expandtabs":
            times = 1 + tabs
        budget.room(len(value) + _whole(arguments) * times)


def _check_filter(budget: Budget, name: str, value: Any, size: int, options: list[Any]) -> None:
    """Refuse a filter whose result would be too large.

    `size`: of the value. Each branch is an upper bound of what the filter of that name makes.
    """
    most = _whole(options)
    longest = max(
        (len(option) for option in options if isinstance(option, (str, bytes))), default=0
    )
    if name == "round" and most > MAX_PRECISION:
        raise OverBudget(f"it rounds to more than {MAX_PRECISION} digits")
    # A sum of lists copies the growing list again and again.
    if name == "sum" and any(
        not isinstance(option, (int, float, str, type(None))) for option in options
    ):
        raise OverBudget("it sums values that are not numbers")

    if name == "format":
        _check_format(budget, str(value), options)
    elif name == "replace" and len(options) > 1:
        _check_replace(budget, str(value), str(options[0]), str(options[1]))
    elif name in ("join", "wordwrap", "xmlattr"):
        budget.room(size * (1 + longest))
    elif name == "indent":
        lines = str(value).count("\n") + 1
        budget.room(size + lines * max(longest, most))
    elif name in ("tojson", "pprint"):
        budget.room(size * (1 + min(most, budget.text)))
    elif name == "batch":
        budget.room(size + most * size_of(options, budget.text))
    else:
        budget.room(size + most)
