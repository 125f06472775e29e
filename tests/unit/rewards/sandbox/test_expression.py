"""Tests in Python are split so that no expected value reaches the program and it cannot decide alone."""

import math

import pytest

from headway.rewards.sandbox.expression import TestPlan, TestRefusal, plan_test, source_of


def codes(plan: TestPlan) -> list[str]:
    return [step.code for step in plan.steps]


def test_a_question_leaves_without_its_expected_value() -> None:
    plan = plan_test("assert f([3, 1]) == [1, 3]")
    assert codes(plan) == ["f([3, 1])"]
    assert plan.claims[0].literal is not None


def test_a_value_may_stand_on_either_side() -> None:
    plan = plan_test("assert 9 == f(3)")
    assert codes(plan) == ["f(3)"]
    assert plan.claims[0].literal is not None


def test_what_surrounds_a_question_is_trusted() -> None:
    plan = plan_test("import math\nassert math.isclose(abs(f(2) - 1), 0.5)")
    assert codes(plan) == ["f(2)"]
    assert plan.claims[0].code == "math.isclose(abs(_headway_value0 - 1), 0.5)"


def test_a_constant_leaves_only_where_a_question_needs_it() -> None:
    plan = plan_test("x = [1]\nexpected = [2]\nassert f(x) == expected")
    assert codes(plan) == ["x = [1]", "f(x)"]
    assert plan.trusted == ["x = [1]", "expected = [2]"]


def test_what_a_needed_constant_is_made_of_leaves_too() -> None:
    plan = plan_test("import string\nabc = string.digits\nx = abc[:3]\nassert f(x) == 3")
    assert codes(plan) == ["import string", "abc = string.digits", "x = abc[:3]", "f(x)"]


def test_a_list_that_the_program_may_change_is_asked_for() -> None:
    plan = plan_test("x = [3, 1]\nsort_in_place(x)\nassert x == [1, 3]")
    assert codes(plan) == ["x = [3, 1]", "sort_in_place(x)", "x"]


def test_a_module_stays_trusted_after_the_program_got_a_value_of_it() -> None:
    plan = plan_test("import math\ns = Shape(math.pi)\nassert math.isclose(s.area(), 3.0)")
    assert codes(plan)[-1] == "s.area()"


def test_a_function_of_the_test_compares_where_the_program_is_not() -> None:
    plan = plan_test("def near(a, b):\n    return abs(a - b) < 1\nassert near(f(1), 2)")
    assert codes(plan) == ["f(1)"]
    assert plan.claims[0].code == "near(_headway_value0, 2)"


def test_a_claim_is_about_the_names_before_it() -> None:
    plan = plan_test("x = 5\nassert g(1) < x\nx = 6\nassert g(2) < x")
    assert [claim.known for claim in plan.claims] == [1, 2]


@pytest.mark.parametrize(
    "change",
    ["x.append(1)", "x[0] = 1", "random.shuffle(x)", "x += [1]", "x[0] += 1", "for i in [1]:\n    x.append(i)", "del x[0]"],
)  # fmt: skip
def test_a_change_of_what_a_question_mentions_leaves_too(change: str) -> None:
    plan = plan_test(f"import random\nx = [0]\n{change}\nassert f(x) == 1")
    assert change in codes(plan)


def test_an_expected_value_does_not_leave_with_what_was_put_into_it() -> None:
    plan = plan_test("x = [1]\nwant = []\nwant.append(x)\nwant.append(9)\nassert f(x) == want")
    assert codes(plan) == ["x = [1]", "f(x)"]


def test_functions_of_pytest_are_read_like_statements() -> None:
    source = "from solution import f\n\ndef test_one():\n    x = 1\n    assert f(x) == 2\n"
    plan = plan_test(source + "\ndef test_two():\n    assert f(3) == 4\n")
    assert codes(plan) == ["x = 1", "f(x)", "f(3)"]


def test_and_is_two_claims() -> None:
    assert len(plan_test("assert f(1) == 1 and f(2) == 4").claims) == 2


def test_check_of_humaneval_is_about_its_argument() -> None:
    source = "def check(candidate):\n    assert candidate(1) == 2\n    assert not candidate(3)\n"
    assert codes(plan_test(source + "check(add)")) == ["add(1)", "add(3)"]
    assert codes(plan_test(source, "add")) == ["add(1)", "add(3)"]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("assert f(1) == f(2)", "2 values of the program"),
        ("assert decode(encode(1)) == decode(2)", "2 values"),
        ("x = make()\nassert f(x) == x", "2 values"),
        ("assert 1 == 1", "0 values"),
        ("assert sorted([1]) == [1]", "0 values"),
        ("assert same(f(1), 2)", "decide"),
        ("assert not differs(f(1), 2)", "decide"),
        ("for i in range(3):\n    assert f(i) == i", "inside of For"),
        ("if f(1):\n    assert True", "inside of If"),
        ("assert all(f(i) == i for i in range(3))", "inside of GeneratorExp"),
        ("assert (lambda x: f(x))(1) == 1", "inside of Lambda"),
        ("def test_it(fixture):\n    assert f(fixture) == 1", "inside of FunctionDef"),
        ("from math import *\nassert isclose(f(1), 1.0)", "decide"),
        ("while f(1):\n    pass", "inside of While"),
        ("print(1)", "no assert"),
        ("assert f(1) ==", "no Python"),
        ("def check(candidate):\n    assert candidate(1) == 1", "entry_point"),
        ("assert " + "(" * 3000 + "f(1)" + ")" * 3000, "nested|no Python"),
    ],
)
def test_a_test_that_a_program_could_forge_is_refused(source: str, reason: str) -> None:
    with pytest.raises(TestRefusal, match=reason):
        plan_test(source)


def test_an_entry_point_is_a_name() -> None:
    with pytest.raises(TestRefusal, match="no name of a function"):
        plan_test("def check(candidate):\n    assert candidate(1) == 2\n", "f(1) or g")


@pytest.mark.parametrize(
    "value",
    [None, True, 1 << 64, -3, 0.1, float("inf"), 2 + 1j, "a'\n\ud800", b"\0", [1, (2,), {3}], {1: {"a": ()}},
     frozenset({1}), set(), {}],
)  # fmt: skip
def test_a_value_as_source_is_the_value(value: object) -> None:
    assert eval(source_of(value)) == value


def test_nan_as_source_is_nan() -> None:
    assert math.isnan(eval(source_of(math.nan)))
