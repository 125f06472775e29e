"""Masks that a choice of heads is compared with: random draws and simple choices come out, each with
as many full heads as the masks that come in.

    random    drawn over the whole model, several times: their spread is the noise of a comparison
    equal     the same number of full heads in every layer, the best of each
    first     the same number of full heads in every layer, its first ones
    windows   no full head at all: what the questions need of the far past

Imports without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from headway.model.head_masks.masks import HeadMasks, Table, random_masks, select_heads

BaselineKind = Literal["random", "equal", "first", "windows"]
WINDOWS = "windows"
"""Name of the variant without full heads."""


@dataclass(frozen=True)
class Baseline:
    """Masks to compare with."""

    kind: BaselineKind
    masks: HeadMasks
    seed: int | None = None
    """Of a random draw."""


def random_draws(like: HeadMasks, draws: int, seed: int) -> list[Baseline]:
    """`draws` different random masks with as many full heads, from consecutive seeds; fewer where a
    small model has not that many."""
    heads = like.num_layers * like.num_kv_heads
    possible = math.comb(heads, like.num_full)
    baselines: list[Baseline] = []
    while len(baselines) < min(draws, possible):
        masks = random_masks(like, seed)
        # The same masks twice would be measured twice and make the spread look smaller.
        if all(masks != other.masks for other in baselines):
            baselines.append(Baseline("random", masks, seed))
        seed += 1
    return baselines


def simple_choices(like: HeadMasks, scores: Table | None) -> list[Baseline]:
    """The choices that need no chance. `scores` rank the heads; None: nothing ranks them, and
    `equal` is left out."""
    choices: list[Baseline] = []
    if scores is not None:
        equal = select_evenly(scores, like.num_full).with_reach(like.window, like.sinks)
        # Learned masks may have equal layers themselves.
        if equal != like:
            choices.append(Baseline("equal", equal))
    positions = [[-float(head) for head in range(like.num_kv_heads)] for _ in like.full]
    # The first heads of all layers come before the second ones of any.
    first = select_heads(positions, like.num_full)
    choices.append(Baseline("first", replace(like, full=first.full)))
    choices.append(Baseline("windows", replace(like, full=_none(like))))
    return choices


def select_evenly(scores: Table, num_full: int) -> HeadMasks:
    """Exactly `num_full` heads, in no layer more than one more than in another: the best of each
    layer, then the best of what is left in all."""
    per_layer, rest = divmod(num_full, len(scores))
    full: set[tuple[int, int]] = set()
    left: list[tuple[float, int, int]] = []
    for layer, row in enumerate(scores):
        order = sorted(range(len(row)), key=lambda head, row=row: (-row[head], head))
        full.update((layer, head) for head in order[:per_layer])
        # At most one more of each layer.
        left += [(-row[head], layer, head) for head in order[per_layer : per_layer + 1]]
    full.update((layer, head) for _, layer, head in sorted(left)[:rest])
    return HeadMasks(
        tuple(
            tuple((layer, head) in full for head in range(len(row)))
            for layer, row in enumerate(scores)
        )
    )


def _none(like: HeadMasks) -> tuple[tuple[bool, ...], ...]:
    return tuple((False,) * like.num_kv_heads for _ in like.full)
