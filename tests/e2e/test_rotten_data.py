"""A bit that a disk loses, with size, times and inode as they were, is never trained on without a word."""

import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.disk_bit_flip import flip_bit_on_disk
from support.ranks import start_processes
from support.runs import assert_same_run, headway, write_recipe

from headway.config.load import load
from headway.errors import GaveUpError
from headway.parallel.collectives import RankGroup, form_groups
from headway.store import checksums
from headway.store.writer import StoreWriter
from headway.train import loop, session
from headway.train.config import Recipe
from headway.train.data_check import DataCheck

STEPS = 14
FOUND_AT = 11
"""The step after which the damage is found."""


@pytest.fixture
def stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two stores of several shards, whose checksums are remembered as soon as they are known."""
    monkeypatch.setattr(checksums, "SETTLED_SECONDS", -1.0)
    paths = []
    for number in range(2):
        rng = np.random.default_rng(number)
        paths.append(tmp_path / f"store{number}")
        with StoreWriter(
            paths[-1], dtype="uint16", tokenizer_fingerprint=None, shard_tokens=700
        ) as writer:
            for _ in range(60):
                writer.add(rng.integers(0, 64, rng.integers(20, 60)).astype(np.uint16))
            writer.finish()
    return paths


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores count as large, and are hashed after FOUND_AT steps; the step after them waits until the damage is found."""
    monkeypatch.setattr(checksums, "AT_START_BYTES", -1)
    begin = DataCheck.begin
    train_step: Callable[..., None] = loop.train_step

    def watched(self: DataCheck) -> None:
        self._checksums.is_watched = True  # pyright: ignore[reportPrivateUsage]

    def gated(run: Any, **options: Any) -> None:
        train_step(run, **options)
        if run.state.step == FOUND_AT:
            begin(run.data_check)
            while (
                run.process.is_first
                and not run.data_check.is_damaged
                and run.data.checksums.waiting
            ):
                time.sleep(0.002)

    monkeypatch.setattr(DataCheck, "begin", watched)
    monkeypatch.setattr(loop, "train_step", gated)


def first_read(recipe: Path, store: Path, shard: int) -> list[int]:
    """The steps that read from a shard, seen in what the loader yields: every row of it is searched for in the shard's documents."""
    from headway.train.batches import make_loader, open_run_data
    from headway.train.resolve import resolve

    loaded = load(Recipe, recipe)
    data = open_run_data(resolve(loaded))
    number = next(
        n for n, source in enumerate(data.train) if source.selection.source.name == str(store)
    )
    opened: Any = data.train[number].selection.source
    first = sum(part.documents for part in opened.manifest.shards[:shard])
    texts = [
        opened.document(n) for n in range(first, first + opened.manifest.shards[shard].documents)
    ]
    ranks = form_groups(loaded.parallel.mesh(0, 1), RankGroup())
    steps = []
    with make_loader(
        loaded, data, loaded.batch.resolve(loaded.data.seq_len, 1), None, ranks
    ) as loader:
        for step in range(1, FOUND_AT + 1):
            batch, _ = next(loader)
            rows = [
                row
                for microbatch in batch.microbatches
                for row, source in zip(
                    microbatch.tokens.numpy(), microbatch.source.tolist(), strict=True
                )
                if source == number
            ]
            if any(_is_inside(text, row) for row in rows for text in texts):
                steps.append(step)
    return steps


def _is_inside(text: Any, row: Any) -> bool:
    """Whether a document's tokens stand in a row; documents are random, so no other one has them."""
    places = np.flatnonzero(row[: len(row) - len(text) + 1] == text[0])
    return any(np.array_equal(row[start : start + len(text)], text) for start in places)


def test_a_small_store_is_hashed_at_every_start(tmp_path: Path, stores: list[Path]) -> None:
    recipe = write_recipe(tmp_path, stores, steps=2)
    cache = tmp_path / "runs" / "cache"
    assert headway("train", str(recipe)).returncode == 0
    assert list((cache / "checksums").iterdir())
    flip_bit_on_disk(stores[0] / "tokens-00001.bin", 77, cache)
    refused = headway("train", str(recipe), "run.name=again")
    assert refused.returncode == 2
    assert f"{stores[0]}/tokens-00001.bin: damaged: its checksum differs" in refused.stderr
    assert not (tmp_path / "runs" / "again").exists()
    flip_bit_on_disk(stores[0] / "tokens-00001.bin", 77, cache)
    assert headway("train", str(recipe), "run.name=again").returncode == 0


def test_damage_found_late_names_the_steps_and_going_back_gives_the_undisturbed_run(
    tmp_path: Path, stores: list[Path], late: None
) -> None:
    recipe = write_recipe(tmp_path, stores, steps=STEPS)
    whole = write_recipe(tmp_path, stores, name="whole", steps=STEPS)
    done = headway("train", str(whole), "checkpoint.keep_last=10", "checkpoint.every=2")
    assert done.returncode == 0, done.stderr
    # A shard whose first reader comes after the first checkpoints.
    readers = {shard: first_read(recipe, stores[1], shard) for shard in range(3)}
    shard = max(readers, key=lambda path: readers[path][0])
    steps = readers[shard]
    assert 2 < steps[0] <= FOUND_AT
    damaged = stores[1] / f"tokens-{shard:05}.bin"
    flip_bit_on_disk(damaged, 40, tmp_path / "runs" / "cache")
    stopped = headway("train", str(recipe), "checkpoint.keep_last=10", "checkpoint.every=2")
    flip_bit_on_disk(damaged, 40)
    assert stopped.returncode == 3, stopped.stderr
    said = stopped.stderr
    assert f"{damaged}: damaged" in said
    assert f"The run stops after step {FOUND_AT}" in said
    assert (
        f"{len(steps)} steps have read from it, the first is {steps[0]}, the last {steps[-1]}"
        in said
    )
    run = tmp_path / "runs" / "run"
    before = max(step for step in range(2, FOUND_AT, 2) if step < steps[0])
    command = re.search(r"`headway (train [^`]+)`", said)
    assert command is not None
    assert command.group(1).endswith(f"--resume {run}/checkpoints/step-{before:08}")
    again = headway(*shlex.split(command.group(1)))
    assert again.returncode == 0, again.stderr
    assert_same_run(run, tmp_path / "runs" / "whole", STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("docs-00000.idx", "Steps 1 to 11 may have read from it"),
        ("valid", "No step has trained on"),
    ],
)
def test_what_cannot_be_known_counts_as_read_and_validation_does_not(
    tmp_path: Path, stores: list[Path], late: None, file: str, said: str
) -> None:
    recipe = write_recipe(tmp_path, stores, steps=STEPS)
    sets = f"data.valid={{sets: {{other: [{stores[1]}]}}}}"
    settings = [str(recipe), f"data.train=[{stores[0]}]", sets, "eval.every=20"]
    assert headway("train", *settings, "run.name=before").returncode == 0
    damaged = stores[1] / "tokens-00000.bin" if file == "valid" else stores[0] / file
    flip_bit_on_disk(damaged, 5 * 64, tmp_path / "runs" / "cache")
    stopped = headway("train", *settings)
    assert stopped.returncode == 3, stopped.stderr
    assert f"{damaged}: damaged" in stopped.stderr
    assert said in stopped.stderr


@pytest.mark.slow
def test_all_ranks_stop_together(tmp_path: Path, stores: list[Path], late: None) -> None:
    recipe = load(Recipe, write_recipe(tmp_path, stores, steps=STEPS))
    session.run_recipe(
        recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": "before"})})
    )
    flip_bit_on_disk(stores[0] / "tokens-00000.bin", 5, tmp_path / "runs" / "cache")

    def train() -> str:
        with pytest.raises(GaveUpError) as stopped:
            session.run_recipe(recipe)
        return str(stopped.value)

    lines = start_processes(train, 2)
    assert lines[0] == lines[1]
    assert f"The run stops after step {FOUND_AT}" in lines[0]
