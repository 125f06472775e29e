"""`headway rollouts`: batches and answers of a journal, of runs that are alive and of stages."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cli import main
from headway.errors import ConfigError
from headway.rollout.journal import (
    FILE,
    RewardedBatch,
    RolloutJournal,
    SampledAnswer,
    SampledBatch,
)
from headway.train.rollout_report import RolloutChoice, read_rollouts

RECIPE = """\
init: {from: model}
data: {train: [{path: prompts.jsonl, kind: prompt}], seq_len: 64}
objective: {kind: grpo}
rollout: {prompts: 2, samples: 2, max_new_tokens: 8, updates: UPDATES}
reward: [{kind: number}]
batch: {micro_rows: 2}
steps: 8
"""


def add_batch(folder: Path, batch: int, version: int, rewards: list[float] | None) -> None:
    """Two prompts with two answers each."""
    answers = tuple(
        SampledAnswer(
            prompt=10 * batch + index // 2,
            sample=index % 2,
            ids=(1,) * (index + 1),
            logprobs=np.full(index + 1, -0.5, np.float32),
            finished="length" if index == 3 else "eos",
            text=f"answer {batch}.{index}",
        )
        for index in range(4)
    )
    journal = RolloutJournal.open(folder)
    questions = (f"question {batch}a", f"question {batch}b")
    journal.add(SampledBatch(batch, version, "d", ("x", "y"), answers, 2.0, questions))
    if rewards is not None:
        parts = tuple({"number": reward, "format": 0.5} for reward in rewards)
        problems = ((),) * 3 + (("number: it raised",),)
        journal.add(RewardedBatch(batch, "r", tuple(rewards), parts, problems, 0.5))


def make_run(folder: Path, updates: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(RECIPE.replace("UPDATES", str(updates)))
    add_batch(folder, 0, 0, [0.0, 1.0, 0.5, 0.5])
    add_batch(folder, 1, updates, [1.0, 1.0, 0.0, 0.25])
    return folder


def test_a_batch_is_a_line_of_figures(tmp_path: Path) -> None:
    first, second = read_rollouts(make_run(tmp_path / "run")).batches
    assert (first.first_step, first.last_step, first.prompts, first.answers) == (1, 1, 2, 4)
    assert (first.reward, first.lowest, first.highest) == (0.5, 0.0, 1.0)
    assert first.parts == {"number": 0.5, "format": 0.5}
    assert first.without_signal == 0.5
    assert (first.tokens, first.cut, first.failed) == (2.5, 0.25, 1)
    assert (first.tokens_per_second, first.reward_seconds) == (5.0, 0.5)
    assert second.first_step == 2


def test_best_and_worst_are_by_reward_and_the_newest_of_equals_come_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    best = read_rollouts(run, RolloutChoice(order="best", limit=3)).answers
    assert [answer.text for answer in best] == ["answer 1.0", "answer 1.1", "answer 0.1"]
    assert best[0].question == "question 1a"
    worst = read_rollouts(run, RolloutChoice(order="worst", limit=2))
    assert [answer.text for answer in worst.answers] == ["answer 1.2", "answer 0.0"]
    assert worst.left_out == 6


def test_an_update_shows_the_answers_it_trained_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", updates=2)
    answers = read_rollouts(run, RolloutChoice(step=4)).answers
    assert {answer.batch for answer in answers} == {1}
    assert (answers[0].first_step, answers[0].last_step) == (3, 4)
    assert answers[3].finished == "length"
    assert answers[3].problems == ("number: it raised",)
    with pytest.raises(ConfigError, match="--step 5; it has answers for the steps 1 to 4"):
        read_rollouts(run, RolloutChoice(step=5))


def test_a_prompt_is_found_by_its_number(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    answers = read_rollouts(run, RolloutChoice(prompt=11)).answers
    assert [answer.text for answer in answers] == ["answer 1.2", "answer 1.3"]
    with pytest.raises(ConfigError, match="no answer matches --prompt 99"):
        read_rollouts(run, RolloutChoice(prompt=99))


def test_a_live_run_is_read_without_its_torn_line_and_not_changed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_batch(run, 2, 2, None)
    whole = (run / FILE).read_bytes()
    (run / FILE).write_bytes(whole + whole[-200:-80])
    before = (run / FILE).read_bytes()
    report = read_rollouts(run)
    assert [figures.batch for figures in report.batches] == [0, 1, 2]
    assert report.batches[2].reward is None
    best = read_rollouts(run, RolloutChoice(order="best")).answers
    assert all(answer.reward is not None for answer in best)
    assert (run / FILE).read_bytes() == before


def test_a_journal_without_questions_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (sampled,) = [line for line in (run / FILE).read_text().splitlines() if '"batch":0' in line][:1]
    record: dict[str, Any] = json.loads(sampled[9:])
    del record["questions"]
    from headway.rollout.journal import _line  # pyright: ignore[reportPrivateUsage]

    (run / FILE).write_bytes(_line(record))
    (answer,) = read_rollouts(run, RolloutChoice(step=1, limit=1)).answers
    assert (answer.question, answer.text) == ("", "answer 0.0")


def test_stages_are_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run / "stages" / "01-policy")
    (run / "recipe.yaml").write_text("steps: 1\n")
    report = read_rollouts(run)
    assert {figures.stage for figures in report.batches} == {"01-policy"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "no such folder"),
        (["empty"], "is no run"),
        (["other"], "samples no answers"),
        (["run", "--best", "--worst"], "both given"),
        (["run", "--step", "9"], "steps 1 to 2"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "recipe.yaml").write_text("steps: 1\n")
    assert main(["rollouts", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_verb_prints_answers_beside_rewards_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    assert main(["rollouts", str(run), "--best", "--limit", "1"]) == 0
    shown = capsys.readouterr().out
    assert "question 1a" in shown
    assert "reward 1: number 1, format 0.5; eos after 1 tokens; weights after 1 updates" in shown
    assert "7 more answers match" in shown
    assert main(["rollouts", str(run)]) == 0
    assert "no signal" in capsys.readouterr().out
    assert main(["rollouts", str(run), "--step", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [answer["reward"] for answer in report["answers"]] == [0.0, 1.0, 0.5, 0.5]


def test_answers_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    answer = SampledAnswer(0, 0, (1,), np.zeros(1, np.float32), "eos", "\x1b[2Jgone")
    RolloutJournal.open(run).add(SampledBatch(2, 2, "d", ("x",), (answer,), 1.0, ("q",)))
    assert main(["rollouts", str(run), "--step", "3"]) == 0
    assert "\x1b" not in capsys.readouterr().out
