"""Masks beside what they are compared with: the results of all variants come in; for each of the
masks its score, the spread of its random draws and the simple choices go out.

    score     mean share of answers found, over the tasks, each with the same weight
    loss      of the scored text, in nats per token
    spread    mean, standard deviation between draws, least and most
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headway.eval.long_context import VariantResult


@dataclass(frozen=True)
class DrawSpread:
    """A number of several random draws."""

    mean: float
    std: float
    """Of a sample; 0 of a single draw, which has no spread."""
    least: float
    most: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> DrawSpread:
        """The spread of one or more values."""
        std = 0.0
        if len(values) > 1:
            std = stdev(values)
        return cls(fmean(values), std, min(values), max(values), tuple(values))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "mean": self.mean,
            "std": self.std,
            "min": self.least,
            "max": self.most,
            "values": list(self.values),
        }


@dataclass(frozen=True)
class Scores:
    """What one variant, or the draws of one, reached; None: not measured."""

    score: DrawSpread | None
    loss: DrawSpread | None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "score": None if self.score is None else self.score.to_json(),
            "loss": None if self.loss is None else self.loss.to_json(),
        }


@dataclass(frozen=True)
class MaskComparison:
    """One of the masks, its random draws and its simple choices."""

    variant: VariantResult
    own: Scores
    random: Scores | None
    """None: no random masks were measured."""
    seeds: tuple[int, ...]
    simple: dict[str, Scores] = field(default_factory=dict)
    """By kind: equal, first, windows."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; one number for what is not random."""
        simple: dict[str, dict[str, float | None]] = {}
        for kind, scores in self.simple.items():
            simple[kind] = {"score": _mean(scores.score), "loss": _mean(scores.loss)}
        return {
            "variant": self.variant.name,
            "sparsity": self.variant.sparsity,
            "score": _mean(self.own.score),
            "loss": _mean(self.own.loss),
            "random": None if self.random is None else self.random.to_json(),
            "seeds": list(self.seeds),
            "simple": simple,
        }


def _mean(spread: DrawSpread | None) -> float | None:
    if spread is None:
        return None
    return spread.mean


def scores_of(variants: Sequence[VariantResult], tasks: Sequence[str]) -> Scores:
    """Of one variant or several draws, over some tasks."""
    score = None
    if tasks:
        score = DrawSpread.of(
            [fmean(variant.score(task) for task in tasks) for variant in variants]
        )
    losses = [variant.perplexity["loss"] for variant in variants if variant.perplexity is not None]
    loss = None
    # Texts are scored for all variants or for none.
    if losses and all(math.isfinite(value) for value in losses):
        loss = DrawSpread.of(losses)
    return Scores(score, loss)


def compare_masks(variants: Sequence[VariantResult], tasks: Sequence[str]) -> list[MaskComparison]:
    """Every one of the masks with what it is compared with."""
    comparisons: list[MaskComparison] = []
    for variant in variants:
        if variant.kind != "masks":
            continue
        draws = [
            other
            for other in variants
            if other.kind == "random" and other.compared_with == variant.name
        ]
        simple: dict[str, Scores] = {}
        for other in variants:
            belongs = other.compared_with == variant.name
            if other.kind == "windows":
                belongs = (other.window, other.sinks) == (variant.window, variant.sinks)
            if other.kind in ("equal", "first", "windows") and belongs:
                simple[other.kind] = scores_of([other], tasks)
        random = None
        if draws:
            random = scores_of(draws, tasks)
        seeds = tuple(draw.seed for draw in draws if draw.seed is not None)
        comparisons.append(
            MaskComparison(variant, scores_of([variant], tasks), random, seeds, simple)
        )
    return comparisons
