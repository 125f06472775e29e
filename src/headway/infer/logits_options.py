"""What is kept of a teacher's logits: what `infer/teacher_logits.py` takes, and the options of
`headway data teacher-logits`.

A module of its own, because the command line imports it for every help, without torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config.options import option, parse_shard
from headway.errors import ConfigError


def _shard(text: str | None) -> tuple[int, int]:
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
        read=_shard,
    )

    def __post_init__(self) -> None:
        if self.dtype not in ("float16", "float32"):
            raise ConfigError(f"--dtype is {self.dtype!r}; it must be float16 or float32.")
        if not 0 < self.temperature < float("inf"):
            raise ConfigError(f"--temperature is {self.temperature:g}; it must be above 0.")
