"""`train_pairs`: loss, metrics and gradients of one step over preference pairs, in microbatches that a test makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, stack

from headway.data.batch import Batch, StepBatch, StepStats
from headway.model.config import ModelConfig
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo, TaskConfig


@dataclass
class PairStep:
    """What one step computed."""

    loss: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]

    @property
    def gradient_norm(self) -> float:
        return float(stack([grad.double().norm() for grad in self.gradients.values()]).norm())


def train_pairs(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    config: TaskConfig,
    microbatches: Sequence[Batch],
    *,
    num_pairs: int,
    **spec: Any,
) -> PairStep:
    """One step; `spec` are more fields of the engine's spec."""
    engine: Any = assemble(EngineSpec(model, config, AdamW(), **spec))
    engine.fill(weights.items())
    totals = {"pairs": float(num_pairs), "targets": 1.0, "rows": 1.0}
    step = StepBatch(tuple(microbatches), totals, StepStats(1, 1, 1, 1, 1, 0))
    result = engine.forward_backward(step, StepInfo(0, 1))
    metrics = {
        name: float(total) / float(weight) for name, (total, weight) in result.metrics.items()
    }
    gradients = {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }
    return PairStep(float(result.loss), metrics, gradients)
