"""Which documents cleaning keeps: the rules of `text/clean.py`, which are the options of
`headway data clean` too.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headway.config.options import option
from headway.errors import ConfigError


def _memory(text: str) -> int:
    from headway.text.sample import parse_bytes

    return parse_bytes(text, "--max-memory")


@dataclass(frozen=True)
class CleanRules:
    """Rules a document must meet to stay. Shares are of the characters that are not spaces."""

    min_characters: int = option(10, "Drop shorter documents.")
    max_characters: int | None = option(None, "Drop longer documents.")
    min_letters: float = option(0.25, "Minimum share of letters (Han characters are letters).")
    max_digits: float = option(0.5, "Maximum share of digits.")
    max_signs: float = option(0.5, "Maximum share of punctuation and symbols.")
    max_controls: float = option(0.01, "Maximum share of control and replacement characters.")
    max_repeated_lines: float = option(
        0.5, "Maximum share of characters in lines that repeat an earlier line."
    )
    min_line_length: float = option(0.0, "Minimum mean length of lines.")
    duplicates: Literal["keep", "exact", "near"] = option(
        "near", "keep: keep duplicates; exact: drop exact ones; near: drop near ones too."
    )
    similarity: float = option(
        0.8, "Share of common character n-grams above which two documents are near duplicates."
    )
    seed: int = option(0, "Seed of the near-duplicate hashes.")
    max_memory_bytes: int | None = option(
        None,
        "Memory of the near-duplicate index; when it is full, the oldest documents are forgotten. "
        "With --on: an upper bound "
        "for each task, and nothing is forgotten.",
        "--max-memory",
        written="4GB",
        read=_memory,
    )
    """None: no limit."""

    def __post_init__(self) -> None:
        """Refuse impossible rules, by the names of their options."""
        for name in (
            "min_letters",
            "max_digits",
            "max_signs",
            "max_controls",
            "max_repeated_lines",
        ):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; it is a share between 0 and 1."
                )

        for name in ("min_characters", "min_line_length"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be 0 or more.")

        if self.duplicates not in ("keep", "exact", "near"):
            raise ConfigError(f"duplicates is {self.duplicates!r}; it must be keep, exact or near.")

        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ConfigError(
                f"max_characters is {self.max_characters}, less than "
                f"min_characters={self.min_characters}."
            )


ONLY_DUPLICATES = CleanRules(
    min_characters=0, min_letters=0, max_digits=1, max_signs=1, max_controls=1, max_repeated_lines=1
)
"""Rules that only blank documents and duplicates break (`headway data dedup`)."""
