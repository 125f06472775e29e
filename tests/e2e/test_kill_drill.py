"""The kill drill: random ranks killed at random moments, in saves and validations too; every run ends as the undisturbed one.

HEADWAY_KILLS and HEADWAY_TERMS say how many; HEADWAY_DRILL_SEED repeats a drill. `make drill` kills 200 times.
"""

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from support.killed_runs import STEPS, finish, kill_somewhere, small, started
from support.runs import assert_same_run, make_stores, write_recipe

from headway.checkpoint.load import open_checkpoint, step_folders
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

KILLS = int(os.environ.get("HEADWAY_KILLS", "2"))
TERMS = int(os.environ.get("HEADWAY_TERMS", "1"))
SEED = int(os.environ.get("HEADWAY_DRILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
KILLS_OF_A_RUN = 5
SPLIT = ("parallel.tensor=2", "parallel.pipeline=2", "model.num_layers=2", "model.num_kv_heads=2")
LAYOUTS = [
    pytest.param((1, ()), id="1 rank"),
    pytest.param((2, ()), id="2 ranks"),
    pytest.param((4, SPLIT), id="tensor 2 x pipeline 2", marks=pytest.mark.drill),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drill")
    return write_recipe(folder, make_stores(folder, documents=24), name="drill")


@pytest.fixture(scope="module", params=LAYOUTS)
def whole(recipe: Path, request: pytest.FixtureRequest) -> tuple[int, tuple[str, ...], Recipe]:
    """The undisturbed run; alone it runs here, so that those that are forked find everything loaded."""
    world, overrides = request.param
    plan = small(recipe, f"whole{world}", *overrides)
    if world == 1:
        train(plan)
    else:
        assert finish(plan, world) == [0] * world
    return world, overrides, plan


def assert_all_readable(checkpoints: Path) -> None:
    """Whatever has the name of a checkpoint is one, to the last byte."""
    for path in step_folders(checkpoints):
        open_checkpoint(path).verify(deep=True)


@pytest.mark.timeout(3000)
def test_killed_anywhere_every_run_on_stored_data_ends_as_the_undisturbed_one(
    recipe: Path, whole: tuple[int, tuple[str, ...], Recipe]
) -> None:
    world, overrides, undisturbed = whole
    hit: Counter[str] = Counter()
    run = 0
    while sum(hit.values()) < KILLS // 2:
        run += 1
        plan = small(recipe, f"killed{world}-{run}", *overrides)
        draw = random.Random(f"{SEED} {world} {run}")
        told = f"HEADWAY_DRILL_SEED={SEED}, {world} ranks, run {run}, killed in {dict(hit)}"
        for _ in range(min(KILLS_OF_A_RUN, KILLS // 2 - sum(hit.values()))):
            killed_at = kill_somewhere(plan, world, draw)
            if killed_at is None:
                break
            hit[killed_at] += 1
            assert_all_readable(plan.run.folder / "checkpoints")
        assert finish(plan, world) == [0] * world, told
        assert_all_readable(plan.run.folder / "checkpoints")
        try:
            assert_same_run(undisturbed.run.folder, plan.run.folder, STEPS)
        except AssertionError as difference:
            raise AssertionError(told) from difference
    print(f"seed {SEED}, {world} ranks: {sum(hit.values())} kills in {run} runs, in {dict(hit)}")  # noqa: T201
    assert KILLS < 100 or {"save", "validate", "step"} <= set(hit), (
        f"too few places were hit: {dict(hit)}"
    )


@pytest.mark.timeout(3000)
def test_asked_to_stop_at_any_moment_a_run_leaves_in_time_with_a_loadable_checkpoint(
    recipe: Path, whole: tuple[int, tuple[str, ...], Recipe]
) -> None:
    world, overrides, _ = whole
    for number in range(-(-TERMS // 2)):
        draw = random.Random(f"{SEED} {world} stop {number}")
        plan = small(recipe, f"stopped{world}-{number}", *overrides)
        sent = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        told = f"HEADWAY_DRILL_SEED={SEED}, {world} ranks, stop {number}, {sent.name}"
        with started(plan, world) as attempt:
            while not attempt.has_begun():
                time.sleep(0.001)
            time.sleep(draw.uniform(0, 1))
            for rank in attempt.ranks:
                if rank.is_alive():
                    os.kill(rank.pid or 0, sent)
            asked = time.monotonic()
            while attempt.is_alive():
                assert time.monotonic() - asked < 30, f"{told}: it does not leave"
                time.sleep(0.002)
        assert set(attempt.codes) in ({128 + sent}, {0}), f"{told}: {attempt.codes}"
        if not (plan.run.folder / "metrics.jsonl").exists():
            continue  # stopped before the first step: there is nothing to save
        done = len(read_metrics(plan.run.folder / "metrics.jsonl"))
        newest = step_folders(plan.run.folder / "checkpoints")[-1]
        open_checkpoint(newest).verify(deep=True)
        assert newest.name == f"step-{done:08}", told
