"""The order of a pipeline's actions against torch's schedules, and that it can run at all."""

from typing import Any

import pytest
from torch.distributed.pipelining import schedules

from headway.parallel.pipeline_order import (
    PipelineAction,
    ScheduleName,
    pipeline_actions,
    round_size,
)

CASES: list[tuple[ScheduleName, int]] = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
]


def torch_actions(kind: Any, pipeline: int, microbatches: int, stages: int, rank: int) -> list[str]:
    schedule = object.__new__(kind)
    schedule.pp_group_size = pipeline
    schedule.n_local_stages = stages
    schedule._n_microbatches = microbatches
    schedule.microbatches_per_round = round_size(pipeline, microbatches)
    return [
        str(action)
        for action in schedule._calculate_single_rank_operations(rank)
        if action is not None
    ]


@pytest.mark.parametrize(
    ("schedule", "kind", "stages"),
    [
        ("interleaved", schedules.ScheduleInterleaved1F1B, 2),
        ("interleaved", schedules.ScheduleInterleaved1F1B, 3),
        ("zero_bubble", schedules.ScheduleInterleavedZeroBubble, 1),
        ("zero_bubble", schedules.ScheduleInterleavedZeroBubble, 2),
    ],
)
@pytest.mark.parametrize("pipeline", [2, 3, 4, 8])
def test_the_order_is_torchs(schedule: ScheduleName, kind: Any, stages: int, pipeline: int) -> None:
    for microbatches in range(pipeline, 4 * pipeline + 1):
        if microbatches % max(1, microbatches // pipeline):
            continue  # torch refuses rounds that differ
        for rank, actions in enumerate(pipeline_actions(schedule, pipeline, microbatches, stages)):
            assert [str(a) for a in actions] == torch_actions(
                kind, pipeline, microbatches, stages, rank
            ), (microbatches, rank)


def test_the_order_of_1f1b_is_that_written_by_hand() -> None:
    text = [
        " ".join(f"{a.kind}{a.microbatch}" for a in actions)
        for actions in pipeline_actions("1f1b", 3, 4)
    ]
    assert text == ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"]


@pytest.mark.parametrize(("schedule", "stages"), CASES)
@pytest.mark.parametrize("microbatches", [1, 3, 4, 7, 8, 9, 13])
def test_every_action_runs_once_and_no_rank_waits_for_ever(
    schedule: ScheduleName, stages: int, microbatches: int
) -> None:
    ranks = pipeline_actions(schedule, 4, microbatches, stages)
    last = 4 * stages - 1
    done = set[PipelineAction]()
    next_actions = [0] * 4

    def is_ready(action: PipelineAction) -> bool:
        stage = action.stage
        kind = action.kind
        number = action.microbatch
        if kind == "F":
            return stage == 0 or PipelineAction(stage - 1, "F", number) in done
        if kind == "W":
            return PipelineAction(stage, "I", number) in done
        before = (
            PipelineAction(stage, "F", number)
            if stage == last
            else PipelineAction(stage + 1, kind, number)
        )
        return before in done and PipelineAction(stage, "F", number) in done

    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(ranks):
            while next_actions[rank] < len(actions) and is_ready(actions[next_actions[rank]]):
                assert actions[next_actions[rank]] not in done
                done.add(actions[next_actions[rank]])
                next_actions[rank] = next_actions[rank] + 1
                moved = True
    assert len(done) == 4 * stages * microbatches * (3 if schedule == "zero_bubble" else 2)
