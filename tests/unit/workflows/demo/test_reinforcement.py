"""The demo of reinforcement learning: its three sets share no question, the rewards of its control know nothing of the answer,
and a small one leaves every figure behind."""

import json
import runpy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from headway.cli import main
from headway.errors import Terminated
from headway.workflows.demo.reinforcement import (
    CHANCE_FILE,
    AdditionDemo,
    run_addition_demo,
    verdict,
)

SMALL = AdditionDemo(sft_questions=40, prompts=80, held_out=12, sft_steps=4, grpo_steps=2)


def questions(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_question_is_in_two_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = {"run": "sft", "stopped_by": "headway stop"}
    monkeypatch.setattr("headway.train.train", lambda recipe: stopped)
    with pytest.raises(Terminated, match="headway stop ended sft"):
        run_addition_demo(tmp_path, SMALL)
    assert not (tmp_path / "sft.json").exists()

    sets = {
        name: questions(tmp_path / "data" / f"{name}.jsonl")
        for name in ("sft", "prompts", "held_out")
    }
    texts = {name: {record["question"] for record in records} for name, records in sets.items()}
    assert [len(texts[name]) for name in ("sft", "prompts", "held_out")] == [40, 80, 12]
    for first, second in pairwise(("sft", "prompts", "held_out", "sft")):
        assert not texts[first] & texts[second]
    for record in sets["sft"] + sets["prompts"] + sets["held_out"]:
        assert sum(map(int, record["question"].split("+"))) == int(record["answer"])


@pytest.fixture
def chance(tmp_path: Path) -> Any:
    """The reward of the control, as its worker process imports it."""
    path = tmp_path / "chance.py"
    path.write_text(CHANCE_FILE)
    return runpy.run_path(str(path))["reward"]


def test_rewards_by_chance_are_as_frequent_for_right_and_wrong_sums(chance: Any) -> None:
    for offset in (0, 1, 10):
        earned = [
            chance((), str(first + second + offset), {"question": f"{first}+{second}"}, 0.12, 0)
            for first in range(10, 100)
            for second in range(10, 100)
        ]
        assert set(earned) == {0.0, 1.0}
        # Three standard errors of a share of 12 % among 8,100.
        assert sum(earned) / len(earned) == pytest.approx(0.12, abs=0.011)


def test_rewards_by_chance_depend_on_question_answer_and_seed(chance: Any) -> None:
    def earned(question: str, answer: str, seed: int) -> list[float]:
        return [
            chance((), f"{answer}{number}", {"question": question}, 0.5, seed)
            for number in range(64)
        ]

    same = earned("12+34", "4", 0)
    assert earned("12+34", "4", 0) == same
    for other in (earned("12+35", "4", 0), earned("12+34", "5", 0), earned("12+34", "4", 1)):
        assert other != same


def shares(before: float, after: float) -> dict[str, float]:
    return {
        "before": before,
        "after": after,
        "greedy_before": 2 * before,
        "greedy_after": 2 * after,
    }


def test_the_verdict_is_one_line_with_both_courses() -> None:
    summary = {
        "held_out_questions": 500,
        "grpo": shares(0.12, 0.285),
        "control": shares(0.119, 0.123),
    }
    result = verdict(summary)
    assert result["text"] == "learned: 12.0 → 28.5 %, control 11.9 → 12.3 %"
    assert result["learned"]
    assert result["control_flat"]
    assert result["factor"] == pytest.approx(2.375)
    assert result["greedy_factor"] == pytest.approx(2.375)
    # 2 sqrt((0.119 0.881 + 0.123 0.877) / 500)
    assert result["control_error"] == pytest.approx(0.04125, abs=1e-5)


def test_the_verdict_says_where_nothing_was_learned_or_the_control_moved() -> None:
    summary = {
        "held_out_questions": 500,
        "grpo": shares(0.12, 0.13),
        "control": shares(0.116, 0.014),
    }
    result = verdict(summary)
    assert not result["learned"]
    assert result["control_flat"] is False
    assert result["text"].startswith("NOT learned: 12.0 → 13.0 %, control 11.6 → 1.4 %")
    assert "NOT flat" in result["text"]


def test_a_demo_without_control_has_no_word_of_it() -> None:
    result = verdict({"held_out_questions": 500, "grpo": shares(0.0, 0.2)})
    assert result["text"] == "learned: 0.0 → 20.0 %"
    assert result["control_flat"] is None
    assert result["factor"] is None


@pytest.mark.parametrize(
    "flags", [["--rl", "--multimodal"], ["--control"]], ids=["two demos", "control alone"]
)
def test_options_that_do_not_fit_are_refused(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.slow
def test_a_small_demo_states_every_figure_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = run_addition_demo(tmp_path, SMALL, control=True)
    for name in ("grpo", "control"):
        part = figures[name]
        for share in ("before", "after", "greedy_before", "greedy_after"):
            assert 0 <= part[share] <= 1
        assert [step for step, _ in part["course"]] == [0, 1, 2]
    # Both start from the same weights, and the same held-out questions judge them.
    assert figures["grpo"]["before"] == figures["control"]["before"]
    monkeypatch.setattr("headway.train.train", lambda *_: pytest.fail("a part was made twice"))
    again = run_addition_demo(tmp_path, SMALL, control=True)
    assert {**again, "seconds": 0} == {**figures, "seconds": 0}
