"""KV footprint: (query step, KV entry) pairs that are not evicted, as a share of full causal
attention.

A prompt of n tokens is read in chunks, then m tokens are decoded. A streaming head with k sinks and
window w keeps, before a chunk [a, b), min(a, k + w) entries, and all of the chunk until it ends; a
full head keeps everything.

    chunk of c tokens from a    c (c + 1) / 2 + c * kept(a)
    decode step at position a   1 + kept(a)
    kept(a)                     a of a full head, min(a, k + w) of a streaming one
    full causal attention       (n + m)(n + m + 1) / 2

Critical footprint: the smallest at which a score is still at least 90 % of the full model's, on
straight lines between what was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headway.model.head_masks.masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks

ENOUGH = 0.9
"""Share of the full model's score that counts as kept."""


@dataclass(frozen=True)
class Footprint:
    """Of one prompt and its answer, averaged over heads."""

    share: float
    """Cells kept, as a share of full causal attention."""
    peak: float
    """The most entries stored at one step, as a share of all tokens."""


def footprint(masks: HeadMasks | None, prompt: int, new: int, chunk: int) -> Footprint:
    """What a model under masks keeps for a prompt read in chunks and an answer."""
    total = prompt + new
    cells = total * (total + 1) / 2
    full_cells, full_peak = _cells(prompt, new, chunk, total)
    if masks is None:
        return Footprint(full_cells / cells, full_peak / total)

    # A mask file need not say how far its streaming heads see.
    sinks = DEFAULT_SINKS if masks.sinks is None else masks.sinks
    window = DEFAULT_WINDOW if masks.window is None else masks.window
    kept_cells, kept_peak = _cells(prompt, new, chunk, sinks + window)

    # Heads of a kind keep the same, so the mean over heads is a mean of the two kinds.
    streaming = masks.sparsity
    mean_cells = streaming * kept_cells + (1 - streaming) * full_cells
    mean_peak = streaming * kept_peak + (1 - streaming) * full_peak
    return Footprint(mean_cells / cells, mean_peak / total)


def _cells(prompt: int, new: int, chunk: int, slots: int) -> tuple[int, int]:
    """Cells kept by one head that has room for `slots` entries between chunks, and the most at one
    step.
    """
    cells = 0
    most = 0
    for begin in range(0, prompt, chunk):
        size = min(chunk, prompt - begin)
        kept = min(begin, slots)
        # A triangle inside the chunk, in which nothing is evicted, and what was kept before it.
        cells += size * (size + 1) // 2 + size * kept
        most = max(most, kept + size)
    # Decoding: chunks of one token.
    for position in range(prompt, prompt + new):
        kept = min(position, slots)
        cells += 1 + kept
        most = max(most, 1 + kept)
    return cells, most


def critical_footprint(
    full_score: float, points: Sequence[tuple[float, float]], enough: float = ENOUGH
) -> float | None:
    """The smallest footprint at which the score is enough; points are (footprint, score), the full
    model's among them.

    None where the full model itself scores nothing, so that there is nothing to keep.
    """
    if full_score <= 0:
        return None

    wanted = enough * full_score
    before: tuple[float, float] | None = None
    for share, score in sorted(points):
        if score < wanted:
            before = (share, score)
            continue
        if before is None or score == before[1]:
            return share
        # Where the line from the point before crosses the wanted score.
        share_before, score_before = before
        fraction = (wanted - score_before) / (score - score_before)
        return share_before + (share - share_before) * fraction
    return None
