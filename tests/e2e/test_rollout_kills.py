"""Runs that learn from rewards, killed in every phase: they end as the undisturbed one, with the same journal.

HEADWAY_KILLS says how many random kills the drill makes; HEADWAY_DRILL_SEED repeats it.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.killed_runs import Around, finish, kill_somewhere
from support.rollout_runs import journal_content, rollout_recipe, write_rollout_inputs
from support.runs import assert_same_run

from headway.infer.engine.engine import InferenceEngine
from headway.rollout.journal import FILE, RolloutJournal
from headway.rollout.sampler import AnswerRequest, DrawnAnswer, PolicySampler
from headway.track.metrics_file import read_metrics
from headway.train import loop, train
from headway.train.config import Recipe
from headway.train.rollouts import Rollouts
from headway.train.run import Run

KILLS = int(os.environ.get("HEADWAY_KILLS", "40"))
SEED = int(os.environ.get("HEADWAY_DRILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
STEPS = 8
KILLED = 9
"""Exit code of a process that ends itself at a chosen moment."""
SETTINGS = (
    f"steps={STEPS}", "rollout.updates=2", "checkpoint.every=3", "eval.every=4", "log.every=100", "objective.beta=0.05",
    "checkpoint.keep_last=9", "parallel.timeout_seconds=20",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_rollout_inputs(tmp_path_factory.mktemp("killed"))
    (folder / "half.py").write_text(HALF, encoding="utf-8")
    return folder


AHEAD = (*SETTINGS, "rollout.ahead=1")
"""With answers that are sampled while updates are computed."""
HALF = """\
def reward(prompt, answer, record):
    if int(record["answer"]) % 2:
        return 1.0
    return float(sum(map(ord, answer)) % 7)
"""
"""Half of the prompts earn the same whatever the answer is."""
REFILL = (*SETTINGS, "reward=$/half.py", "rollout.refill=3")
"""With further prompts in the place of those without signal: a rollout takes several batches."""
WAYS = {"plain": SETTINGS, "ahead": AHEAD, "refill": REFILL}


@pytest.fixture(scope="module")
def whole(folder: Path) -> Recipe:
    """The undisturbed run."""
    recipe = rollout_recipe(folder, "whole", *SETTINGS)
    train(recipe)
    return recipe


@pytest.fixture(scope="module")
def whole_ahead(folder: Path) -> Recipe:
    """The undisturbed run with answers that are sampled ahead."""
    recipe = rollout_recipe(folder, "whole-ahead", *AHEAD)
    train(recipe)
    return recipe


@pytest.fixture(scope="module")
def whole_refilled(folder: Path) -> Recipe:
    """The undisturbed run that replaces prompts without signal."""
    recipe = rollout_recipe(folder, "whole-refilled", *REFILL)
    train(recipe)
    return recipe


def assert_same_end(got: Recipe, expected: Recipe, told: str = "") -> None:
    """The same weights, optimizer states, numbers and journal."""
    try:
        assert_same_run(expected.run.folder, got.run.folder, STEPS)
        assert journal_content(got.run.folder) == journal_content(expected.run.folder)
    except AssertionError as difference:
        raise AssertionError(told) from difference


def checkpoint(recipe: Recipe, step: int) -> str:
    """An earlier checkpoint, from which a run resumes."""
    return str(recipe.run.folder / "checkpoints" / f"step-{step:08}")


# ---- chosen moments

Change = Callable[[Callable[..., Any], int], Callable[..., Any]]


def before(plain: Callable[..., Any], count: int) -> Callable[..., Any]:
    """End the process at the start of a call."""
    calls = iter(range(count - 1, -1, -1))

    def replaced(*arguments: Any, **named: Any) -> Any:
        if next(calls, 1) == 0:
            os._exit(KILLED)
        return plain(*arguments, **named)

    return replaced


def after(plain: Callable[..., Any], count: int) -> Callable[..., Any]:
    """End the process at the end of a call."""
    calls = iter(range(count - 1, -1, -1))

    def replaced(*arguments: Any, **named: Any) -> Any:
        outcome = plain(*arguments, **named)
        if next(calls, 1) == 0:
            os._exit(KILLED)
        return outcome

    return replaced


def torn(plain: Callable[..., Any], count: int) -> Callable[..., Any]:
    """Write a half of a line of the journal, then end the process."""
    calls = iter(range(count - 1, -1, -1))

    def replaced(journal: RolloutJournal, record: dict[str, Any]) -> Any:
        if next(calls, 1) == 0:
            with journal.path.open("ab") as file:
                file.write(b'0123abcd {"kind":"answers","batch":')
            os._exit(KILLED)
        return plain(journal, record)

    return replaced


MOMENTS: dict[str, tuple[Any, str, Change, int]] = {
    "sampling": (InferenceEngine, "step", before, 30),
    "a line of the journal": (RolloutJournal, "_append", torn, 4),
    "after the journal": (RolloutJournal, "add", after, 6),
    "before the rewards": (Rollouts, "_score", before, 4),
    "after the rewards": (Rollouts, "_score", after, 4),
    "between updates": (loop, "train_step", after, 3),
    "before a save": (Run, "save", before, 2),
    "validation": (Rollouts, "evaluate", before, 2),
}
"""Where a process ends: the object, its function, how, and at which call at most."""


def ended_at(moment: str, count: int) -> Around:
    @contextmanager
    def around(rank: int) -> Iterator[None]:
        owner, name, change, _ = MOMENTS[moment]
        setattr(owner, name, change(getattr(owner, name), count))
        yield

    return around


EACH_MOMENT = pytest.mark.parametrize(
    "moment",
    [
        pytest.param(moment, marks=() if moment == "between updates" else pytest.mark.slow)
        for moment in MOMENTS
    ],
)


@pytest.mark.timeout(600)
@EACH_MOMENT
def test_killed_twice_at_a_moment_a_run_ends_as_the_undisturbed_one(
    folder: Path, whole: Recipe, moment: str
) -> None:
    ends_as_the_undisturbed_one(folder, whole, moment, SETTINGS)


@pytest.mark.timeout(600)
@EACH_MOMENT
def test_killed_twice_while_answers_are_sampled_ahead_a_run_ends_as_the_undisturbed_one(
    folder: Path, whole_ahead: Recipe, moment: str
) -> None:
    ends_as_the_undisturbed_one(folder, whole_ahead, moment, AHEAD)


@pytest.mark.slow
@pytest.mark.timeout(600)
@EACH_MOMENT
def test_killed_twice_while_prompts_without_signal_are_replaced_a_run_ends_as_the_undisturbed_one(
    folder: Path, whole_refilled: Recipe, moment: str
) -> None:
    records = read_metrics(whole_refilled.run.folder / "metrics.jsonl")
    assert any(record["rollout/no_signal"] > 0 for record in records)
    assert max(record["rollout/prompts"] for record in records) > 4
    ends_as_the_undisturbed_one(folder, whole_refilled, moment, REFILL)


def ends_as_the_undisturbed_one(
    folder: Path, whole: Recipe, moment: str, settings: tuple[str, ...]
) -> None:
    draw = random.Random(f"{SEED} {moment}")
    name = f"killed {moment} {whole.run.name}".replace(" ", "-")
    recipe = rollout_recipe(folder, name, *settings)
    counts = [draw.randint(1, MOMENTS[moment][3]) for _ in range(2)]
    told = f"HEADWAY_DRILL_SEED={SEED}, {moment}, calls {counts}"
    codes = [finish(recipe, 1, around=ended_at(moment, count))[0] for count in counts]
    assert codes[0] == KILLED, told
    assert finish(recipe, 1) == [0], told
    assert_same_end(recipe, whole, told)


# ---- what the journal saves


def test_a_resumed_run_samples_nothing_and_asks_no_reward_that_the_journal_has(
    folder: Path, whole: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = rollout_recipe(folder, "replayed", *SETTINGS)
    shutil.copytree(whole.run.folder, recipe.run.folder)
    asked: list[str] = []
    plain = PolicySampler.sample

    def sample(self: PolicySampler, requests: list[AnswerRequest], *more: Any) -> list[DrawnAnswer]:
        asked.extend(request.key for request in requests)
        return plain(self, requests, *more)

    scored: list[int] = []
    plain_score = Rollouts._score

    def score(self: Rollouts, batch: int, answers: Any) -> Any:
        scored.append(batch)
        return plain_score(self, batch, answers)

    monkeypatch.setattr(PolicySampler, "sample", sample)
    monkeypatch.setattr(Rollouts, "_score", score)
    train(recipe, resume=checkpoint(recipe, 3))
    assert asked
    assert all(key.startswith("valid:") for key in asked)
    assert set(scored) == {-1}
    assert_same_end(recipe, whole)


def test_answers_of_weights_that_other_settings_made_are_not_used(
    folder: Path, whole: Recipe
) -> None:
    """From an earlier checkpoint, with another learning rate: as a run that had it from there."""
    changed = (*SETTINGS, "optim.lr=2e-2")
    recipe = rollout_recipe(folder, "changed", *changed)
    shutil.copytree(whole.run.folder, recipe.run.folder)
    train(recipe, resume=checkpoint(recipe, 3))
    numbers = read_metrics(recipe.run.folder / "metrics.jsonl")
    assert max(record["agreement/mean"] for record in numbers) < 1e-5

    # The reference has no journal beyond the rollout that the checkpoint is in.
    expected = rollout_recipe(folder, "unchanged", *changed)
    shutil.copytree(whole.run.folder, expected.run.folder)
    RolloutJournal.open(expected.run.folder).forget_from(2)
    train(expected, resume=checkpoint(expected, 3))
    assert_same_end(recipe, expected)
    before = journal_content(whole.run.folder)
    after = journal_content(recipe.run.folder)
    assert after[:6] == before[:6]
    assert [record["batch"] for record in after[:6]] == [0, 0, 0, 1, 1, 1]
    assert after[6:] != before[6:]


def test_a_lost_journal_is_sampled_again_to_the_same_answers(folder: Path, whole: Recipe) -> None:
    """On a CPU: answers depend on weights, prompt and key alone."""
    recipe = rollout_recipe(folder, "lost", *SETTINGS, "checkpoint.every=2")
    expected = rollout_recipe(folder, "unlost", *SETTINGS, "checkpoint.every=2")
    train(expected)
    shutil.copytree(expected.run.folder, recipe.run.folder)
    (recipe.run.folder / FILE).unlink()
    train(recipe, resume=checkpoint(recipe, 4))
    assert_same_run(expected.run.folder, recipe.run.folder, STEPS)
    kept = [r for r in journal_content(expected.run.folder) if r["batch"] >= 2]
    assert journal_content(recipe.run.folder) == kept


def test_a_lost_journal_between_updates_is_refused_in_one_line(folder: Path, whole: Recipe) -> None:
    recipe = rollout_recipe(folder, "lost between", *SETTINGS)
    shutil.copytree(whole.run.folder, recipe.run.folder)
    (recipe.run.folder / FILE).unlink()
    with pytest.raises(Exception, match="its first update was done") as refusal:
        train(recipe, resume=checkpoint(recipe, 3))
    assert len(str(refusal.value).splitlines()) == 1


# ---- random moments


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_command_killed_from_outside_is_resumed_by_itself(folder: Path, whole: Recipe) -> None:
    draw = random.Random(SEED)
    recipe = rollout_recipe(folder, "command", *SETTINGS)
    command = [sys.executable, "-m", "headway", "train", str(folder / "command.yaml"), *SETTINGS]
    metrics = recipe.run.folder / "metrics.jsonl"
    for steps in (1, 4):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if metrics.exists() and len(read_metrics(metrics)) >= steps:
                break
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.3))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 0
    assert_same_end(recipe, whole, f"HEADWAY_DRILL_SEED={SEED}")


@pytest.mark.drill
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("world", [1, 2])
def test_killed_anywhere_every_run_ends_as_the_undisturbed_one(
    folder: Path, world: int, way: str
) -> None:
    settings = WAYS[way]
    expected = rollout_recipe(folder, f"whole{world}-{way}", *settings)
    assert finish(expected, world) == [0] * world
    hit: Counter[str] = Counter()
    number = 0
    # Half of the kills for each number of ranks; for each way of sampling as many again.
    while sum(hit.values()) < KILLS // 2:
        number += 1
        recipe = rollout_recipe(folder, f"anywhere{world}-{way}-{number}", *settings)
        draw = random.Random(f"{SEED} {world} {way} {number}")
        told = (
            f"HEADWAY_DRILL_SEED={SEED}, {world} ranks, {way}, run {number}, killed in {dict(hit)}"
        )
        for _ in range(min(5, KILLS // 2 - sum(hit.values()))):
            if draw.random() < 0.5:
                moment = draw.choice(list(MOMENTS))
                count = draw.randint(1, MOMENTS[moment][3])
                codes = finish(recipe, world, around=ended_at(moment, count))
                if KILLED not in codes:
                    break
                hit[moment] += 1
                continue
            killed_at = kill_somewhere(recipe, world, draw)
            if killed_at is None:
                break
            hit[killed_at] += 1
        assert finish(recipe, world) == [0] * world, told
        assert_same_end(recipe, expected, told)
    kills = sum(hit.values())
    print(f"seed {SEED}, {world} ranks, {way}: {kills} kills, {number} runs, {dict(hit)}")  # noqa: T201
