"""The demo of reinforcement learning: its three sets share no question, and a small one leaves every figure behind."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from headway.cli import main
from headway.errors import Terminated
from headway.workflows.demo.reinforcement import AdditionDemo, run_addition_demo

SMALL = AdditionDemo(sft_questions=40, prompts=80, held_out=12, sft_steps=4, grpo_steps=2)


def questions(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_no_question_is_in_two_sets_and_the_control_has_the_answers_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = {"run": "sft", "stopped_by": "headway stop"}
    monkeypatch.setattr("headway.train.train", lambda recipe: stopped)
    with pytest.raises(Terminated, match="headway stop ended sft"):
        run_addition_demo(tmp_path, SMALL)
    assert not (tmp_path / "sft.json").exists()

    sets = {
        name: questions(tmp_path / "data" / f"{name}.jsonl")
        for name in ("sft", "prompts", "held_out", "shuffled")
    }
    texts = {name: {record["question"] for record in records} for name, records in sets.items()}
    assert [len(texts[name]) for name in ("sft", "prompts", "held_out")] == [40, 80, 12]
    for first, second in pairwise(("sft", "prompts", "held_out", "sft")):
        assert not texts[first] & texts[second]
    for record in sets["sft"] + sets["prompts"] + sets["held_out"]:
        assert sum(map(int, record["question"].split("+"))) == int(record["answer"])
    assert texts["shuffled"] == texts["prompts"]
    wrong = [
        record["answer"] != right["answer"]
        for record, right in zip(sets["shuffled"], sets["prompts"], strict=True)
    ]
    assert sum(wrong) > 0.9 * len(wrong)


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
        shares = figures[name]
        assert 0 <= shares["before"] <= 1
        assert 0 <= shares["after"] <= 1
        assert [step for step, _ in shares["course"]] == [0, 1, 2]
    # Both start from the same weights, and the same held-out questions judge them.
    assert figures["grpo"]["before"] == figures["control"]["before"]
    monkeypatch.setattr("headway.train.train", lambda *_: pytest.fail("a part was made twice"))
    again = run_addition_demo(tmp_path, SMALL, control=True)
    assert {**again, "seconds": 0} == {**figures, "seconds": 0}
