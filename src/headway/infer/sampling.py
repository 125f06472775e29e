"""Logits of the next token come in, one token per row goes out.

Sampling uses one random number per row, derived from (seed, prompt, position). It depends neither on the other rows nor on the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway.errors import ConfigError
from headway.runtime.device import wide
from headway.runtime.seed import derive


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen among the likely ones."""

    temperature: float = 0.0
    """0 takes the likeliest token; 1 samples from the model's distribution; above, flatter."""
    top_k: int | None = None
    """Sample among this many likeliest tokens."""
    top_p: float | None = None
    """Sample among the fewest likeliest tokens that together have this probability."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(f"--temperature is {self.temperature}; it must be 0 (likeliest token) or more, and finite.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k is {self.top_k}; it must be 1 or more. Leave it out to sample among all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"--top-p is {self.top_p}; it must be above 0 and at most 1.")

    def draw(self, key: str, position: int) -> float:
        """The number in [0, 1) with which the token at a position of a sequence is chosen."""
        return derive(self.seed, "sample", key, position) / 2.0**63


def choose(logits: torch.Tensor, sampling: Sampling, draws: Sequence[float]) -> torch.Tensor:
    """The next token of each row, int64 [B], of logits [B,V]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    # Double, so that the running sum over a large vocabulary gives the same choice on every device.
    # The greatest is subtracted first: a tiny temperature would make it infinite.
    scores = wide(logits)
    probability = ((scores - scores.amax(-1, keepdim=True)) / sampling.temperature).softmax(-1)
    likely, token = probability.sort(dim=-1, descending=True, stable=True)
    reached = likely.cumsum(-1)
    if sampling.top_p is not None:
        likely = likely.masked_fill(reached - likely >= sampling.top_p, 0.0)
    if sampling.top_k is not None and sampling.top_k < likely.shape[-1]:
        likely[:, sampling.top_k :] = 0.0
    reached = likely.cumsum(-1)
    draw = torch.tensor(draws, dtype=torch.float64, device=scores.device)[:, None]
    choice = torch.searchsorted(reached, draw * reached[:, -1:], right=True)
    last = (likely > 0).sum(-1, keepdim=True) - 1
    return token.gather(-1, torch.minimum(choice, last)).squeeze(-1).to(logits.device)
