"""Updates on sampled answers that are given, trained by small engines on any layout."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.data.batch import SCORED
from headway.kernels.policy_scores import DrawnFrom
from headway.model.base import build_frozen_model
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.rollout.rows import StepRows, TrainedAnswer, answer_step
from headway.tasks.answers import AnswerSampling
from headway.tasks.base import StepInfo
from headway.tasks.grpo import Config
from headway.train.frozen_model import score_tokens_with
from support.trl_pairs import MODEL, wave

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "trl" / "policy.json").read_text())
SHIFT: float = GOLDEN["reference_shift"]
"""By which the reference's weights differ."""


def config_of(case: dict[str, Any]) -> Config:
    """The settings that are TRL's of a case."""
    algorithm = case["loss_type"]
    if case.get("level") == "sequence":
        algorithm = "gspo"
    settings: dict[str, Any] = {"algorithm": algorithm, "beta": case.get("beta", 0.0)}
    if "epsilon" in case:
        settings["clip_low"] = case["epsilon"]
    if "epsilon_high" in case:
        settings["clip_high"] = case["epsilon_high"]
    return Config(
        **settings,
        entropy=case.get("entropy_coef", 0.0),
        importance_cap=GOLDEN["importance_cap"],
    )


def answers_of(entry: dict[str, Any]) -> list[TrainedAnswer]:
    """The answers of a case."""
    cut = entry["case"].get("cut", [])
    old = entry.get("old", [None] * len(GOLDEN["answers"]))
    return [
        TrainedAnswer(
            tuple(prompt),
            tuple(answer),
            floats(entry["sampled"][number]),
            advantage,
            None if old[number] is None else floats(old[number]),
            has_loss=number not in cut,
        )
        for number, (prompt, answer, advantage) in enumerate(
            zip(GOLDEN["prompts"], GOLDEN["answers"], GOLDEN["advantages"], strict=True)
        )
    ]


@dataclass(frozen=True)
class PolicyStep:
    """What one update computes, before the optimizer."""

    loss: float
    metrics: dict[str, float]
    gradients: dict[str, torch.Tensor] = field(repr=False)


def floats(
    values: Sequence[float] | torch.Tensor | np.ndarray[Any, Any],
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As the journal has them."""
    return np.asarray(values, np.float32)


def wave_engine(
    config: Config,
    drawn: DrawnFrom,
    longest: int,
    reference_shift: float | None = None,
    **more: Any,
) -> Any:
    """An engine with the weights of tests/golden/trl; a frozen model has them with a shift."""
    prepare = None
    if reference_shift is not None:
        weights = wave(reference_shift).items()
        reference = build_frozen_model(MODEL, weights, torch.device("cpu"), torch.float32)
        prepare = score_tokens_with(reference, 8, SCORED, drawn)
    objective = config.with_sampling(AnswerSampling(drawn.temperature, drawn.vocab, longest))
    engine: Any = assemble(
        EngineSpec(MODEL, objective, AdamW(), chunk_tokens=8, prepare=prepare, **more)
    )
    engine.fill(wave(0.0).items())
    return engine


def policy_step(engine: Any, answers: Sequence[TrainedAnswer], shape: StepRows) -> PolicyStep:
    """Loss, metrics and gradients of one update in this process."""
    step = answer_step(answers, shape, 0).batch
    result = engine.forward_backward(step, StepInfo(0, 1))
    gradients = {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }
    metrics = {
        name: float(total) / max(float(weight), 1e-30)
        for name, (total, weight) in result.metrics.items()
    }
    return PolicyStep(float(result.loss), metrics, gradients)
