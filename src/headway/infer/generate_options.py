"""When a generation stops and how it samples: what `infer/generate.py` takes, and options of
`headway generate` and `headway chat`. What is kept of a teacher's logits: what
`infer/teacher_logits.py` takes, and options of `headway data teacher-logits`.

A module of its own, because the command line imports it for every help, without torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.config.options import inner_options, option, parse_shard
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


def _read_shard(text: str | None) -> tuple[int, int]:
    if text is None:
        return 0, 1
    return parse_shard(text)


@dataclass(frozen=True)
class LogitsOptions:
    """What is kept of a teacher, and how it reads."""

    top_k: int = option(64, "Likeliest tokens to keep of every position.", min=1)
    temperature: float = option(
        1.0, "objective.temperature of the training: the other tokens are summed up for it."
    )
    dtype: str = option("float16", "Type of the log-probabilities: float16 or float32.")
    seq_len: int | None = option(
        None,
        "Longer documents are read in pieces of this many tokens; default: what the teacher can "
        "read, at most 4096.",
        min=1,
    )
    batch_tokens: int = option(8192, "Tokens computed at once.", min=1)
    shard: tuple[int, int] = option(
        (0, 1),
        "Read only part I (from 0) of N of every store, e.g. one per GPU.",
        metavar="I/N",
        written=None,
        read=_read_shard,
    )

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "float32"):
            raise ConfigError(f"--dtype is {self.dtype!r}; it must be float16 or float32.")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"--temperature is {self.temperature:g}; it must be above 0.")
