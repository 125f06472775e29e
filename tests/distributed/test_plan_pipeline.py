"""The pipeline of `headway plan` against one that ran: order of actions, bubble, microbatches in flight and activations of four ranks."""

import time
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

import pytest
from support.batches import make_batch
from support.engines import Setup, make_engine
from support.live_bytes import LiveBytes
from support.ranks import run_ranks

from headway.data.batch import StepBatch, StepStats
from headway.model.config import ModelConfig
from headway.parallel.collectives import RankGroup
from headway.parallel.layouts import Layout
from headway.parallel.pipeline import runner
from headway.parallel.pipeline.program import PipelineShape, needed_by
from headway.parallel.pipeline_order import PipelineAction, ScheduleName
from headway.plan.job import PlanJob
from headway.plan.memory import estimate, moments
from headway.plan.rates import Software
from headway.plan.timeline import follow, in_flight
from headway.tasks.base import StepInfo

DEEP = ModelConfig(
    hidden_size=128,
    num_layers=8,
    num_heads=8,
    num_kv_heads=2,
    ffn_size=512,
    vocab_size=96,
    max_seq_len=256,
)
SCHEDULES: dict[ScheduleName, int] = {"1f1b": 1, "interleaved": 2, "zero_bubble": 1}
MICROBATCHES = 8
FORWARD = 0.02
BACKWARD = 0.04
"""Seconds that a stage takes at least: the ranks of the test share few cores, and sleeping takes none."""


def traced_step(
    group: RankGroup, schedule: str
) -> tuple[list[tuple[PipelineAction, float, float]], int]:
    """One step of four stages: its actions with begin and end, and the most bytes of activations after any forward."""
    engine = make_engine(
        group, Setup(config=DEEP, freeze=(), parallel={"pipeline": 4, "schedule": schedule})
    )
    forward_stage = engine.model.forward_stage
    back_propagate = runner._back_propagate
    parts = SCHEDULES[schedule]  # pyright: ignore[reportArgumentType]
    is_divided = schedule == "zero_bubble"
    peak = 0
    live = LiveBytes()
    standing = [tensor for buffer in engine.buffers for tensor in (buffer.param, *buffer.grads)]

    def forward(*arguments: Any) -> Any:
        nonlocal peak
        time.sleep(FORWARD / parts)
        out = forward_stage(*arguments)
        peak = max(peak, live.without(standing))
        return out

    def backward(root: Any, gradient: Any) -> None:
        time.sleep(BACKWARD / (2 if is_divided else parts))
        back_propagate(root, gradient)
        if is_divided:  # the other half is in W
            engine.runner.context.queue.kept.append(lambda: time.sleep(BACKWARD / 2))

    engine.model.forward_stage = forward
    runner._back_propagate = backward
    engine.runner.trace = []
    rows = tuple(
        make_batch([[256]], seq_len=256, vocab=96, seed=number) for number in range(MICROBATCHES)
    )
    step = StepBatch(rows, {"targets": 2048.0, "rows": 8.0}, StepStats(2048, 8, 256, 8, 8, 0))
    with live:
        engine.forward_backward(step, StepInfo(0, 10))
    runner._back_propagate = back_propagate
    return [(entry.action, entry.begin.host, entry.end.host) for entry in engine.runner.trace], peak


@pytest.mark.slow
def test_a_pipeline_runs_in_the_planned_order_with_the_planned_bubble_and_memory() -> None:
    def measure(group: RankGroup) -> dict[str, Any]:
        return {schedule: traced_step(group, schedule) for schedule in SCHEDULES}

    seen = run_ranks(measure, 4, timeout=120)
    for schedule, virtual in SCHEDULES.items():
        layout = Layout(4, pipeline=4, schedule=schedule, virtual_stages=virtual)
        job = PlanJob(
            DEEP, 256, 1, MICROBATCHES, layout, precision="fp32", software=Software(fusion="eager")
        )
        ranks = [traces[schedule][0] for traces in seen]
        assert [[action for action, _, _ in actions] for actions in ranks] == job.actions, schedule
        held = [in_flight([action for action, _, _ in actions]) for actions in ranks]
        assert held == job.held, schedule
        check_bubble(job, ranks)
        for rank, traces in enumerate(seen):
            check_activations(job, rank, traces[schedule][1])


def check_bubble(job: PlanJob, ranks: list[list[tuple[PipelineAction, float, float]]]) -> None:
    """The idle share of the run is that of the plan, given how long the run's actions took."""
    took = {action: end - begin for actions in ranks for action, begin, end in actions}
    layout = job.layout
    shape = PipelineShape(layout.schedule, layout.pipeline, layout.virtual_stages)
    planned = follow(shape, job.actions, took.__getitem__, message_seconds(shape, ranks))
    begin = min(action[1] for actions in ranks for action in actions)
    end = max(action[2] for actions in ranks for action in actions)
    idle = 1 - sum(action[2] - action[1] for actions in ranks for action in actions) / (
        len(ranks) * (end - begin)
    )
    busy = sum(action.end - action.start for action in planned.actions)
    bubble = 1 - busy / (planned.ranks * planned.seconds)
    assert idle == pytest.approx(bubble, abs=0.12), layout.schedule


def message_seconds(
    shape: PipelineShape, ranks: list[list[tuple[PipelineAction, float, float]]]
) -> float:
    """How long a message took here, with few cores for four ranks: from its sender's action to that of a rank that was waiting for it."""
    ended = {action: end for actions in ranks for action, _, end in actions}
    waits: list[float] = []
    for actions in ranks:
        for (_, _, free), (action, begin, _) in pairwise(actions):
            there = max(
                (
                    ended[earlier]
                    for earlier in needed_by(shape, action)
                    if earlier.stage != action.stage
                ),
                default=0.0,
            )
            if there > free:
                waits.append(begin - there)
    return mean(waits)


def check_activations(job: PlanJob, rank: int, peak: int) -> None:
    """After the forward with which a rank holds the most, its bytes are those of the plan; between I and W some are free already."""
    mine = job.memory_job(rank)
    working = moments(replace(mine, held_blocks=0.0))["block"]["activations"]
    planned = (
        moments(mine)["head"]["activations"]
        if mine.has_head
        else moments(mine)["block"]["activations"] - working
    )
    planned += estimate(mine).kinds["buffers"] - estimate(replace(mine, streams=0)).kinds["buffers"]
    assert peak == pytest.approx(
        planned, rel=0.06 if job.layout.schedule != "zero_bubble" else 0.18
    ), (
        job.layout.schedule,
        rank,
        peak / planned,
    )
