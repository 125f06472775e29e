"""The messages of a pipeline: every one is sent and received once, and no order of waiting is a circle, however slow messages are."""

from collections import Counter

import pytest

from headway.parallel.pipeline.program import (
    Message,
    PipelineShape,
    Program,
    forward_programs,
    training_programs,
)
from headway.parallel.pipeline_order import PipelineAction, ScheduleName

CASES: list[tuple[ScheduleName, int]] = [
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("zero_bubble", 1),
    ("zero_bubble", 2),
]


def run_with_blocking_messages(programs: list[Program]) -> set[PipelineAction]:
    """Run programs in which a message ends only when both ranks are there, and a rank does nothing meanwhile: the hardest case."""
    next_actions = [0] * len(programs)
    done = set[PipelineAction]()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if next_actions[rank] == len(program):
                continue
            step = program[next_actions[rank]]
            if isinstance(step, PipelineAction):
                done.add(step)
                next_actions[rank] = next_actions[rank] + 1
                moved = True
                continue
            other = programs[step.peer]
            meeting = (
                other[next_actions[step.peer]] if next_actions[step.peer] < len(other) else None
            )
            if meeting == Message(not step.is_sent, step.kind, step.stage, step.microbatch, rank):
                next_actions[rank] = next_actions[rank] + 1
                next_actions[step.peer] = next_actions[step.peer] + 1
                moved = True
    assert next_actions == [len(program) for program in programs], "some ranks wait for each other"
    return done


@pytest.mark.parametrize(("schedule", "virtual_stages"), CASES)
@pytest.mark.parametrize("pipeline", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 7, 8, 11])
def test_no_rank_waits_for_ever(
    schedule: ScheduleName, virtual_stages: int, pipeline: int, microbatches: int
) -> None:
    shape = PipelineShape(schedule, pipeline, virtual_stages)
    parts = 3 if schedule == "zero_bubble" else 2
    programs = training_programs(shape, microbatches)
    assert len(run_with_blocking_messages(programs)) == shape.stages * microbatches * parts
    between = (shape.stages - 1) * microbatches
    count = Counter(
        (step.kind, step.is_sent)
        for program in programs
        for step in program
        if isinstance(step, Message)
    )
    assert count == {(kind, sent): between for kind in "FB" for sent in (True, False)}
    assert (
        len(run_with_blocking_messages(forward_programs(shape, microbatches)))
        == shape.stages * microbatches
    )


@pytest.mark.parametrize(("schedule", "virtual_stages"), CASES)
def test_an_action_follows_what_it_reads(schedule: ScheduleName, virtual_stages: int) -> None:
    shape = PipelineShape(schedule, 3, virtual_stages)
    for program in training_programs(shape, 5):
        there: set[tuple[str, int, int]] = set()
        for step in program:
            if isinstance(step, Message):
                if not step.is_sent:
                    there.add((step.kind, step.stage, step.microbatch))
            elif step.kind == "F" and step.stage:
                assert ("F", step.stage, step.microbatch) in there
            elif step.kind in "BI" and step.stage + 1 < shape.stages:
                assert ("B", step.stage, step.microbatch) in there


def test_no_gradient_goes_below_the_first_stage_that_trains() -> None:
    programs = training_programs(PipelineShape("1f1b", 4, first_trained=2), 4)
    gradients = {
        step.stage
        for program in programs
        for step in program
        if isinstance(step, Message) and step.kind == "B"
    }
    assert gradients == {2}
