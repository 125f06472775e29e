"""What a rank of a pipeline runs, with every message.

Lists of actions come in, one program per rank goes out.

Imports without torch.

    actions of rank 0   F0 F1 B0 ...
    program of rank 0   F0 send(F0 -> 1) F1 send(F1 -> 1) receive(B0 <- 1) B0 ...

All messages of a pipeline have one order: that in which the actions which produce them begin if
each action takes its usual time. Every rank begins its part of the messages in this order. An
action follows the messages it reads and precedes the one it writes. So even if each message blocked
both ranks until both are there, as NCCL may do, some rank could always continue: nobody waits for
ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from headway.parallel.pipeline_order import (
    ActionKind,
    PipelineAction,
    ScheduleName,
    pipeline_actions,
    round_size,
    stages_on,
)

USUAL: dict[ActionKind, float] = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
"""How long an action takes beside a forward, as far as the order of messages is concerned."""


@dataclass(frozen=True)
class Message:
    """A tensor between two ranks.

    Hidden states to the next stage (F), or their gradients to the stage before (B).
    """

    is_sent: bool
    """By this rank; else it receives."""
    kind: Literal["F", "B"]
    stage: int
    """The stage it goes to."""
    microbatch: int
    peer: int
    """The other rank of the pipeline group."""


Program = list[PipelineAction | Message]


@dataclass(frozen=True)
class PipelineShape:
    """What decides the programs of a pipeline, besides the number of microbatches."""

    schedule: ScheduleName
    pipeline: int
    virtual_stages: int = 1
    first_trained: int = 0
    """The first stage with anything to train: gradients go no further."""

    @property
    def stages(self) -> int:
        """The number of stages of the whole model."""
        return self.pipeline * self.virtual_stages

    def rank_of(self, stage: int) -> int:
        """The rank of the pipeline group that has a stage."""
        return stage % self.pipeline

    def sends_gradient(self, stage: int) -> bool:
        """Whether the gradient of a stage's input goes to the stage before."""
        return stage > self.first_trained


@cache
def training_programs(shape: PipelineShape, microbatches: int) -> list[Program]:
    """The programs of all ranks for forward and backward of every microbatch."""
    return add_messages(
        shape, pipeline_actions(shape.schedule, shape.pipeline, microbatches, shape.virtual_stages)
    )


@cache
def forward_programs(shape: PipelineShape, microbatches: int) -> list[Program]:
    """The programs of all ranks for forward alone."""
    # Rounds as in training: the second stage of a rank does not wait for all microbatches to pass
    # its first.
    size = microbatches
    if shape.virtual_stages > 1:
        size = round_size(shape.pipeline, microbatches)
    actions = [
        [
            PipelineAction(stage, "F", number)
            for start in range(0, microbatches, size)
            for stage in stages_on(rank, shape.pipeline, shape.virtual_stages)
            for number in range(start, start + size)
        ]
        for rank in range(shape.pipeline)
    ]
    return add_messages(shape, actions)


def add_messages(
    shape: PipelineShape, actions: Sequence[Sequence[PipelineAction]]
) -> list[Program]:
    """Programs from the actions of all ranks.

    Every message is sent right after the action that makes it, and received in one order.
    """
    programs: list[Program] = [[] for _ in actions]
    next_index = [0] * len(actions)
    # When each rank has finished its last action, in units of a forward.
    free_at = [0.0] * len(actions)
    finished: dict[PipelineAction, float] = {}

    def start_of(rank: int) -> float | None:
        """When the next action of a rank can begin; None: it waits for one that has not run."""
        start = free_at[rank]
        for needed in needed_by(shape, actions[rank][next_index[rank]]):
            if needed not in finished:
                return None
            start = max(start, finished[needed])
        return start

    # A simulation: always run the action that can begin first, the lower rank first among equals.
    while waiting := [
        rank for rank in range(len(actions)) if next_index[rank] < len(actions[rank])
    ]:
        ready = [(start, rank) for rank in waiting if (start := start_of(rank)) is not None]
        assert ready, "an order in which every rank waits for another"
        start, rank = min(ready)
        action = actions[rank][next_index[rank]]
        next_index[rank] += 1
        free_at[rank] = start + USUAL[action.kind]
        finished[action] = free_at[rank]
        programs[rank].append(action)

        # Both sides at once, so that the messages of two ranks have the same order on both.
        for message in _messages(shape, action):
            programs[rank].append(message)
            programs[message.peer].append(
                Message(False, message.kind, message.stage, message.microbatch, rank)
            )
    return programs


def needed_by(shape: PipelineShape, action: PipelineAction) -> list[PipelineAction]:
    """The actions that must be complete before this one."""
    stage = action.stage
    kind = action.kind
    number = action.microbatch
    if kind == "F" and stage == 0:
        return []
    if kind == "F":
        return [PipelineAction(stage - 1, "F", number)]
    if kind == "W":
        return [PipelineAction(stage, "I", number)]
    needed = [PipelineAction(stage, "F", number)]
    if stage + 1 < shape.stages:
        needed.append(PipelineAction(stage + 1, kind, number))
    return needed


def _messages(shape: PipelineShape, action: PipelineAction) -> list[Message]:
    """What the rank of an action sends after it; nothing if no stage waits for it."""
    stage = action.stage
    number = action.microbatch
    if action.kind == "F" and stage + 1 < shape.stages:
        return [Message(True, "F", stage + 1, number, shape.rank_of(stage + 1))]
    if action.kind in ("B", "I") and shape.sends_gradient(stage):
        return [Message(True, "B", stage - 1, number, shape.rank_of(stage - 1))]
    return []
