"""A training process killed with SIGKILL while it sends: started again, what was under way goes on and the store ends complete.

`make test` kills between the parts of a large file, `make drill` at every request that changes the store, and takes it away for a minute.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.killed_runs import finish, started
from support.runs import assert_same_run, make_stores, write_recipe
from support.s3_server import Store, serve_s3

from headway.checkpoint.load import newest_good, open_checkpoint, remote_folders
from headway.config.load import load
from headway.runtime import s3 as s3_module
from headway.runtime.paths import S3Path
from headway.runtime.s3 import S3
from headway.train import train
from headway.train.config import Recipe

STEPS = 4
PLACE = S3Path("bucket", "runs/run")
SETTINGS = [
    f"steps={STEPS}", "model.vocab_size=8192", "model.hidden_size=64", "model.num_layers=1", "eval.every=2",
    "checkpoint.every=2", "checkpoint.keep_last=1",    "checkpoint.keep_best=1",
]  # fmt: skip
"""Checkpoints of 7 MB: two parts."""
TO_S3 = ["checkpoint.to=s3://bucket/runs", "checkpoint.retry_seconds=20"]
CHANGES = ("PUT", "POST", "DELETE")


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(s3_module, "PART_BYTES", 5 << 20)
    monkeypatch.setattr(s3_module, "THREADS", 1)
    monkeypatch.setattr(s3_module, "FIRST_PAUSE_SECONDS", 0.1)
    with serve_s3(monkeypatch) as running:
        yield running


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that never heard of S3."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = load(Recipe, write_recipe(folder, make_stores(folder), name="whole"), SETTINGS)
    train(recipe)
    return recipe.run.folder


def plan_of(whole: Path, folder: Path, *more: str) -> Recipe:
    home = whole.parent.parent
    return load(
        Recipe,
        write_recipe(folder, [home / "store0", home / "store1"], name="run"),
        [*SETTINGS, *TO_S3, *more],
    )


@contextmanager
def own_connections(rank: int) -> Iterator[None]:
    """A forked process must not talk over its parent's lines."""
    s3_module._client.cache_clear()
    yield


def kill_at(store: Store, plan: Recipe, is_due: Callable[[str, str], bool]) -> bool:
    """Kill the training process when a request is due, which never arrives; whether there was one."""
    fallen = threading.Event()
    with started(plan, 1, own_connections) as attempt:

        def fault(method: str, path: str) -> int | None:
            if not fallen.is_set() and is_due(method, path):
                fallen.set()
                attempt.ranks[0].kill()
            return -1 if fallen.is_set() else None

        store.fault = fault
        attempt.ranks[0].join(120)
    store.fault = lambda method, path: None
    assert attempt.codes == [-signal.SIGKILL if fallen.is_set() else 0]
    return fallen.is_set()


def assert_store_is_whole(whole: Path, folder: Path) -> None:
    """What is in the store is what the undisturbed run has on its disk, every byte of it verified; nothing is left half sent."""
    assert newest_good(PLACE).path == PLACE / f"step-{STEPS:08}"
    for remote_folder in remote_folders(PLACE)[:-1]:
        open_checkpoint(remote_folder).verify(deep=True)
    with (
        open_checkpoint(PLACE / f"step-{STEPS:08}") as ours,
        open_checkpoint(whole / "checkpoints" / f"step-{STEPS:08}") as expected,
    ):
        for name in expected.names():
            assert all(
                torch.equal(ours.read(name, role), expected.read(name, role))
                for role in expected.roles(name)
            ), name
    assert_same_run(whole, folder / "runs" / "run", STEPS)
    assert S3().abort_uploads(PLACE) == 0


def test_an_upload_killed_with_its_process_goes_on_after_the_next_start(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    first = f"step-{STEPS:08}/rank-00000.safetensors"
    arrived: list[str] = []

    def after_one_part(method: str, path: str) -> bool:
        if method == "PUT" and first in path and "partNumber" in path:
            arrived.append(path)
        return len(arrived) == 2

    # of several saves only the newest would be sent
    plan = plan_of(whole, tmp_path, "checkpoint.every=null")
    assert kill_at(store, plan, after_one_part)
    assert newest_good(PLACE).path is None, "half of it is no checkpoint"
    assert finish(plan, 1, around=own_connections) == [0]
    assert_store_is_whole(whole, tmp_path)
    sent = [(method, path.partition("?")[2]) for method, path in store.requests if first in path]
    assert sum(method == "POST" and "uploads" in query for method, query in sent) == 1, (
        "the upload that was cut off went on"
    )
    assert [
        sum(method == "PUT" and f"partNumber={part}&" in query + "&" for method, query in sent)
        for part in (1, 2)
    ] == [1, 2]


@pytest.mark.drill
@pytest.mark.timeout(3000)
def test_killed_at_every_request_the_store_ends_whole(
    store: Store, whole: Path, tmp_path: Path
) -> None:
    killed = 0
    number = 0
    goes_on = True
    while goes_on:
        folder = tmp_path / str(number)
        folder.mkdir()
        S3().remove(PLACE, S3().sizes(PLACE))
        S3().abort_uploads(PLACE)
        seen: list[str] = []

        def is_due(method: str, path: str, number: int = number, seen: list[str] = seen) -> bool:
            if method in CHANGES:
                seen.append(path)
            return len(seen) > number

        plan = plan_of(whole, folder)
        goes_on = kill_at(store, plan, is_due)
        killed += goes_on
        for remote_folder in remote_folders(PLACE):
            open_checkpoint(remote_folder).verify(deep=True)
        assert finish(plan, 1, around=own_connections) == [0], f"killed at request {number}"
        assert_store_is_whole(whole, folder)
        number += 1
    print(f"killed at {killed} requests that change the store")  # noqa: T201
    assert killed > 12


def down_for(seconds: float, store: Store, recipe: Recipe) -> tuple[int, int]:
    """A store that answers 503 from step 1 on, for so long and until it was asked twice: the steps done meanwhile, the requests refused."""
    refused = list[str]()
    done = [0]
    since = [0.0]

    def is_down() -> bool:
        return done[0] > 0 and (
            done[0] < 3 or len(refused) < 2 or time.monotonic() < since[0] + seconds
        )

    def fault(method: str, path: str) -> int | None:
        if not is_down():
            return None
        refused.append(path)
        return 503

    def probe(run: Any) -> Any:
        def after_step(step: int) -> None:
            since[0] = since[0] or time.monotonic()
            done[0] += step == 1 or is_down()

        run.on_step(after_step)
        return nullcontext()

    store.fault = fault
    train(recipe, hook=probe)
    assert time.monotonic() > since[0] + seconds
    return done[0], len(refused)


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.drill)])
def test_a_store_that_is_down_stops_no_training_is_told_and_gets_everything_afterwards(
    store: Store, whole: Path, tmp_path: Path, seconds: float
) -> None:
    told = tmp_path / "told.jsonl"
    script = tmp_path / "tell.sh"
    script.write_text(f"#!/bin/sh\ncat >> {told}; echo >> {told}\n")
    script.chmod(0o755)
    alert = f"track=[{{kind: alert, form: command, command: [{script}], events: [save_failure], every_seconds: 0}}]"
    steps, refused = down_for(
        seconds,
        store,
        plan_of(whole, tmp_path, alert, f"checkpoint.retry_seconds={20 + 4 * seconds}"),
    )
    assert steps >= 3, "training went on"
    assert refused < 12 + seconds, "it is asked again, and not hammered"
    assert_store_is_whole(whole, tmp_path)
    first, *more = (json.loads(line)["text"] for line in told.read_text().splitlines())
    assert "503" in first
    assert "trying again for up to" in first
    assert all(
        "was not uploaded" in message and "Training continues" in message for message in more
    )
