"""Validation inside a run: every set's loss, perplexity and accuracy, as numbers for the step's record."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from headway.objective.base import MetricSums, StepInfo

if TYPE_CHECKING:
    from headway.train.build import Run


def validate(run: Run) -> dict[str, Any]:
    """Evaluate every validation set; waits for the device."""
    at = StepInfo(run.state.step, run.total_steps, training=False)
    found: dict[str, Any] = {}
    for name, batches in run.valid_batches().items():
        found[name] = numbers(run.engine.evaluate(batches, at))
    return {"valid": found}


def numbers(sums: MetricSums) -> dict[str, Any]:
    """Divide metric sums, and say what the loss means."""
    result: dict[str, Any] = {name: float(total) / max(float(weight), 1.0) for name, (total, weight) in sums.items() if total.dim() == 0}
    if "nll" in result:
        result["loss"] = result.pop("nll")
        result["perplexity"] = math.exp(min(result["loss"], 700.0))
        result["tokens"] = int(sums["nll"][1])
    return result
