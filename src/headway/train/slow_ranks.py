"""Slow ranks are named while a run trains: every COMPARE_EVERY steps the ranks exchange their own times, which are known already."""

from __future__ import annotations

import socket
from dataclasses import replace
from typing import TYPE_CHECKING

from headway.train.straggler import Rule, slow_in_training

if TYPE_CHECKING:
    from headway.train.build import Run

COMPARE_EVERY = 50
"""Steps between two comparisons."""


def name_slow_ranks(run: Run) -> None:
    """All ranks come here after the same step; a rank is named when it becomes slow, not again while it stays so."""
    ratio, world = run.recipe.log.slow_ratio, run.ranks.world
    if ratio is None or world.size == 1 or run.state.step % COMPARE_EVERY:
        return
    everyone = world.gather(replace(run.meter.take_own(), host=socket.gethostname()))
    found = slow_in_training(everyone, Rule(ratio))
    for rank, text in found.items():
        if rank not in run.slow and run.process.is_first:
            run.tell("slow_rank", text)
    run.slow = frozenset(found)
