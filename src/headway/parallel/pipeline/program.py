"""What a rank of a pipeline runs, with every message: lists of actions come in, one program per rank goes out. Imports without torch.

    actions of rank 0   F0 F1 B0 ...
    program of rank 0   F0 send(F0 -> 1) F1 send(F1 -> 1) receive(B0 <- 1) B0 ...

All messages of a pipeline have one order: that in which the actions which produce them begin if each action takes its usual time. Every
rank begins its part of the messages in this order. An action follows the messages it reads and precedes the one it writes. So even if
each message blocked both ranks until both are there, as NCCL may do, some rank could always continue: nobody waits for ever.
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
    """A tensor between two ranks: hidden states to the next stage (F), or their gradients to the stage before (B)."""

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
        """Of the whole model."""
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
    size = microbatches if shape.virtual_stages == 1 else round_size(shape.pipeline, microbatches)
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
    """Programs from the actions of all ranks: every message is sent right after the action that makes it, and received in one order."""
    programs: list[Program] = [[] for _ in actions]
    at, free = [0] * len(actions), [0.0] * len(actions)
    done: dict[PipelineAction, float] = {}

    def start_of(rank: int) -> float | None:
        """When the next action of a rank can begin; None: it waits for one that has not run."""
        times = [done.get(needed) for needed in needed_by(shape, actions[rank][at[rank]])]
        return (
            None
            if None in times
            else max([free[rank], *(time for time in times if time is not None)])
        )

    while waiting := [rank for rank in range(len(actions)) if at[rank] < len(actions[rank])]:
        ready = [(start, rank) for rank in waiting if (start := start_of(rank)) is not None]
        assert ready, "an order in which every rank waits for another"
        start, rank = min(ready)
        action = actions[rank][at[rank]]
        at[rank] += 1
        done[action] = free[rank] = start + USUAL[action.kind]
        programs[rank].append(action)
        for message in _messages(shape, action):
            programs[rank].append(message)
            programs[message.peer].append(
                Message(False, message.kind, message.stage, message.microbatch, rank)
            )
    return programs


def needed_by(shape: PipelineShape, action: PipelineAction) -> list[PipelineAction]:
    """The actions that must be complete before this one."""
    stage, kind, number = action.stage, action.kind, action.microbatch
    if kind == "F":
        return [PipelineAction(stage - 1, "F", number)] if stage else []
    if kind == "W":
        return [PipelineAction(stage, "I", number)]
    after = [PipelineAction(stage + 1, kind, number)] if stage + 1 < shape.stages else []
    return [PipelineAction(stage, "F", number), *after]


def _messages(shape: PipelineShape, action: PipelineAction) -> list[Message]:
    stage, number = action.stage, action.microbatch
    if action.kind == "F" and stage + 1 < shape.stages:
        return [Message(True, "F", stage + 1, number, shape.rank_of(stage + 1))]
    if action.kind in ("B", "I") and shape.sends_gradient(stage):
        return [Message(True, "B", stage - 1, number, shape.rank_of(stage - 1))]
    return []
