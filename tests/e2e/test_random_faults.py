"""System calls on a run's files fail at random (input/output errors, a full disk, no permission): a start may fail in one line, never
with a traceback, and the next clean start ends with the parameters and metrics of the undisturbed run.

HEADWAY_FAULTS sets the number of cases (`make drill` runs many), HEADWAY_FAULT_SEED the first seed.
"""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path

import pytest
from support import crash_at_write
from support.killed_runs import STEPS as SMALL_STEPS
from support.killed_runs import finish, small
from support.runs import assert_same_run, headway, make_stores, write_recipe

CASES = int(os.environ.get("HEADWAY_FAULTS", "2"))
FIRST = int(os.environ.get("HEADWAY_FAULT_SEED", "0"))
ERRORS = (
    errno.EIO,
    errno.ENOSPC,
    errno.EACCES,
    errno.EDQUOT,
    errno.EROFS,
    errno.ESTALE,
    errno.EMFILE,
)
STEPS = 12
LAST = ["checkpoint.every=3", f"steps={STEPS}"]
SPLIT = ("parallel.tensor=2", "parallel.pipeline=2", "model.num_layers=2", "model.num_kv_heads=2")


@contextmanager
def faults(folder: Path, seed: int, rate: float) -> Iterator[None]:
    """Processes forked inside the block: every call on a file below `folder` fails with this probability."""
    rng = random.Random(seed)
    here = str(folder)

    def on_event(event: str, arguments: tuple[object, ...]) -> None:
        if event in crash_at_write.EVENTS and here in str(arguments[:2]) and rng.random() < rate:
            code = rng.choice(ERRORS)
            raise OSError(code, os.strerror(code), str(arguments[0]))

    crash_at_write.watch = on_event
    try:
        yield
    finally:
        crash_at_write.watch = None


def rank_faults(folder: Path, seed: int, rate: float, rank: int) -> AbstractContextManager[None]:
    """The faults of one rank."""
    return faults(folder, seed + rank, rate)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """Stores, and the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    stores = make_stores(folder)
    assert headway("train", str(write_recipe(folder, stores)), *LAST).returncode == 0
    return folder / "runs" / "run", stores


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_faults_at_random_lose_nothing(
    whole: tuple[Path, list[Path]], tmp_path: Path, seed: int
) -> None:
    undisturbed, stores = whole
    recipe = write_recipe(tmp_path, stores)
    run = tmp_path / "runs" / "run"
    rng = random.Random(f"rates-{seed}")
    for start in range(2):
        with faults(tmp_path / "runs", 1000 * seed + start, rng.choice((0.002, 0.01, 0.03, 0.1))):
            done = headway("train", str(recipe), *LAST)
        assert "Traceback" not in done.stderr, done.stderr[-3000:]
        assert done.returncode in (0, 1, 2), done.stderr[-2000:]
    done = headway("train", str(recipe), *LAST)
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same_run(undisturbed, run, STEPS)


def test_where_every_call_fails_the_start_is_refused_in_one_line(
    whole: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, whole[1])
    with faults(tmp_path / "runs", 0, 1.0):
        done = headway("train", str(recipe), *LAST)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ")


@pytest.mark.drill
@pytest.mark.timeout(1800)
def test_faults_on_the_ranks_of_tensor_2_and_pipeline_2_lose_nothing(
    whole: tuple[Path, list[Path]], tmp_path: Path
) -> None:
    # Every rank has faults of its own; the first that fails ends the start, as the launcher would.
    recipe = write_recipe(tmp_path, whole[1], name="faults")
    undisturbed = small(recipe, "undisturbed", *SPLIT)
    assert finish(undisturbed, 4) == [0] * 4
    failed = 0
    for seed in range(FIRST, FIRST + CASES):
        plan = small(recipe, f"disturbed-{seed}", *SPLIT)
        rng = random.Random(f"rates-{seed}")
        for start in range(3):
            rate = rng.choice((0.002, 0.01, 0.03))
            around = partial(rank_faults, plan.run.folder, 1000 * seed + 10 * start, rate)
            codes = finish(plan, 4, around=around)
            failed += codes != [0] * 4
            for report in plan.run.folder.parent.glob("error-*.txt"):
                last = report.read_text().strip().splitlines()[-1]
                assert last.startswith("headway.errors."), report.read_text()
                report.unlink()
        assert finish(plan, 4) == [0] * 4, f"seed {seed}"
        assert_same_run(undisturbed.run.folder, plan.run.folder, SMALL_STEPS)
    assert failed, "no start was disturbed"
