"""A real SIGKILL at the n-th change of the file system of a whole run: started again it ends as the undisturbed one.

`make test` kills at a few calls, `make drill` at every one: in all saves, in the metrics, in the links, in the export at the end.
"""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.crash_at_write import killed_at
from support.killed_runs import Around, finish, small
from support.runs import assert_same_run, make_stores, write_recipe

from headway.checkpoint.load import open_checkpoint, step_folders
from headway.train import train
from headway.train.config import Recipe

STEPS = 5
SHORT = (f"steps={STEPS}", "checkpoint.keep_last=1", "checkpoint.snapshot_every=3")
NEVER = 10**9


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calls")
    return write_recipe(folder, make_stores(folder, documents=24), name="calls")


def dying(folder: Path, call: int) -> Around:
    """Around the first rank: it is killed at its n-th call; one that gets past all of them leaves how many there were."""

    @contextmanager
    def around(rank: int) -> Iterator[None]:
        if rank:
            yield
            return
        with killed_at(
            call, folder, die=lambda event: os.kill(os.getpid(), signal.SIGKILL)
        ) as calls:
            yield
        (folder.parent / f"{folder.name}.calls").write_text("\n".join(calls))

    return around


def undisturbed(recipe: Path, world: int, *more: str) -> tuple[Recipe, list[str]]:
    """A whole run, and its calls."""
    plan = small(recipe, f"whole{world}{''.join(more)}", *SHORT, *more)
    if world == 1:
        # here, so that the processes that are forked find everything loaded
        train(small(recipe, "loaded", *SHORT))
    assert finish(plan, world, around=dying(plan.run.folder, NEVER)) == [0] * world
    return plan, Path(f"{plan.run.folder}.calls").read_text().splitlines()


def kill_at(recipe: Path, world: int, whole: Recipe, call: int, *more: str) -> bool:
    """Kill, look at what is left, go on, compare; whether there was such a call."""
    plan = small(recipe, f"killed{world}-{call}{''.join(more)}", *SHORT, *more)
    codes = finish(plan, world, around=dying(plan.run.folder, call))
    assert codes[0] in (0, -signal.SIGKILL), codes
    for path in step_folders(plan.run.folder / "checkpoints"):
        open_checkpoint(path).verify(deep=True)
    assert finish(plan, world) == [0] * world, f"call {call}"
    for path in step_folders(plan.run.folder / "checkpoints"):
        open_checkpoint(path).verify(deep=True)
    assert_same_run(whole.run.folder, plan.run.folder, STEPS)
    expected = load_file(whole.run.folder / "final" / "model.safetensors")
    weights = load_file(plan.run.folder / "final" / "model.safetensors")
    assert expected.keys() == weights.keys()
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
    return codes[0] != 0


def test_killed_at_some_call_a_run_ends_as_the_undisturbed_one(recipe: Path) -> None:
    whole, calls = undisturbed(recipe, 1)
    for part in (0.4, 0.6):
        assert kill_at(recipe, 1, whole, int(part * len(calls)))


@pytest.mark.drill
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("world", "stride", "more"),
    [(1, 1, ()), (1, 1, ("checkpoint.async=false",)), (2, 5, ())],
    ids=["beside training", "in its way", "2 ranks, every fifth"],
)
def test_killed_at_every_call_a_run_ends_as_the_undisturbed_one(
    recipe: Path, world: int, stride: int, more: tuple[str, ...]
) -> None:
    whole, calls = undisturbed(recipe, world, *more)
    killed = sum(
        kill_at(recipe, world, whole, call, *more) for call in range(0, len(calls), stride)
    )
    print(f"{world} ranks {more}: killed at {killed} of {len(calls)} calls: {dict(Counter(calls))}")  # noqa: T201
    assert killed >= 0.9 * len(calls) / stride, "the number of calls varies little"
