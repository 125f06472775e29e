"""One decision per layer and KV head, and the rules that make it from scores.

A query at position i of its document sees key j of the same document iff j <= i and, for a
streaming head, (i - j < window or j < sinks). Positions count from the document's first token.
Imports without torch.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.model.config import ModelConfig

log = logging.getLogger("headway")

Table = Sequence[Sequence[float]]
"""[num_layers][num_kv_heads]"""
DEFAULT_WINDOW = 1024
"""Window of streaming heads, if neither the masks nor the user give it."""
DEFAULT_SINKS = 128
"""Sinks of streaming heads, likewise."""


@dataclass(frozen=True)
class HeadMasks:
    """One decision per layer and KV head; the query heads of a group follow their KV head."""

    full: tuple[tuple[bool, ...], ...]
    """[num_layers][num_kv_heads]: True = the head keeps and sees the whole past of its document."""
    window: int | None = None
    """Tokens a streaming head sees, the query's own included; None = the file does not say."""
    sinks: int | None = None
    """First tokens of the document that a streaming head also sees (0 = none); None = the file
    does not say."""

    @property
    def num_layers(self) -> int:
        """Rows of the table."""
        return len(self.full)

    @property
    def num_kv_heads(self) -> int:
        """Columns of the table."""
        return len(self.full[0])

    @property
    def num_full(self) -> int:
        """Full heads of the whole model."""
        return sum(map(sum, self.full))

    @property
    def sparsity(self) -> float:
        """Share of streaming heads."""
        return 1 - self.num_full / (self.num_layers * self.num_kv_heads)

    def full_heads(self, layer: int) -> tuple[int, ...]:
        """Indices of the full KV heads of one layer, ascending."""
        return tuple(head for head, is_full in enumerate(self.full[layer]) if is_full)

    def streaming_heads(self, layer: int) -> tuple[int, ...]:
        """Indices of the streaming KV heads of one layer, ascending."""
        return tuple(head for head, is_full in enumerate(self.full[layer]) if not is_full)

    def with_reach(self, window: int | None, sinks: int | None) -> HeadMasks:
        """The same heads; window and sinks are replaced where given."""
        return replace(
            self,
            window=self.window if window is None else window,
            sinks=self.sinks if sinks is None else sinks,
        )

    def check(self, config: ModelConfig, what: str = "masks") -> None:
        """Refuse masks of another model, and any for a model without KV heads."""
        if config.hf_config is not None:
            raise ConfigError(
                f"{what} is given for a model of family transformers, which has no head masks. "
                "Leave it out."
            )
        if config.latent_attention is not None:
            raise ConfigError(
                f"{what} is given for a model with latent attention, which has no KV heads to "
                "mask. Leave it out."
            )
        if config.state_section is not None:
            kind = config.state_section[0].replace("_", " ")
            raise ConfigError(
                f"{what} is given for a model with {kind}, whose layers have no KV heads to mask. "
                "Leave it out."
            )
        if (self.num_layers, self.num_kv_heads) != (config.num_layers, config.kv_heads):
            raise ConfigError(
                f"{what} holds {self.num_layers} layers of {self.num_kv_heads} KV heads; the model "
                f"has {config.num_layers} layers of "
                f"{config.kv_heads}. Use masks made for this model."
            )

    def describe(self, origin: str) -> dict[str, Any]:
        """Plain values for a result; `origin` says where the masks come from."""
        return {
            "from": origin,
            "full_heads": self.num_full,
            "heads": self.num_layers * self.num_kv_heads,
            "sparsity": self.sparsity,
            "window": self.window,
            "sinks": self.sinks,
        }


def in_words(described: dict[str, Any] | None) -> str:
    """`HeadMasks.describe` as one line of text; None = no masks."""
    if described is None:
        return "none"
    return (
        f"{described['from']} ({described['full_heads']} of {described['heads']} heads full, window {described['window']}, "
        f"sinks {described['sinks']})"
    )


def num_full_heads(total: int, sparsity: float) -> int:
    """How many of `total` heads stay full: floor(total * (1 - sparsity)) in exact decimal
    arithmetic; 10 heads at 0.9 leave one."""
    if not 0 <= sparsity <= 1:
        raise ConfigError(f"sparsity is {sparsity}; it must be between 0 and 1.")
    # Through its text: 0.9 as a float is a little more, and floor would lose a head.
    return math.floor(total * (1 - Fraction(str(sparsity))))


def select_heads(scores: Table, num_full: int, *, equal_per_layer: bool = False) -> HeadMasks:
    """The `num_full` heads with the highest scores are full; ties go to the lower layer, then to
    the lower head.

    With `equal_per_layer` every layer has the same number of full heads: num_full / layers, rounded
    to the nearest (a half rounds up). In each layer these are its highest scores. This is the only
    rule for equal layers; gates and mask files both use it.
    """
    if equal_per_layer:
        per_layer = math.floor(Fraction(num_full, len(scores)) + Fraction(1, 2))
        return HeadMasks(tuple(_highest([row], per_layer)[0] for row in scores))
    return HeadMasks(_highest(scores, num_full))


def warn_if_unreached(masks: HeadMasks, sparsity: float | None, num_full: int) -> None:
    """Say which sparsity equal layers cannot have: each keeps a whole number of its heads.

    `num_full`: the full heads of the whole model that were asked for, where no `sparsity` was.
    """
    heads = masks.num_kv_heads
    if sparsity is None:
        sparsity = 1 - num_full / (masks.num_layers * heads)
    if math.isclose(masks.sparsity, sparsity, abs_tol=1e-6):
        return
    per_layer = sum(masks.full[0])
    log.warning(
        "--equal-per-layer: sparsity %.4g cannot be reached with %d KV heads in every layer, which "
        "go in steps of %.4g. "
        "%d of %d heads stay full in each: sparsity %.4g.",
        sparsity,
        heads,
        1 / heads,
        per_layer,
        heads,
        masks.sparsity,
    )


def random_masks(like: HeadMasks, seed: int) -> HeadMasks:
    """As many full heads, drawn at random over the whole model: the baseline for a selection."""
    heads = [(layer, head) for layer in range(like.num_layers) for head in range(like.num_kv_heads)]
    full = random.Random(seed).sample(heads, like.num_full)
    return replace(like, full=_table(like.full, set(full)))


def _highest(scores: Table, num_full: int) -> tuple[tuple[bool, ...], ...]:
    """True for the highest scores; of equal ones the lower layer comes first, then the lower
    head."""
    # Negated, so that ascending order is highest score, lowest layer, lowest head.
    order = sorted(
        (-score, layer, head) for layer, row in enumerate(scores) for head, score in enumerate(row)
    )
    return _table(scores, {(layer, head) for _, layer, head in order[:num_full]})


def _table(
    shape: Sequence[Sequence[Any]], full: set[tuple[int, int]]
) -> tuple[tuple[bool, ...], ...]:
    """A table of this shape, True for these (layer, head)."""
    return tuple(
        tuple((layer, head) in full for head in range(len(row))) for layer, row in enumerate(shape)
    )
