"""Layers on several ranks: every schedule trains as one process does, alone and with every other axis."""

from __future__ import annotations

import functools
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine
from support.layout_trials import DRILL_STEPS, compare, train_some, trial
from support.pipeline_trials import (
    DEEP,
    GATES,
    INTERLEAVED,
    TWO,
    more_pipeline_trials,
    pipeline_trials,
)
from support.ranks import run_ranks, start_processes
from support.runs import make_stores, write_recipe

from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import Writers, save_checkpoint
from headway.config.load import load
from headway.errors import CommunicationError, ParallelError
from headway.parallel.collectives import RankGroup
from headway.parallel.config import ParallelConfig
from headway.parallel.pipeline_order import pipeline_actions
from headway.tasks.next_token import Config as NextToken
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe


def test_ranks_with_stages_train_like_one_process() -> None:
    sys.stdout.write("\n" + "\n".join(compare(pipeline_trials())) + "\n")


@pytest.mark.drill
def test_ranks_with_stages_train_like_one_process_in_more_cases() -> None:
    sys.stdout.write("\n" + "\n".join(compare(more_pipeline_trials(), steps=DRILL_STEPS)) + "\n")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"strategy": "fsdp", **TWO},
            "which shards every layer over all ranks. Use strategy zero1, or pipeline 1",
        ),
        ({"pipeline": 8}, "every stage needs a layer, and the model has 5. Use pipeline 5"),
        (
            {"pipeline": 3, "schedule": "interleaved"},
            "pipeline is 3 with 2 stages each; every stage needs a layer, .* Use pipeline 2",
        ),
        (
            {**TWO, "virtual_stages": 2},
            "schedule is 1f1b, which has one stage per rank. Use schedule interleaved",
        ),
        (
            {**TWO, "pipeline_split": (3, 3)},
            "must have 2 numbers, one per stage, at least 1 each, whose sum is num_layers=5",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused_with_the_rule(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ParallelError, match=message):
        ParallelConfig.model_validate(settings).check_rows(DEEP, 16, NextToken(), None)


MOVES: list[tuple[int, dict[str, Any]]] = [
    (4, {"zero1": {"size": "auto"}}),
    (4, {"pipeline": 2, "tensor": 2}),
    (2, {"strategy": "fsdp"}),
    (4, {**INTERLEAVED, "zero1": {"size": "auto"}}),
    (1, {}),
]
"""(ranks, layout), each for two steps."""


def two_steps(folder: Path, index: int, parallel: dict[str, Any], group: RankGroup) -> list[float]:
    """Two steps from the checkpoint that the layout before has left; then the next one."""
    gated_trial = trial(
        "", group.size, parallel, config=GATES["config"], objective=GATES["objective"], micro=4
    )
    engine = make_engine(group, gated_trial.setup)
    if index:
        with open_checkpoint(folder / f"step-{2 * index:08}") as reader:
            engine.load(reader.read, reader.scalars["engine"])  # pyright: ignore[reportArgumentType]
    losses, _ = train_some(gated_trial, engine, range(2 * index, 2 * index + 2))
    records = engine.tensors()
    scalars = {"engine": engine.scalars()}
    save_checkpoint(
        folder, 2 * index + 2, records, scalars, None, Writers(group.rank, group.size, group.gather)
    )
    return losses


@pytest.mark.slow  # the tensor axis moves in test_tensor.py
def test_a_run_moves_from_layout_to_layout_with_the_losses_of_one_process(tmp_path: Path) -> None:
    """A tied embedding and gates, which several stages hold, are saved once; the optimizer's state moves with them."""
    right: list[float] = []
    for index in range(len(MOVES)):
        right += two_steps(tmp_path / "alone", index, {}, RankGroup())
    for index, (world, parallel) in enumerate(MOVES):
        for losses in run_ranks(
            functools.partial(two_steps, tmp_path / "moved", index, parallel), world
        ):
            assert losses == pytest.approx(right[2 * index : 2 * index + 2], rel=1e-5), parallel


def executed(shape: dict[str, Any], group: RankGroup) -> tuple[list[str], int, list[float]]:
    """The actions of a step as they ran, the most microbatches in flight, and the moments between actions."""
    deep_trial = trial("", group.size, shape, config=DEEP, micro=8)
    engine = make_engine(group, deep_trial.setup)
    engine.runner.trace = []
    train_some(deep_trial, engine, range(2))
    trace = engine.runner.trace
    flying = peak = 0
    for ran in trace:
        flying += {"F": 1, "B": -1, "I": -1, "W": 0}[ran.action.kind]
        peak = max(peak, flying)
    moments = [moment for ran in trace for moment in (ran.begin.host, ran.end.host)]
    return [str(ran.action) for ran in trace], peak, moments


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("1f1b", [4, 3, 2, 1]), ("zero_bubble", [4, 3, 2, 1])]
)
def test_ranks_run_the_planned_order_with_the_planned_microbatches_in_flight(
    schedule: Any, in_flight: list[int]
) -> None:
    orders = run_ranks(functools.partial(executed, {"pipeline": 4, "schedule": schedule}), 4)
    planned = pipeline_actions(schedule, 4, 8)
    assert [order for order, _, _ in orders] == [
        [str(action) for action in actions] for actions in planned
    ]
    assert [peak for _, peak, _ in orders] == in_flight
    for _, _, moments in orders:
        assert moments == sorted(moments), "actions of one rank do not overlap"


def test_a_rank_that_stops_is_named_with_the_axis_and_the_exchange(tmp_path: Path) -> None:
    overrides = ["parallel.pipeline=2", "parallel.timeout_seconds=1.5"]
    recipe = load(Recipe, write_recipe(tmp_path, make_stores(tmp_path), steps=8), overrides)

    @contextmanager
    def probe(run: Any) -> Iterator[None]:
        def stall(*_: object) -> None:
            if run.process.rank == 1 and run.state.step == 2:
                time.sleep(3)

        next(iter(run.engine.model.blocks().values())).register_forward_pre_hook(stall)
        yield

    def work() -> str:
        try:
            train(recipe, hook=probe)
        except CommunicationError as error:
            return str(error)
        return "done"

    said = start_processes(work, 2)
    assert (
        said[0].startswith("rank 0 waited ")
        and "of gradients from rank 1 of 2 pipeline ranks (exchange " in said[0]
    ), said[0]
    assert "rank 1" in said[0].partition("The others")[2], said[0]


@pytest.mark.drill
def test_a_run_killed_on_stages_and_tensor_ranks_resumes_on_other_layouts_with_the_same_losses(
    tmp_path: Path,
) -> None:
    """Killed without warning after its checkpoint of step 2, on tensor 2 x pipeline 2; resumed on four data ranks and on one process."""
    stores = make_stores(tmp_path)
    shared = ["checkpoint.every=2", "data.workers=0", "model.dropout=0", "batch.micro_rows=1"]
    whole = load(Recipe, write_recipe(tmp_path, stores, name="whole", steps=5), shared)
    train(whole)
    right = {
        record["step"]: record["loss"]
        for record in read_metrics(whole.run.folder / "metrics.jsonl")
    }
    path = write_recipe(tmp_path, stores, name="killed", steps=5)
    killed = load(
        Recipe,
        path,
        [*shared, "parallel.tensor=2", "parallel.pipeline=2", "parallel.schedule=zero_bubble"],
    )

    @contextmanager
    def kill(run: Any) -> Iterator[None]:
        def after(step: int) -> None:
            if step == 3:
                run.saver.wait_for_save()
                run.ranks.world.barrier()
                os._exit(0)

        run.on_step(after)
        yield

    with pytest.raises((FileNotFoundError, AssertionError)):
        # some end without a result, others lose them
        start_processes(lambda: train(killed, hook=kill), 4)
    assert [
        folder.name for folder in sorted((killed.run.folder / "checkpoints").glob("step-*"))
    ] == ["step-00000002"]
    shutil.copytree(killed.run.folder, tmp_path / "kept", symlinks=True)
    for world in (4, 1):
        shutil.rmtree(killed.run.folder)
        shutil.copytree(tmp_path / "kept", killed.run.folder, symlinks=True)
        resumed = load(Recipe, path, shared)
        start_processes(lambda resumed=resumed: train(resumed), world) if world > 1 else train(
            resumed
        )
        got = {
            record["step"]: record["loss"]
            for record in read_metrics(resumed.run.folder / "metrics.jsonl")
        }
        assert got == pytest.approx(right, rel=1e-5), f"{world} ranks"
