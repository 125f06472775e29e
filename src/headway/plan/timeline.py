"""The steps of a pipeline in time: the actions of every rank and how long each takes come in; when
each runs and the microbatches in flight go out. `plan/result.py` computes the idle share (the
bubble) from it. Numbers only; nothing imports torch.

The order is that of parallel/pipeline_order.py, which the engine runs. An action begins when its
rank is free and what it reads is there. Here 1f1b with four microbatches, where a backward takes as
long as two forwards; the gaps are the bubble:

    rank 0   F0 F1 .. .. B0 B0 F2 B1 B1 F3 B2 B2 .. B3 B3
    rank 1   .. F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .. ..
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from headway.parallel.pipeline.program import PipelineShape, needed_by
from headway.parallel.pipeline_order import ActionKind, PipelineAction, pipeline_actions

Seconds = Mapping[ActionKind, Sequence[float]]
"""How long an action takes: by its kind, then by pipeline stage."""


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
    """How many pipeline ranks there are."""

    @property
    def seconds(self) -> float:
        """From the first action to the last."""
        return max(timed.end for timed in self.actions)


def simulate(
    shape: PipelineShape, microbatches: int, seconds: Seconds, send_seconds: float = 0.0
) -> Timeline:
    """When each action of the schedule runs. `send_seconds`: what a message between two ranks
    adds."""
    orders = pipeline_actions(shape.schedule, shape.pipeline, microbatches, shape.virtual_stages)
    return follow(shape, orders, lambda action: seconds[action.kind][action.stage], send_seconds)


def follow(
    shape: PipelineShape,
    orders: Sequence[Sequence[PipelineAction]],
    duration: Callable[[PipelineAction], float],
    send_seconds: float,
) -> Timeline:
    """When each action runs, as soon as its rank is free and what it reads is there. `orders`: the
    actions of each rank in order."""
    num_ranks = len(orders)
    next_action = [0] * num_ranks
    rank_free_at = [0.0] * num_ranks
    ended_at: dict[tuple[int, str, int], float] = {}
    timed: list[TimedAction] = []

    def earliest_start(rank: int, action: PipelineAction) -> float | None:
        """When an action can begin; None while something it reads has no end yet."""
        start = rank_free_at[rank]
        for needed in needed_by(shape, action):
            arrival = ended_at.get((needed.stage, needed.kind, needed.microbatch))
            if arrival is None:
                return None
            # Neighbouring stages are always on different ranks, so this is a message.
            if needed.stage != action.stage:
                arrival += send_seconds
            start = max(start, arrival)
        return start

    # Each turn takes every rank as far as it gets with what the others have done so far.
    waiting = set(range(num_ranks))
    while waiting:
        moved = False
        for rank in sorted(waiting):
            order = orders[rank]
            while next_action[rank] < len(order):
                action = order[next_action[rank]]
                start = earliest_start(rank, action)
                if start is None:
                    break
                end = start + duration(action)
                rank_free_at[rank] = end
                ended_at[action.stage, action.kind, action.microbatch] = end
                timed.append(TimedAction(rank, action, start, end))
                next_action[rank] += 1
                moved = True
            if next_action[rank] == len(order):
                waiting.discard(rank)
        assert moved or not waiting, "an order in which every rank waits for another"
    return Timeline(tuple(timed), num_ranks)


def in_flight(actions: Sequence[PipelineAction]) -> dict[int, int]:
    """The most microbatches whose activations a rank holds at once, by stage, at the moment when it
    holds the most in all.

    An activation is held from the forward to the end of the backward: to W where weights' gradients
    are computed apart."""
    held: dict[int, int] = {}
    most_held: dict[int, int] = {}
    last_use = "W" if any(action.kind == "W" for action in actions) else "B"
    for action in actions:
        if action.kind == "F":
            held[action.stage] = held.get(action.stage, 0) + 1
        elif action.kind == last_use:
            held[action.stage] -= 1
        if sum(held.values()) > sum(most_held.values()):
            most_held = dict(held)
    return most_held
