"""`rollout.ahead`: the next answers are sampled while updates are computed; nothing depends on which side is faster."""

import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.ranks import start_processes
from support.rollout_runs import (
    SAME,
    journal_content,
    journal_of,
    rollout_recipe,
    sampled_ids,
    train_with_a_spike,
    write_rollout_inputs,
)
from support.runs import assert_same_run

from headway.errors import GaveUpError
from headway.rollout.journal import FILE
from headway.rollout.sampler import PolicySampler
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe
from headway.train.rollouts import Rollouts
from headway.train.run import Run

STEPS = 8
SETTINGS = (f"steps={STEPS}", "rollout.updates=2", "eval.every=4", "checkpoint.every=4", "rollout.ahead=1")  # fmt: skip
UPDATE_SECONDS = 60.0
"""How long a test waits for the other side."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rollout_inputs(tmp_path_factory.mktemp("ahead"))


def run(folder: Path, name: str, *more: str, world: int = 1) -> Recipe:
    recipe = rollout_recipe(folder, name, *SETTINGS, *more)
    if world == 1:
        train(recipe)
    else:
        start_processes(lambda: train(recipe), world, timeout=120)
    return recipe


def numbers(recipe: Recipe) -> list[dict[str, Any]]:
    return read_metrics(recipe.run.folder / "metrics.jsonl")


def versions(recipe: Recipe) -> list[tuple[int, int, int]]:
    """(batch, updates of its weights, first update on it) of every batch."""
    batches = journal_of(recipe.run.folder)
    return [(sampled.batch, sampled.version, sampled.first_step) for sampled in batches]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Recipe:
    return run(folder, "plain")


def test_the_journal_names_weights_that_are_one_rollout_older(plain: Recipe) -> None:
    assert versions(plain) == [(0, 0, 1), (1, 0, 3), (2, 2, 5), (3, 4, 7)]
    staleness = [record["rollout/staleness"] for record in numbers(plain)]
    assert staleness == [0, 1, 2, 3, 2, 3, 2, 3]
    # Trainer and sampler agree where the weights are the same, and differ by the updates elsewhere.
    agreement = [record["agreement/mean"] for record in numbers(plain)]
    assert max(agreement[:2]) < 1e-5
    assert min(agreement[2:]) > 1e-3


def test_sampling_in_a_thread_changes_nothing(
    folder: Path, plain: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rollouts, "_samples_beside", False)
    in_turn = run(folder, "in-turn")
    assert_same_run(plain.run.folder, in_turn.run.folder, STEPS)
    assert journal_content(in_turn.run.folder) == journal_content(plain.run.folder)


def test_answers_are_sampled_while_an_update_is_computed(
    folder: Path, plain: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampling ahead ends only after an update has begun, and that update only after the
    sampling has: neither could wait for the other if they took turns."""
    samples = threading.Event()
    trains = threading.Event()
    met: list[bool] = []
    plain_sample = PolicySampler.sample

    def sample(self: PolicySampler, *arguments: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            samples.set()
            met.append(trains.wait(UPDATE_SECONDS))
        return plain_sample(self, *arguments)

    @contextmanager
    def meeting(run: Run) -> Iterator[None]:
        plain_pass = run.engine.forward_backward

        def forward_backward(*arguments: Any) -> Any:
            trains.set()
            met.append(samples.wait(UPDATE_SECONDS))
            return plain_pass(*arguments)

        monkeypatch.setattr(run.engine, "forward_backward", forward_backward)
        yield

    monkeypatch.setattr(PolicySampler, "sample", sample)
    recipe = rollout_recipe(folder, "meeting", *SETTINGS)
    train(recipe, hook=meeting)
    assert len(met) == 3 + STEPS
    assert all(met)
    assert journal_content(recipe.run.folder) == journal_content(plain.run.folder)


def test_a_checkpoint_waits_for_the_answers_that_its_weights_draw(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them a resumed run would need weights that are gone."""
    seen: list[list[tuple[int, int]]] = []
    recipe = rollout_recipe(folder, "saved", *SETTINGS, "checkpoint.every=1")
    plain_save = Run.save

    def save(self: Run, **named: Any) -> None:
        plain_save(self, **named)
        batches = journal_of(recipe.run.folder)
        seen.append([(self.state.step, sampled.batch) for sampled in batches])

    monkeypatch.setattr(Run, "save", save)
    train(recipe)
    for known in seen:
        step = known[0][0]
        last = max(batch for _, batch in known)
        # The rollout of update `step` and the one after it, where there is one.
        assert last == min((step - 1) // 2 + 1, 3)


def test_ranks_sample_their_shares_ahead(folder: Path, plain: Recipe) -> None:
    two = run(folder, "two", world=2)
    assert versions(two) == versions(plain)
    # Both rollouts of the first weights; later ones may differ by a rounding.
    assert sampled_ids(two.run.folder)[:32] == sampled_ids(plain.run.folder)[:32]
    for got, expected in zip(numbers(two)[:4], numbers(plain)[:4], strict=True):
        assert {key: got[key] for key in SAME} == pytest.approx(
            {key: expected[key] for key in SAME}, rel=1e-4, abs=1e-5
        )


def test_a_run_over_epochs_begins_no_rollout_after_the_last_prompt(folder: Path) -> None:
    recipe = run(folder, "epoch", "steps=null", "epochs=1")
    assert [batch for batch, _, _ in versions(recipe)] == [0, 1, 2, 3]
    assert len(numbers(recipe)) == STEPS


def test_rollouts_that_are_refilled_read_further_prompts_when_they_begin(folder: Path) -> None:
    (folder / "same.py").write_text("def reward(prompt, answer, record):\n    return 0.5\n")
    recipe = run(folder, "refilled", "rollout.refill=1", "reward=$/same.py", "epochs=null")
    # Of each rollout the first batch was begun ahead; all prompts are without signal.
    expected = [(0, 0, 1), (1, 0, 1), (2, 0, 3), (3, 2, 3), (4, 2, 5), (5, 4, 5), (6, 4, 7), (7, 6, 7)]  # fmt: skip
    assert versions(recipe) == expected


def test_a_reward_that_fails_in_the_thread_ends_the_run_in_one_line(folder: Path) -> None:
    (folder / "fails.py").write_text("def reward(prompt, answer, record):\n    return 1 / 0\n")
    with pytest.raises(GaveUpError, match="reward fails failed on") as refusal:
        run(folder, "fails", "reward=$/fails.py", "rollout.samples=8")
    assert len(str(refusal.value).splitlines()) == 1
    assert threading.active_count() < 20


def test_an_error_of_the_run_does_not_wait_for_answers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = threading.Event()
    plain_sample = PolicySampler.sample

    def sample(self: PolicySampler, requests: Any, temperature: float, on_round: Any, *more: Any) -> Any:  # fmt: skip
        if threading.current_thread() is threading.main_thread():
            return plain_sample(self, requests, temperature, on_round, *more)
        while True:
            samples.set()
            on_round()
            time.sleep(0.01)

    @contextmanager
    def failing(run: Run) -> Iterator[None]:
        def forward_backward(*_: Any) -> Any:
            assert samples.wait(UPDATE_SECONDS)
            raise ValueError("a test says so")

        monkeypatch.setattr(run.engine, "forward_backward", forward_backward)
        yield

    monkeypatch.setattr(PolicySampler, "sample", sample)
    with pytest.raises(ValueError, match="a test says so"):
        train(rollout_recipe(folder, "error", *SETTINGS), hook=failing)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("headway-rollouts")]


def test_the_bound_on_the_difference_names_the_older_weights(folder: Path) -> None:
    with pytest.raises(GaveUpError, match="by those of a rollout before"):
        run(folder, "bound", "rollout.difference_limit=1e-4")


def test_a_rollback_uses_no_answers_of_the_weights_that_it_left(folder: Path) -> None:
    settings = ("heal.on_spike=rollback", "checkpoint.every=1", "rollout.ahead=1")
    recipe = rollout_recipe(folder, "back", *settings)
    steps = train_with_a_spike(recipe)
    assert steps == [1, 2, 2, 3, 4]
    # The second batch was skipped. The third was drawn by the weights of update 1, to which the
    # run returned; all later ones are of the weights after that.
    assert versions(recipe) == [(0, 0, 1), (1, 0, 2), (2, 1, 3), (3, 1, 3), (4, 2, 4)]


def test_answers_of_a_lost_journal_are_drawn_by_the_weights_that_are_left(
    folder: Path, plain: Recipe
) -> None:
    recipe = rollout_recipe(folder, "lost", *SETTINGS)
    shutil.copytree(plain.run.folder, recipe.run.folder)
    (recipe.run.folder / FILE).unlink()
    checkpoint = recipe.run.folder / "checkpoints" / "step-00000004"
    train(recipe, resume=str(checkpoint))
    assert versions(recipe) == [(2, 4, 5), (3, 4, 7)]
    assert len(numbers(recipe)) == STEPS


def test_the_setting_may_change_when_a_run_resumes(folder: Path, plain: Recipe) -> None:
    """From then on no answers are used that were sampled ahead."""
    recipe = rollout_recipe(folder, "changed", *SETTINGS, "rollout.ahead=0")
    shutil.copytree(plain.run.folder, recipe.run.folder)
    checkpoint = recipe.run.folder / "checkpoints" / "step-00000004"
    train(recipe, resume=str(checkpoint))
    assert versions(recipe) == [(0, 0, 1), (1, 0, 3), (2, 4, 5), (3, 6, 7)]
