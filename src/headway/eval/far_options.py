"""How far-context gain is measured: the window, the length and the sample of documents.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config.options import option
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.model.config import ModelConfig

MOST_TOKENS = 2**40
"""More is a typing error."""
DEFAULT_WINDOW = 1024
"""At most; a quarter of a shorter length."""
WINDOWS_PER_LENGTH = 4


@dataclass(frozen=True)
class FarReach:
    """What the two passes over a document see."""

    window: int
    """Newest tokens that the pass without far context sees, the token itself included."""
    sinks: int
    """First tokens that it sees, too."""
    length: int
    """Tokens of a document that are read."""

    def describe(self) -> str:
        """In words."""
        return f"window {self.window}, sinks {self.sinks}, length {self.length}"


@dataclass(frozen=True)
class FarOptions:
    """The settings of `headway data long-range`."""

    window: int | None = option(
        None,
        "Newest tokens that count as near; default: a quarter of --length, at most 1024.",
    )
    length: int | None = option(
        None, "Tokens read of each document, the first ones; default: the model's max_seq_len."
    )
    sinks: int = option(
        4,
        "First tokens that stay visible behind the window: without them attention of most models "
        "breaks down, and every document would seem to need its past.",
    )
    sample: int | None = option(
        None, "Score only this many documents, spread evenly over the source; default: all."
    )
    batch_tokens: int = option(
        8192, "Tokens that go through the model at once; a longer document goes alone."
    )

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--window", self.window, 1),
            ("--length", self.length, 2),
            ("--sinks", self.sinks, 0),
            ("--sample", self.sample, 1),
            ("--batch-tokens", self.batch_tokens, 1),
        ):
            if value is not None and not least <= value <= MOST_TOKENS:
                raise ConfigError(f"{flag} is {value}; it must be from {least} to {MOST_TOKENS}.")

    def reach(self, config: ModelConfig) -> FarReach:
        """The window and the length for one model; a ConfigError where no token would be far."""
        length = self.length or config.max_seq_len
        if length > config.max_seq_len:
            raise ConfigError(
                f"--length is {length}; the model's max_seq_len is {config.max_seq_len}. Give a "
                "length up to that."
            )
        window = self.window
        if window is None:
            window = max(1, min(DEFAULT_WINDOW, length // WINDOWS_PER_LENGTH))
        # The token after window and sinks is the first that has tokens it cannot see.
        if window + self.sinks + 1 >= length:
            raise ConfigError(
                f"--window {window} and --sinks {self.sinks} leave nothing far in --length "
                f"{length}; length must be above window + sinks + 1. Lower --window, or raise "
                "--length."
            )
        return FarReach(window, self.sinks, length)
