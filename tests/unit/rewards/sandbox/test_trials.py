"""Tests of data sets become runs and verdicts."""

import json
from typing import Any

import pytest

from headway.rewards.sandbox.expression import TestRefusal
from headway.rewards.sandbox.trials import (
    RunResult,
    read_trials,
    same_text,
    same_value,
)


def ended(output: str, code: int = 0) -> RunResult:
    return RunResult("ended", code, output)


def values(*encoded: Any) -> RunResult:
    return ended(json.dumps({"values": encoded}))


def alone(program: str, steps: Any) -> RunResult:
    """Computes trusted code here: these tests trust it."""
    names: dict[str, Any] = {}
    exec(program, names)
    for step in steps[:-1]:
        exec(step.code, names)
    return values(["bool", eval(steps[-1].code, names)])


def test_each_assert_is_a_test() -> None:
    (trial,) = read_trials("assert f(1) == 2\nassert len(f('a')) < 2")
    assert trial.tests == 2
    assert trial.verdicts(values(["int", "0x2"], ["str", "aa"]), alone) == [True, False]


def test_a_list_of_asserts_has_a_run_each() -> None:
    assert [trial.tests for trial in read_trials(["assert f(1) == 2", "assert f(2) == 3"])] == [
        1,
        1,
    ]


def test_a_missing_value_passes_nothing() -> None:
    (trial,) = read_trials("assert f(1) == None\nassert not f(2)")
    assert trial.verdicts(values(None, None), alone) == [False, False]
    assert trial.verdicts(values(["none"]), alone) == [False, False]
    assert trial.verdicts(ended(""), alone) == [False, False]


def test_a_test_whose_own_statements_fail_is_refused() -> None:
    (trial,) = read_trials("import nothing_of_this_name\nassert len(f(1)) == 2")
    with pytest.raises(TestRefusal, match="statements of a test fail"):
        trial.verdicts(values(["str", "ab"]), lambda program, steps: ended("", code=1))


def test_a_value_that_is_too_large_for_a_claim_has_not_passed() -> None:
    (trial,) = read_trials("assert len(f(1)) == 2")

    def no_memory(program: str, steps: Any) -> RunResult:
        return values(["bool", True]) if steps[-1].code == "True" else ended("", code=1)

    assert trial.verdicts(values(["str", "ab"]), no_memory) == [False]


def test_texts_are_stdin_and_stdout() -> None:
    (trial,) = read_trials({"inputs": ["1 2\n"], "outputs": ["3\n"]})
    assert trial.steps is None
    assert trial.stdin == "1 2\n"
    assert trial.verdicts(ended("3  \n\n"), alone) == [True]
    assert trial.verdicts(ended("4"), alone) == [False]
    assert trial.verdicts(ended("3", code=1), alone) == [False]
    assert trial.verdicts(RunResult("time", 0, "3"), alone) == [False]


def test_calls_have_their_arguments_and_not_their_results() -> None:
    (trial,) = read_trials({"inputs": [[[1, 2], None]], "outputs": [77], "fn_name": "f"})
    assert trial.steps is not None
    assert "f)(*[[(0x1), (0x2), ], None, ])" in trial.steps[0].code
    assert "77" not in trial.steps[0].code
    assert "0x4d" not in trial.steps[0].code
    assert trial.verdicts(values(["int", "0x4d"]), alone) == [True]


def test_a_result_in_a_list_of_one_is_that_result() -> None:
    (trial,) = read_trials({"inputs": [[1]], "outputs": [[3]], "fn_name": "f"})
    assert trial.verdicts(values(["int", "0x3"]), alone) == [True]


def test_json_in_a_column_is_read() -> None:
    text = json.dumps({"inputs": ["1"], "outputs": ["2"]})
    assert read_trials(text)[0].stdin == "1"
    assert read_trials(json.dumps([{"input": "1", "output": "2"}]))[0].stdin == "1"


@pytest.mark.parametrize(
    "tests",
    [{}, [], 3, {"inputs": ["1"], "outputs": []}, {"inputs": [1.5], "outputs": [None]}, [3], {"inputs": [["a"]],
     "outputs": [1], "fn_name": "f(); g"}, {"inputs": ["not json"], "outputs": ["1"], "fn_name": "f"}],
)  # fmt: skip
def test_other_shapes_are_refused(tests: object) -> None:
    with pytest.raises(TestRefusal):
        read_trials(tests)


@pytest.mark.parametrize(
    ("text", "expected", "tolerance", "same"),
    [
        ("a \nb\n\n", "a\nb", 0.0, True),
        ("a b", "a  b", 0.0, False),
        ("0.3333", "0.33334", 0.0, False),
        ("x 0.3333", "x 0.33334", 1e-3, True),
        ("x 0.3333 1", "x 0.33334", 1e-3, False),
        ("nan", "1", 1e-3, False),
        ("a", "", 0.0, False),
    ],
)
def test_outputs_agree_but_for_spaces_at_ends(
    text: str, expected: str, tolerance: float, same: bool
) -> None:
    assert same_text(text, expected, tolerance) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        ((1, [2]), [1, [2]], True),
        ({1: "a"}, {"1": "a"}, True),
        (1, True, False),
        (True, 1, False),
        (1.0, 1, True),
        ("1", 1, False),
        ([1], [1, 2], False),
        (10**400, 1.5, False),
        (None, None, True),
    ],
)
def test_values_agree_as_json_writes_them(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected, 0.0) is same
    assert same_value(value, expected, 1e-6) is same
