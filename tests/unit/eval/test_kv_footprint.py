"""The footprint's formula equals a count of every cell, and gives the values known for 128K prompts."""

import pytest

from headway.eval.kv_footprint import critical_footprint, footprint
from headway.model.head_masks.masks import HeadMasks


def masks(full: int, heads: int, window: int, sinks: int) -> HeadMasks:
    return HeadMasks((tuple(head < full for head in range(heads)),), window, sinks)


def brute_force(masks: HeadMasks | None, prompt: int, new: int, chunk: int) -> tuple[float, float]:
    """Keep sets of positions, evict by the rule, count what is there at each query."""
    full, total = (1.0, 0) if masks is None else (1 - masks.sparsity, prompt + new)
    total = prompt + new
    counts = {"full": 0, "streaming": 0}
    peaks = {"full": 0, "streaming": 0}
    steps = [range(begin, min(begin + chunk, prompt)) for begin in range(0, prompt, chunk)] + [
        range(step, step + 1) for step in range(prompt, total)
    ]
    for kind in counts:
        kept: set[int] = set()
        for step in steps:
            for query in step:
                kept.add(query)
                counts[kind] += len(kept)
                peaks[kind] = max(peaks[kind], len(kept))
            if kind == "streaming" and masks is not None:
                assert masks.window is not None
                assert masks.sinks is not None
                # between chunks: sinks and the newest window; where both overlap, everything
                newest = sorted(kept)[-masks.window :]
                kept = {position for position in kept if position < masks.sinks} | set(newest)
                while len(kept) < min(step[-1] + 1, masks.sinks + masks.window):
                    kept.add(min(set(range(step[-1] + 1)) - kept))
    cells = total * (total + 1) / 2
    mixed = full * counts["full"] + (1 - full) * counts["streaming"]
    return mixed / cells, (full * peaks["full"] + (1 - full) * peaks["streaming"]) / total


@pytest.mark.parametrize("chunk", [1, 4, 7, 60])
@pytest.mark.parametrize(("prompt", "new"), [(60, 5), (9, 30), (1, 1), (24, 0)])
@pytest.mark.parametrize(
    "head_masks", [None, masks(0, 4, 5, 2), masks(1, 4, 8, 0), masks(3, 4, 1, 1)]
)
def test_the_formula_equals_a_count_of_every_cell(
    head_masks: HeadMasks | None, prompt: int, new: int, chunk: int
) -> None:
    cells = footprint(head_masks, prompt, new, chunk)
    share, peak = brute_force(head_masks, prompt, new, chunk)
    assert cells.share == pytest.approx(share)
    assert cells.peak == pytest.approx(peak)
    if head_masks is None:
        assert cells.share == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("full", "expected"),
    [
        (5, (99.9, 63.1, 53.9, 51.3, 50.9)),
        (3, (99.9, 48.4, 35.5, 31.8, 31.3)),
        (1, (99.9, 33.7, 17.1, 12.3, 11.7)),
    ],
)
def test_shares_of_a_prompt_of_128k_are_the_known_ones(
    full: int, expected: tuple[float, ...]
) -> None:
    head_masks = masks(full, 10, 1024, 128)
    shares = [
        100 * footprint(head_masks, 131072, 100, chunk).share
        for chunk in (131072, 32768, 8192, 1024, 128)
    ]
    assert shares == pytest.approx(expected, abs=0.06)


def test_the_critical_footprint_lies_on_the_line_between_two_measured_ones() -> None:
    points = [(1.0, 0.8), (0.6, 0.76), (0.4, 0.6), (0.2, 0.1)]
    # 90 % of 0.8 is 0.72, three quarters of the way from 0.6 to 0.76
    assert critical_footprint(0.8, points) == pytest.approx(0.4 + 0.2 * 0.75)
    assert critical_footprint(0.8, [(1.0, 0.8), (0.3, 0.8)]) == 0.3
    assert critical_footprint(0.8, [(1.0, 0.8), (0.9, 0.0)]) == pytest.approx(0.99)
    assert critical_footprint(0.0, points) is None
