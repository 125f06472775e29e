"""Which documents `headway data long-range` reads and selects.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config.options import inner_options, option
from headway.errors import ConfigError
from headway.eval.far_options import FarOptions

if TYPE_CHECKING:
    from headway.data.config import SourceConfig
    from headway.eval.far_gain import DocumentGain


@dataclass(frozen=True)
class SourceReading:
    """How raw files become documents; stores are read as they are."""

    kind: str = option("auto", "What raw records are: text, chat or auto (by their keys).")
    text_key: str = option("text", "Raw text: the key of a record that holds the text.")
    split: str = option("file", "Raw .txt files: one document per file, or one per line.")

    def source(self, path: str) -> SourceConfig:
        """As a recipe would state it."""
        # Settings of recipes load pydantic, which help pages do without.
        from headway.data.config import SourceConfig

        if self.split not in ("file", "line"):
            raise ConfigError(f"--split is {self.split!r}; it must be 'file' or 'line'.")
        return SourceConfig(path=path, kind=self.kind, text_key=self.text_key, split=self.split)


@dataclass(frozen=True)
class FarSelection:
    """Which documents are written as a new store."""

    keep: float | None = option(
        None,
        "Write the documents with the highest gains into OUT/selected: this share of all scored.",
    )
    min_gain: float | None = option(
        None, "Write the documents with at least this gain (nats per far token) into OUT/selected."
    )

    def __post_init__(self) -> None:
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ConfigError(f"--keep is {self.keep}; it must be above 0 and at most 1.")
        if self.min_gain is not None and not math.isfinite(self.min_gain):
            raise ConfigError(f"--min-gain is {self.min_gain}; it must be a number of nats.")

    @property
    def is_wanted(self) -> bool:
        """Whether a store is to be written."""
        return self.keep is not None or self.min_gain is not None

    def choose(self, gains: Sequence[DocumentGain]) -> list[int]:
        """Numbers of the chosen documents, ascending. With both limits, both hold.

        Documents without far tokens are never chosen. Of equal gains the earlier document counts
        as higher.
        """
        known = [(gain.gain, gain.document) for gain in gains if gain.gain is not None]
        ranked = sorted(known, key=lambda pair: (-pair[0], pair[1]))
        if self.keep is not None:
            ranked = ranked[: max(1, int(self.keep * len(gains)))]
        if self.min_gain is not None:
            least = self.min_gain
            ranked = [pair for pair in ranked if pair[0] >= least]
        return sorted(document for _, document in ranked)


@dataclass(frozen=True)
class LongRangePlan:
    """The options of the verb."""

    far: FarOptions = inner_options(FarOptions())
    reading: SourceReading = inner_options(SourceReading())
    selection: FarSelection = inner_options(FarSelection())
