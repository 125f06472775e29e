"""The steps of a pipeline in time: actions of every rank and how long each takes come in; when each begins, the idle share and the
microbatches in flight go out. Numbers only; nothing imports torch.

The order is that of parallel/pipeline_order.py, which the engine runs. An action begins when its rank is free and what it reads is there:

    rank 0   F0 F1 F2 F3 B0    B1    B2    B3
    rank 1      F0 F1 B0    F2 B1    ...                idle time between = the bubble
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.parallel.pipeline.program import PipelineShape, needed_by
from headway.parallel.pipeline_order import ActionKind, PipelineAction, pipeline_actions

Seconds = Mapping[ActionKind, Sequence[float]]
"""Of each kind of action, by pipeline stage."""


@dataclass(frozen=True)
class TimedAction:
    """An action and when it runs."""

    rank: int
    action: PipelineAction
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """Every action of one step."""

    actions: tuple[TimedAction, ...]
    ranks: int

    @property
    def seconds(self) -> float:
        """From the first action to the last."""
        return max(one.end for one in self.actions)


def simulate(
    shape: PipelineShape, microbatches: int, seconds: Seconds, send_seconds: float = 0.0
) -> Timeline:
    """When each action runs. `send_seconds`: what a message between two ranks adds."""
    ranks = pipeline_actions(shape.schedule, shape.pipeline, microbatches, shape.virtual_stages)
    return follow(shape, ranks, lambda action: seconds[action.kind][action.stage], send_seconds)


def follow(
    shape: PipelineShape,
    ranks: Sequence[Sequence[PipelineAction]],
    duration: Callable[[PipelineAction], float],
    send_seconds: float,
) -> Timeline:
    """When each action of given orders runs: as soon as its rank is free and what it reads is there."""
    at, free = [0] * len(ranks), [0.0] * len(ranks)
    done: dict[tuple[int, str, int], float] = {}
    timed: list[TimedAction] = []
    waiting = set(range(len(ranks)))

    def arrival(action: PipelineAction, needed: PipelineAction) -> float | None:
        time = done.get((needed.stage, needed.kind, needed.microbatch))
        return (
            None if time is None else time + (send_seconds if needed.stage != action.stage else 0.0)
        )

    while waiting:
        moved = False
        for rank in sorted(waiting):
            while at[rank] < len(ranks[rank]):
                action = ranks[rank][at[rank]]
                start = free[rank]
                for needed in needed_by(shape, action):
                    time = arrival(action, needed)
                    if time is None:
                        break
                    start = max(start, time)
                else:
                    free[rank] = start + duration(action)
                    done[action.stage, action.kind, action.microbatch] = free[rank]
                    timed.append(TimedAction(rank, action, start, free[rank]))
                    at[rank], moved = at[rank] + 1, True
                    continue
                break
            if at[rank] == len(ranks[rank]):
                waiting.discard(rank)
        assert moved or not waiting, "an order in which every rank waits for another"
    return Timeline(tuple(timed), len(ranks))


def in_flight(actions: Sequence[PipelineAction]) -> dict[int, int]:
    """The most microbatches whose activations a rank holds at once, by stage, at the moment when it holds the most in all.

    An activation is held from the forward to the end of the backward: to W where weights' gradients are computed apart.
    """
    held: dict[int, int] = {}
    best: dict[int, int] = {}
    ends = "W" if any(one.kind == "W" for one in actions) else "B"
    for one in actions:
        if one.kind == "F":
            held[one.stage] = held.get(one.stage, 0) + 1
        elif one.kind == ends:
            held[one.stage] -= 1
        if sum(held.values()) > sum(best.values()):
            best = dict(held)
    return best
