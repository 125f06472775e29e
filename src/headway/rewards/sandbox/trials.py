"""The tests of a record, in the formats of data sets, as runs of a program and what is known of
their results.

    "assert f(1) == 2\\nassert ..."              one run; each assert is a test
    ["assert f(1) == 2", ...]                   a run each (MBPP: test_list)
    {"inputs": [...], "outputs": [...]}         a run each; texts are stdin and stdout
    {..., "fn_name": "f"}                       a call each: inputs are lists of arguments
    [{"input": ..., "output": ...}, ...]        a run each
    JSON of one of these                        (APPS: input_output)

Only `job` leaves this process; `verdicts` compares with what stayed here.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from headway.rewards.sandbox.expression import (
    VALUE,
    Claim,
    Step,
    TestPlan,
    TestRefusal,
    plan_test,
    source_of,
)
from headway.rewards.sandbox.plain import NoValueError, decode, read_values


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    status: str
    """`ended`, or the limit that it met: `time`, `output`."""
    code: int
    output: str


RunAlone = Callable[[str, Sequence[Step]], RunResult]
"""Runs trusted steps in a sandbox of their own, without the program."""


class CodeTrial(Protocol):
    """One run of the program, and what is known of its result."""

    steps: Sequence[Step] | None
    stdin: str

    @property
    def tests(self) -> int:
        """How many tests it counts as."""
        ...

    def verdicts(self, result: RunResult, run_alone: RunAlone) -> list[bool]:
        """Which of its tests the program passed."""
        ...


class AssertTrial:
    """Asserts of a test in Python."""

    def __init__(self, plan: TestPlan) -> None:
        self.plan = plan
        self.steps: Sequence[Step] | None = plan.steps
        self.stdin = ""

    @property
    def tests(self) -> int:
        """One for each assert."""
        return len(self.plan.claims)

    def verdicts(self, result: RunResult, run_alone: RunAlone) -> list[bool]:
        """Compare the values with those of the asserts."""
        count = sum(step.kind == "value" for step in self.plan.steps)
        try:
            values = read_values(result.output, count)
        except NoValueError:
            return [False] * self.tests
        return [self._holds(claim, values, run_alone) for claim in self.plan.claims]

    def _holds(self, claim: Claim, encoded: list[Any], run_alone: RunAlone) -> bool:
        try:
            values = [decode(encoded[number]) for number in claim.questions]
            # Compared here: decoded values are of Python's own types, whose == runs no code of
            # the program.
            if claim.literal is not None:
                return bool(values[0] == ast.literal_eval(claim.literal))
            return self._computed(claim, values, run_alone)
        except (NoValueError, RecursionError):
            return False

    def _computed(self, claim: Claim, values: list[Any], run_alone: RunAlone) -> bool:
        """The claim, computed by Python where the program never was."""
        steps = [
            Step("run", f"{VALUE}{number} = {source_of(value)}")
            for number, value in enumerate(values)
        ]
        steps.append(Step("value", f"bool({claim.code})"))
        known = "\n".join(self.plan.trusted[: claim.known])
        result = run_alone(known, steps)
        if result.status == "ended" and result.output == "":
            # The value may be too large for the claim, which is the program's fault. Statements that
            # fail without it, such as an import of what is not there, are those of the test.
            alone = run_alone(known, [Step("value", "True")])
            if alone.status == "ended" and alone.output == "":
                raise TestRefusal("the statements of a test fail where the program is not")
        (answer,) = read_values(result.output, 1)
        return decode(answer) is True


class CallTrial:
    """One call of a function, or of a method of the class Solution."""

    def __init__(self, function: str, arguments: list[Any], expected: Any, tolerance: float):
        if not function.isidentifier():
            raise TestRefusal(f"fn_name is {function[:80]!r}, which is no name of a function")
        method = f'(Solution().{function} if "Solution" in globals() else {function})'
        self.steps: Sequence[Step] | None = [Step("value", f"{method}(*{source_of(arguments)})")]
        self.stdin = ""
        self.tests = 1
        self._expected = expected
        self._tolerance = tolerance

    def verdicts(self, result: RunResult, run_alone: RunAlone) -> list[bool]:
        """Compare the value with the expected one; JSON has no tuples."""
        try:
            (encoded,) = read_values(result.output, 1)
            value = decode(encoded)
            if same_value(value, self._expected, self._tolerance):
                return [True]
            # APPS writes the value 3 as [3].
            expected = self._expected
            is_wrapped = isinstance(expected, list) and len(cast(list[Any], expected)) == 1
            return [is_wrapped and same_value(value, expected[0], self._tolerance)]
        except (NoValueError, RecursionError):
            return [False]


class TextTrial:
    """A program that reads its input and prints."""

    def __init__(self, stdin: str, expected: str, tolerance: float) -> None:
        self.steps: Sequence[Step] | None = None
        self.stdin = stdin
        self.tests = 1
        self._expected = expected
        self._tolerance = tolerance

    def verdicts(self, result: RunResult, run_alone: RunAlone) -> list[bool]:
        """Compare what it printed; a program that fails after that has not passed."""
        if result.status != "ended" or result.code != 0:
            return [False]
        return [same_text(result.output, self._expected, self._tolerance)]


def read_trials(
    tests: Any, entry_point: str | None = None, tolerance: float = 0.0
) -> list[CodeTrial]:
    """The runs of a record's tests; raises TestRefusal."""
    if isinstance(tests, str):
        # Parquet files have nested tests as JSON. A test in Python may begin with a bracket, too.
        if tests.lstrip().startswith(("{", "[")):
            try:
                parsed = json.loads(tests)
            except (ValueError, RecursionError):
                parsed = None
            if parsed is not None:
                return read_trials(parsed, entry_point, tolerance)
        return [AssertTrial(plan_test(tests, entry_point))]
    if isinstance(tests, dict):
        return _paired(cast(dict[str, Any], tests), tolerance)
    if isinstance(tests, list) and tests:
        trials: list[CodeTrial] = []
        for test in cast(list[Any], tests):
            if isinstance(test, str):
                trials.append(AssertTrial(plan_test(test, entry_point)))
            elif isinstance(test, dict) and "input" in test and "output" in test:
                pair = cast(dict[str, Any], test)
                trials.append(TextTrial(_text(pair["input"]), _text(pair["output"]), tolerance))
            else:
                raise TestRefusal(
                    "a list of tests must hold asserts, or mappings with input and output"
                )
        return trials
    raise TestRefusal(
        "tests must be asserts, a list of asserts, or a mapping with inputs and outputs; they are "
        f"{type(tests).__name__}"
    )


def _paired(tests: dict[str, Any], tolerance: float) -> list[CodeTrial]:
    inputs = tests.get("inputs")
    outputs = tests.get("outputs")
    if (
        not isinstance(inputs, list)
        or not isinstance(outputs, list)
        or not inputs
        or len(cast(list[Any], inputs)) != len(cast(list[Any], outputs))
    ):
        raise TestRefusal(
            "a mapping of tests must have lists `inputs` and `outputs` of one length; its keys are "
            f"{', '.join(list(tests)[:8])}"
        )
    function = tests.get("fn_name")
    trials: list[CodeTrial] = []
    for stdin_or_arguments, expected in zip(
        cast(list[Any], inputs), cast(list[Any], outputs), strict=True
    ):
        if function is None:
            trials.append(TextTrial(_text(stdin_or_arguments), _text(expected), tolerance))
            continue
        # APPS has the arguments of a call as a list. A text has them as JSON, one a line.
        arguments = stdin_or_arguments
        if isinstance(arguments, str):
            arguments = _json_lines(arguments)
            if isinstance(expected, str):
                expected = _json_lines(expected)[0]
        if not isinstance(arguments, list):
            raise TestRefusal("inputs of fn_name must be lists of arguments")
        trials.append(CallTrial(str(function), cast(list[Any], arguments), expected, tolerance))
    return trials


def _json_lines(text: str) -> list[Any]:
    """Arguments as JSON, one a line."""
    try:
        values = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        values = []
    if not values:
        raise TestRefusal("inputs of fn_name must be lists of arguments, or JSON, one a line")
    return values


def _text(value: Any) -> str:
    """Stdin or stdout; some data sets have lists of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(_text(item) for item in cast(list[Any], value))
    if isinstance(value, (int, float)):
        return str(value)
    raise TestRefusal(f"inputs and outputs must be texts; one is {type(value).__name__}")


def same_text(text: str, expected: str, tolerance: float) -> bool:
    """Whether two outputs agree, but for spaces at the ends of lines and empty lines at the end.
    With a tolerance, words that are numbers are compared as such.
    """
    lines = [line.rstrip() for line in text.rstrip().splitlines()]
    expected_lines = [line.rstrip() for line in expected.rstrip().splitlines()]
    if lines == expected_lines:
        return True
    if tolerance == 0 or len(lines) != len(expected_lines):
        return False
    for line, expected_line in zip(lines, expected_lines, strict=True):
        words = line.split()
        expected_words = expected_line.split()
        if len(words) != len(expected_words):
            return False
        for word, expected_word in zip(words, expected_words, strict=True):
            if word != expected_word and not _near_words(word, expected_word, tolerance):
                return False
    return True


def _near_words(word: str, expected: str, tolerance: float) -> bool:
    try:
        return _near(float(word), float(expected), tolerance)
    except ValueError:
        return False


def _near(value: float, expected: float, tolerance: float) -> bool:
    return math.isclose(value, expected, rel_tol=tolerance, abs_tol=tolerance)


def same_value(value: Any, expected: Any, tolerance: float) -> bool:
    """Whether a value is the one that JSON writes so: tuples are lists, keys are texts."""
    if isinstance(expected, list):
        expected = cast(list[Any], expected)
        return (
            isinstance(value, (list, tuple))
            and len(cast(Sequence[Any], value)) == len(expected)
            and all(
                same_value(item, other, tolerance)
                for item, other in zip(cast(Sequence[Any], value), expected, strict=True)
            )
        )
    if isinstance(expected, dict):
        if not isinstance(value, dict):
            return False
        named = {str(key): item for key, item in cast(dict[Any, Any], value).items()}
        expected = cast(dict[str, Any], expected)
        return named.keys() == expected.keys() and all(
            same_value(named[key], item, tolerance) for key, item in expected.items()
        )
    # True == 1 in Python, and not in JSON.
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, (int, float)) and isinstance(value, (int, float)):
        if value == expected:
            return True
        try:
            return tolerance > 0 and _near(value, expected, tolerance)
        except OverflowError:
            return False
    return type(value) is type(expected) and value == expected
