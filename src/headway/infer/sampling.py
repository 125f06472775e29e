"""How tokens are chosen: the settings, and the one random number of each choice.

That number is derived from (seed, prompt, position). It depends neither on the other rows of a
batch nor on the device. `engine/sampler.py` chooses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.config.options import option
from headway.errors import ConfigError
from headway.runtime.seed import derive


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen among the likely ones."""

    temperature: float = option(0.0, "0 takes the most likely token each time; above 0 samples.")
    """1 samples from the model's distribution; above, it is flatter."""
    top_k: int | None = option(None, "Sample from the k most likely tokens.")
    top_p: float | None = option(
        None, "Sample from the smallest set of tokens with this total probability."
    )
    seed: int = option(0, "Seed of the sampling.")
    min_p: float | None = None
    """Sample among the tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float = 1.0
    """Scores of tokens that occurred, in the prompt too, are divided by this where positive and
    multiplied where negative."""
    presence_penalty: float = 0.0
    """Subtracted from the score of every token that was generated."""
    frequency_penalty: float = 0.0
    """Subtracted from the score of a token for each time it was generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(id, number that is added to its score)."""
    by_id: bool = False
    """Draw along the ids instead of along falling probability: the same distribution without
    sorting the vocabulary, other tokens for a seed. Needs a temperature, and no top_k, top_p or
    min_p."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"--temperature is {self.temperature}; it must be 0 (likeliest token) or more, "
                "and finite."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"--top-k is {self.top_k}; it must be 1 or more. Leave it out to sample among all "
                "tokens."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; it must be above 0 and at most 1.")
        if self.min_p is not None and not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p is {self.min_p}; it must be between 0 and 1.")
        if not 0 < self.repetition_penalty < math.inf:
            raise ConfigError(
                f"repetition_penalty is {self.repetition_penalty}; it must be above 0 and finite. "
                "1 changes nothing."
            )
        for name in ("presence_penalty", "frequency_penalty"):
            if not math.isfinite(getattr(self, name)):
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be finite.")
        if self.by_id and (self.temperature == 0 or self.cuts):
            raise ConfigError(
                "by_id is true; it needs a temperature above 0, and no top_k, top_p or min_p."
            )
        if any(token < 0 or math.isnan(bias) for token, bias in self.logit_bias):
            raise ConfigError("logit_bias has an id below 0 or a bias that is no number.")

    @property
    def cuts(self) -> bool:
        """Unlikely tokens are left out."""
        return bool(self.top_k is not None or self.top_p is not None or self.min_p is not None)

    @property
    def changes_scores(self) -> bool:
        """Scores depend on the tokens before, or on a bias."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
        )

    def draw(self, key: str, position: int) -> float:
        """The number in [0, 1) with which the token at a position of a sequence is chosen."""
        # `derive` gives 63 bits.
        return derive(self.seed, "sample", key, position) / 2.0**63
