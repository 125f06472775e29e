"""What each rank of a pipeline does, and in which order.

Sizes come in; one list of actions per rank goes out. Imports without torch.

    F  forward of one microbatch through one pipeline stage       I  gradients of the stage's input
    B  the whole backward of it                                   W  gradients of its weights

    1f1b          S - 1 - rank forwards ahead, then one forward and one backward in turn, then the
                  backwards that are left (PipeDream-Flush, arXiv:2006.09503)
    interleaved   a rank has several stages (rank, rank + S, ...); a round of microbatches passes
                  one of them, then the next (Megatron, arXiv:2104.04473)
    zero_bubble   as interleaved, with B divided into I and W: W fills the time in which a rank
                  would wait (arXiv:2401.10241)

`stages_on` and `pipeline_actions` are the one source of this order: the engine runs it, `headway
plan` computes with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["1f1b", "interleaved", "zero_bubble"]
ActionKind = Literal["F", "B", "I", "W"]


@dataclass(frozen=True)
class PipelineAction:
    """One piece of work: a microbatch on a pipeline stage."""

    stage: int
    kind: ActionKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


def stages_on(rank: int, pipeline: int, virtual_stages: int = 1) -> list[int]:
    """The pipeline stages of a rank, in the order of the model."""
    return [rank + pipeline * index for index in range(virtual_stages)]


def round_size(pipeline: int, microbatches: int) -> int:
    """Microbatches that pass one stage of a rank before its next stage has its turn.

    The number is the same in every round, and at least one per rank.

    A multiple of the number of ranks needs the least memory; a prime number of microbatches makes
    one round.
    """
    # The most rounds of equal size, each with at least as many microbatches as ranks.
    rounds = max(1, microbatches // pipeline)
    while microbatches % rounds:
        rounds -= 1
    return microbatches // rounds


def pipeline_actions(
    schedule: ScheduleName, pipeline: int, microbatches: int, virtual_stages: int = 1
) -> list[list[PipelineAction]]:
    """The actions of every rank, in order."""
    size = microbatches
    if virtual_stages > 1:
        size = round_size(pipeline, microbatches)
    return [
        _rank_actions(schedule, rank, pipeline, microbatches, virtual_stages, size)
        for rank in range(pipeline)
    ]


def _rank_actions(
    schedule: ScheduleName,
    rank: int,
    pipeline: int,
    microbatches: int,
    virtual_stages: int,
    size: int,
) -> list[PipelineAction]:
    """The actions of one rank: forwards ahead, forwards and backwards in turn, the rest.

    `size` is the number of microbatches in a round (`round_size`).
    """
    stages = stages_on(rank, pipeline, virtual_stages)
    forwards = [
        PipelineAction(stage, "F", number) for stage, number in _turns(stages, microbatches, size)
    ]
    backwards = _turns(stages[::-1], microbatches, size)

    # Interleaved ranks go twice as far ahead, since a backward of their last stage returns later.
    ahead = pipeline - 1 - rank
    if schedule == "interleaved":
        ahead *= 2
    ahead = min((virtual_stages - 1) * size + ahead, len(forwards))
    actions = forwards[:ahead]

    is_divided = schedule == "zero_bubble"
    backward: ActionKind = "B"
    if is_divided:
        backward = "I"
    weights = iter(backwards)
    for index, (stage, number) in enumerate(backwards):
        if ahead + index < len(forwards):
            actions.append(forwards[ahead + index])
        actions.append(PipelineAction(stage, backward, number))
        # Later ranks hold back one W more: each keeps enough of them to fill the wait at its end.
        if is_divided and index >= rank:
            actions.append(_weight_action(next(weights)))
    if is_divided:
        actions += map(_weight_action, weights)
    return actions


def _weight_action(turn: tuple[int, int]) -> PipelineAction:
    stage, number = turn
    return PipelineAction(stage, "W", number)


def _turns(stages: Sequence[int], microbatches: int, size: int) -> list[tuple[int, int]]:
    """(stage, microbatch): a round of microbatches on each stage, then the next round."""
    return [
        (stage, microbatch)
        for start in range(0, microbatches, size)
        for stage in stages
        for microbatch in range(start, min(start + size, microbatches))
    ]
