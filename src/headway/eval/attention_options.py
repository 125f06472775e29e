"""What `headway eval attention` measures.

A module of its own, because the command line imports it for every help, without numpy.
"""

from __future__ import annotations

from dataclasses import dataclass

from headway.config.options import TEMPLATE_FLAGS, option
from headway.errors import ConfigError
from headway.eval.options import BOS, LongPlan, LongQuestions, parse_lengths, parse_numbers

TASKS = ("needle_single", "needle_multi_key", "passkey", "key_value")
"""Tasks with one answer in one place."""


@dataclass(frozen=True)
class AttentionPlan:
    """Prompts with one needle each, at some distances from the question."""

    task: str = option("needle_single", f"Which prompts: {', '.join(TASKS)}.")
    lengths: tuple[int, ...] = option(
        (1024,), "Tokens of the prompts, comma separated; 4k means 4096.",
        written="1024", read=parse_lengths,
    )  # fmt: skip
    depths: tuple[float, ...] = option(
        (0.0, 0.25, 0.5, 0.75, 1.0),
        "Positions of the needle, 0 = the beginning, comma separated.",
        written="0,0.25,0.5,0.75,1",
        read=lambda text: parse_numbers("--depths", text),
    )
    samples: int = option(4, "Prompts per length and depth.")
    seed: int = option(0, "Seed of the prompts.")
    template: str | None = option(
        None,
        "Ask in this chat template: a name, tokenizer (the model's own) or a .jinja file; "
        "default: plain text.",
        *TEMPLATE_FLAGS,
    )
    bos: bool | None = option(None, *BOS)

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"--task is {self.task!r}; it must be one of {', '.join(TASKS)}.")
        self.prompts()

    def prompts(self) -> LongPlan:
        """The prompts, as `eval long` makes them; wrong numbers are refused."""
        questions = LongQuestions(
            self.depths, self.samples, self.seed, template=self.template, bos=self.bos
        )
        return LongPlan((self.task,), self.lengths, questions)
