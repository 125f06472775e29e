"""When a generation stops and how it samples: what `infer/generate.py` takes, and options of
`headway generate` and `headway chat`.

A module of its own, because the command line imports it for every help, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config.options import inner_options, option
from headway.errors import ConfigError
from headway.infer.engine.request import Speculation
from headway.infer.sampling import Sampling

if TYPE_CHECKING:
    from headway.infer.engine.ranks import MakeConstraints


Say = Callable[[str], object]
"""Receives the next piece of a text while it is generated. `engine/text.py` decides which pieces
are final."""


@dataclass(frozen=True)
class AnswerGrammar:
    """What every answer must follow."""

    text: str
    make_constraints: MakeConstraints
    """Of a loaded model: what reads the text."""


@dataclass(frozen=True)
class GenerateOptions:
    """When to stop and how to sample."""

    max_new_tokens: int = option(128, "Stop after this many tokens.")
    stop: tuple[str, ...] = option((), "Stop before this text; may be repeated.")
    stop_ids: tuple[int, ...] = ()
    """Generation stops after one of these ids, as after the model's own end ids."""
    special: bool = option(
        False,
        "Read special tokens written in a prompt, such as <|im_start|>, as tokens, not as text.",
        "--special",
    )
    sampling: Sampling = inner_options(Sampling())
    rows: int = 16
    """Prompts that are computed at once."""
    chunk_tokens: int = option(
        4096, "Prefill chunk: tokens of each prompt that go through the model at once."
    )
    """Changes results only by rounding."""

    speculation: Speculation | None = None
    """Guess and check several tokens at a time; the text is the same."""
    grammar: AnswerGrammar | None = None
    """Only tokens that it allows are chosen."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"rows is {self.rows}; it must be 1 or more.")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be 1 or more.")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk-tokens is {self.chunk_tokens}; it must be 1 or more.")
        if "" in self.stop:
            raise ConfigError(
                "stop is an empty text, which every text contains. Give the text at which to stop."
            )
