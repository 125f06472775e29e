"""Head masks for a model, from a file or from the gates it was trained with: checked, rounded if asked for, window and sinks settled."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.head_masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks, read_masks


def load_masks(
    path: Path,
    config: ModelConfig,
    *,
    sparsity: float | None = None,
    equal_per_layer: bool = False,
    window: int | None = None,
    sinks: int | None = None,
) -> HeadMasks:
    """The masks of a file, for one model."""
    if window is not None and window < 1:
        raise ConfigError(f"--stream-window is {window}; it must be 1 or more: a token sees itself.")
    if sinks is not None and sinks < 0:
        raise ConfigError(f"--stream-sinks is {sinks}; it must be 0 or more.")
    masks = read_masks(path, sparsity)
    masks.check(config, str(path))
    if equal_per_layer:
        masks = equal_layers(masks)
    return settled(masks.with_reach(window, sinks))


def settled(masks: HeadMasks) -> HeadMasks:
    """The same masks with a window and sinks."""
    return masks.with_reach(DEFAULT_WINDOW if masks.window is None else masks.window, DEFAULT_SINKS if masks.sinks is None else masks.sinks)


def equal_layers(masks: HeadMasks) -> HeadMasks:
    """As many full heads in every layer: the mean, rounded. A layer with too many loses its last ones, one with too few gains its first."""
    each = (2 * masks.num_full + masks.num_layers) // (2 * masks.num_layers)
    rows: list[tuple[bool, ...]] = []
    for row in masks.full:
        kept = set(sorted(range(len(row)), key=lambda head: (not row[head], head))[:each])
        rows.append(tuple(head in kept for head in range(len(row))))
    return replace(masks, full=tuple(rows))


def random_masks(like: HeadMasks, seed: int) -> HeadMasks:
    """As many full heads, at random places: what a choice of heads is compared with."""
    places = [(layer, head) for layer in range(like.num_layers) for head in range(like.num_kv_heads)]
    chosen = set(random.Random(seed).sample(places, like.num_full))
    rows = range(like.num_layers)
    return replace(like, full=tuple(tuple((layer, head) in chosen for head in range(like.num_kv_heads)) for layer in rows))
