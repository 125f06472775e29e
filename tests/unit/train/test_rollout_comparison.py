"""`headway rollouts RUN --against OTHER`: the first token that two runs drew differently, and what differed before it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.cli import main
from headway.errors import ConfigError
from headway.rollout.journal import RolloutJournal, SampledAnswer, SampledBatch
from headway.train.rollout_comparison import DrawnToken, compare_rollouts

RECIPE = """\
seed: SEED
init: {from: model}
data: {train: [{path: prompts.jsonl, kind: prompt}], seq_len: 64}
objective: {kind: grpo}
rollout: {prompts: 2, samples: 2, max_new_tokens: 8, updates: 2, temperature: HEAT}
reward: [{kind: number}]
batch: {micro_rows: 2}
steps: 8
"""
IDS = ((5, 6, 7), (5, 6), (8, 9, 3), (4,))
"""Of two answers to each of two prompts."""


def add_rollout(
    folder: Path,
    batch: int,
    ids: Sequence[tuple[int, ...]] = IDS,
    logprob: float = -0.5,
    **more: Any,
) -> None:
    """Two prompts with two answers each."""
    answers = tuple(
        SampledAnswer(
            prompt=10 * batch + index // 2,
            sample=index % 2,
            ids=answer,
            logprobs=np.full(len(answer), logprob, np.float32),
            finished="eos",
            text=f"answer {batch}.{index} of {folder.name}",
        )
        for index, answer in enumerate(ids)
    )
    batch_of_one_run = SampledBatch(
        batch,
        version=2 * batch,
        digest=more.pop("digest", f"digest {batch}"),
        prompts=more.pop("prompts", ("x", "y")),
        answers=answers,
        questions=(f"question {batch}a", f"question {batch}b"),
        **more,
    )
    RolloutJournal.open(folder).add(batch_of_one_run)


def make_run(folder: Path, rollouts: int = 2, seed: int = 1, heat: float = 1.0) -> Path:
    folder.mkdir(parents=True)
    recipe = RECIPE.replace("SEED", str(seed)).replace("HEAT", str(heat))
    (folder / "recipe.yaml").write_text(recipe)
    for batch in range(rollouts):
        add_rollout(folder, batch)
    return folder


def write_metrics(folder: Path, *records: dict[str, Any]) -> None:
    lines = [
        json.dumps({"step": step, **record}) + "\n" for step, record in enumerate(records, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_runs_with_the_same_ids_are_equal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    comparison = compare_rollouts(run, other)
    assert comparison.equal
    assert comparison.first is None
    assert (comparison.rollouts, comparison.tokens) == (2, 18)
    assert comparison.logprob_difference == 0
    assert (comparison.steps, comparison.worst_metric) == (0, None)


def test_the_first_token_that_differs_is_found_with_both_draws(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    add_rollout(run, 2, logprob=-0.5)
    add_rollout(other, 2, ((5, 6, 7), (5, 6), (8, 9, 2), (1,)), logprob=-0.75)
    add_rollout(run, 3)
    add_rollout(other, 3, ((1,), (1,), (1,), (1,)))
    comparison = compare_rollouts(run, other)
    first = comparison.first
    assert not comparison.equal
    assert first is not None
    assert first.what == "token"
    assert (first.first_step, first.last_step, first.batch) == (5, 6, 2)
    assert (first.prompt, first.sample, first.position) == (21, 0, 2)
    assert first.question == "question 2b"
    assert first.drawn == DrawnToken(3, -0.5, 4, "answer 2.2 of run")
    assert first.other_drawn == DrawnToken(2, -0.75, 4, "answer 2.2 of other")
    assert first.gap == 0.25
    assert (first.answers_differing, first.answers) == (2, 4)
    # Two whole rollouts of 9 tokens, and 3 + 2 + 2 tokens before the differences of the third.
    assert (comparison.rollouts, comparison.tokens) == (2, 25)
    assert comparison.logprob_difference == 0.25


def test_an_answer_that_ends_earlier_differs_where_it_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=0)
    other = make_run(tmp_path / "other", rollouts=0)
    add_rollout(run, 0)
    add_rollout(other, 0, ((5, 6), (5, 6), (8, 9, 3), (4,)))
    first = compare_rollouts(run, other).first
    assert first is not None
    assert (first.sample, first.position, first.gap) == (0, 2, None)
    assert first.other_drawn == DrawnToken(None, None, 0, "answer 0.0 of other")


def test_metrics_are_compared_up_to_the_update_before_the_difference(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=1)
    other = make_run(tmp_path / "other", rollouts=1)
    add_rollout(run, 1)
    add_rollout(other, 1, ((9, 6, 7), (5, 6), (8, 9, 3), (4,)))
    first = {"loss": 1e-8, "grad_norm": 4.0, "micro_num": 2, "rollout/seconds": 1.0, "time": {"mfu": 1.0}}  # fmt: skip
    second = {"loss": 2e-8, "grad_norm": 5.0, "micro_num": 8, "rollout/seconds": 7.0, "time": {"mfu": 9.0}}  # fmt: skip
    write_metrics(run, first, first, {"loss": 9.0})
    write_metrics(other, first, second, {"loss": 1.0})
    comparison = compare_rollouts(run, other)
    assert comparison.steps == 2
    worst = comparison.worst_metric
    assert worst is not None
    assert (worst.name, worst.step, worst.value, worst.other) == ("grad_norm", 2, 4.0, 5.0)
    assert worst.difference == pytest.approx(0.2)


def test_a_metric_that_is_finite_in_one_run_alone_is_the_worst(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    write_metrics(run, {"loss": 1.0, "entropy": 100.0, "kl": None})
    write_metrics(other, {"loss": None, "entropy": 1.0, "kl": None, "non_finite": {"loss": "nan"}})
    assert main(["rollouts", str(run), "--against", str(other), "--json"]) == 0
    worst = json.loads(capsys.readouterr().out)["worst_metric"]
    assert (worst["name"], worst["other"], worst["difference"]) == ("loss", None, None)
    assert main(["rollouts", str(run), "--against", str(other)]) == 0
    assert "loss at step 1: 1 and not finite, difference inf" in capsys.readouterr().out


def test_a_run_that_goes_further_is_equal_as_far_as_both_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", rollouts=2)
    other = make_run(tmp_path / "other", rollouts=5)
    comparison = compare_rollouts(run, other)
    assert comparison.equal
    assert (comparison.more_rollouts, comparison.more_rollouts_of_other) == (0, 3)
    assert main(["rollouts", str(run), "--against", str(other)]) == 0
    assert f"{other} has 3 more rollouts" in capsys.readouterr().out


def test_a_journal_without_its_beginning_is_compared_from_where_it_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rollouts=3)
    other = make_run(tmp_path / "other", rollouts=0)
    add_rollout(other, 2)
    comparison = compare_rollouts(run, other)
    assert comparison.equal
    assert (comparison.rollouts, comparison.more_rollouts) == (1, 2)


def test_other_prompts_in_a_later_rollout_are_a_difference_without_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    add_rollout(run, 2)
    add_rollout(other, 2, digest="others", prompts=("x", "z"))
    first = compare_rollouts(run, other).first
    assert first is not None
    assert (first.what, first.first_step, first.prompt) == ("prompts", 5, None)
    assert main(["rollouts", str(run), "--against", str(other)]) == 0
    shown = capsys.readouterr().out
    assert "first difference: step 5-6 (rollout 2): other prompts" in shown


def test_settings_of_training_that_differ_are_named_with_their_first_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run", rollouts=1)
    other = make_run(tmp_path / "other", rollouts=1)
    add_rollout(run, 1, training="a")
    add_rollout(other, 1, training="b")
    assert compare_rollouts(run, other).trained_otherwise_from == 3
    assert main(["rollouts", str(run), "--against", str(other)]) == 0
    assert "settings of training" in capsys.readouterr().out


def test_stages_are_compared_one_after_the_other(tmp_path: Path) -> None:
    for name in ("run", "other"):
        make_run(tmp_path / name / "stages" / "01-first")
        make_run(tmp_path / name / "stages" / "02-second")
        (tmp_path / name / "recipe.yaml").write_text("steps: 1\n")
    write_metrics(tmp_path / "run/stages/01-first", {"loss": 1.0})
    write_metrics(tmp_path / "other/stages/01-first", {"loss": 1.5})
    add_rollout(tmp_path / "run/stages/02-second", 2)
    add_rollout(tmp_path / "other/stages/02-second", 2, ((1,), (1,), (1,), (1,)))
    comparison = compare_rollouts(tmp_path / "run", tmp_path / "other")
    assert comparison.first is not None
    assert (comparison.first.stage, comparison.first.batch) == ("02-second", 2)
    assert comparison.rollouts == 4
    assert comparison.worst_metric is not None
    assert comparison.worst_metric.name == "loss"


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        ({"seed": 2}, "differ in seed (1 and 2)"),
        ({"tokenizer": "t"}, "differ in the tokenizer."),
        ({"prompts": ("x", "z")}, "differ in the prompts of the first rollout."),
        ({}, "differ in the ids that end an answer."),
    ],
)
def test_runs_that_answer_otherwise_from_the_beginning_cannot_be_compared(
    tmp_path: Path, rollout: dict[str, Any], said: str
) -> None:
    run = make_run(tmp_path / "run", rollouts=0)
    other = make_run(tmp_path / "other", rollouts=0)
    add_rollout(run, 0, seed=1)
    add_rollout(other, 0, **{"seed": 1, "digest": "others", **rollout})
    with pytest.raises(ConfigError) as refusal:
        compare_rollouts(run, other)
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "--against", "nowhere"], "nowhere: no such folder"),
        (["run", "--against", "warm"], "differ in rollout.temperature (1.0 and 0.5)"),
        (["run", "--against", "late"], "no rollout in common"),
        (["run", "--against", "staged"], "no stage with rollouts in common: a run without stages, and 01-policy"),
        (["run", "--against", "run", "--best"], "--against and --best are both given"),
        (["run", "--against", "run", "--step", "1"], "--against and --step are both given"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_one_line(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run")
    warm = make_run(tmp_path / "warm", rollouts=0, heat=0.5)
    add_rollout(warm, 0, digest="warm")
    late = make_run(tmp_path / "late", rollouts=0)
    add_rollout(late, 7)
    make_run(tmp_path / "staged" / "stages" / "01-policy")
    assert main(["rollouts", *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_the_verb_says_equal_or_shows_the_first_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path / "run")
    other = make_run(tmp_path / "other")
    assert main(["rollouts", str(run), "--against", str(other)]) == 0
    assert capsys.readouterr().out.startswith("equal: 2 rollouts, 18 tokens;")
    add_rollout(run, 2)
    add_rollout(other, 2, ((5, 6, 7), (5, 6), (8, 9, 2), (4,)), logprob=-0.75)
    assert main(["rollouts", str(run), "--against", str(other)]) == 0
    shown = capsys.readouterr().out
    assert "first difference: step 5-6 (rollout 2), prompt 21, sample 0, position 2" in shown
    assert f"[{run}: id 3, log-probability -0.5000; weights after 4 updates]" in shown
    assert f"[{other}: id 2, log-probability -0.7500; weights after 4 updates]" in shown
    assert "1 of 4 answers of this rollout differ" in shown
    assert main(["rollouts", str(run), "--against", str(other), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["first"]["gap"] == 0.25
    assert report["equal"] is False
