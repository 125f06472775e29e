"""ORPO and SimPO: formulas in fp64, TRL's own functions where it is installed, and however a step is cut."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pairs import pair_batch
from support.trl_pairs import LAYOUTS, MODEL, PAIRS, wave

from headway.data.batch import Batch, StepBatch, StepStats
from headway.model.base import ModelOut, build_frozen_model
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo, TaskConfig
from headway.tasks.dpo import Config as DPOConfig
from headway.tasks.orpo import Config as ORPOConfig
from headway.tasks.orpo import _log_rest
from headway.tasks.simpo import Config as SimPOConfig

CONFIGS = {
    "orpo": ORPOConfig(beta=0.3),
    "simpo": SimPOConfig(beta=1.7, gamma=0.4, label_smoothing=0.1),
}


def step(
    config: TaskConfig, micro: list[Batch]
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss, metrics and gradients of one step over some microbatches."""
    engine: Any = assemble(EngineSpec(MODEL, config, AdamW(), chunk_tokens=8))
    engine.fill(wave(0.0).items())
    totals = {"pairs": float(len(PAIRS)), "targets": 1.0, "rows": 1.0}
    result = engine.forward_backward(
        StepBatch(tuple(micro), totals, StepStats(1, 1, 1, 1, 1, 0)), StepInfo(0, 1)
    )
    grads = {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }
    return (
        float(result.loss),
        {name: float(a) / float(b) for name, (a, b) in result.metrics.items()},
        grads,
    )


def means() -> tuple[list[float], list[float]]:
    """Mean log-probability of a token of every chosen and of every rejected answer, one pair at a time."""
    model = build_frozen_model(MODEL, wave(0.0).items(), torch.device("cpu"), torch.float32)
    dpo = DPOConfig(reference_free=True).build()
    found: tuple[list[float], list[float]] = ([], [])
    for pair in PAIRS:
        batch = pair_batch([[pair]], seq_len=64)
        out = model.forward_batch(batch)
        assert isinstance(out, ModelOut)
        one = dpo.pairs(out, batch)
        found[0].append(float(one.chosen[0, 0] / one.chosen_length[0, 0]))
        found[1].append(float(one.rejected[0, 0] / one.rejected_length[0, 0]))
    return found


def by_hand(kind: str) -> float:
    total = 0.0
    for c, r in zip(*means(), strict=True):
        if kind == "orpo":
            odds = (c - math.log(1 - math.exp(c))) - (r - math.log(1 - math.exp(r)))
            total += -c + 0.3 * math.log(1 + math.exp(-odds))
        else:
            margin = 1.7 * (c - r) - 0.4
            total += 0.9 * math.log(1 + math.exp(-margin)) + 0.1 * math.log(1 + math.exp(margin))
    return total / len(PAIRS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_loss_is_the_formula_however_pairs_are_packed(kind: str, layout: str) -> None:
    loss, metrics, _ = step(
        CONFIGS[kind], [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)]
    )
    assert loss == pytest.approx(by_hand(kind), abs=1e-6)
    chosen, rejected = means()
    scale = 0.3 if kind == "orpo" else 1.7
    assert "nll" not in metrics  # a validation would report it as its loss
    if kind == "orpo":
        assert metrics["nll/chosen"] == pytest.approx(-sum(chosen) / len(chosen), abs=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(scale * sum(chosen) / len(chosen), abs=1e-6)
    assert metrics["rewards/accuracies"] == pytest.approx(
        sum(c > r for c, r in zip(chosen, rejected, strict=True)) / len(PAIRS)
    )


@pytest.mark.parametrize("kind", CONFIGS)
def test_microbatches_and_empty_rows_change_nothing(kind: str) -> None:
    whole = step(CONFIGS[kind], [pair_batch([PAIRS[:2], PAIRS[2:]], seq_len=64)])
    parts = step(
        CONFIGS[kind], [pair_batch([row], seq_len=64) for row in (PAIRS[:2], PAIRS[2:], [])]
    )
    assert parts[0] == pytest.approx(whole[0], abs=1e-6)
    for name, gradient in whole[2].items():
        torch.testing.assert_close(parts[2][name], gradient, rtol=1e-5, atol=1e-6)
        assert torch.isfinite(parts[2][name]).all(), name


def test_losses_are_those_of_trl() -> None:
    orpo = pytest.importorskip("trl.experimental.orpo")
    cpo = pytest.importorskip("trl.experimental.cpo")
    chosen, rejected = (torch.tensor(side) for side in means())
    as_trainer: Any = SimpleNamespace(
        beta=0.3,
        accelerator=SimpleNamespace(device="cpu"),
        loss_type="simpo",
        simpo_gamma=0.4,
        label_smoothing=0.1,
        alpha=0.0,
    )
    ratio = orpo.ORPOTrainer.odds_ratio_loss(as_trainer, chosen, rejected)[0]
    assert float((-chosen - ratio).mean()) == pytest.approx(by_hand("orpo"), abs=1e-6)
    as_trainer.beta = 1.7
    losses = cpo.CPOTrainer.cpo_loss(as_trainer, chosen, rejected)[0]
    assert float(losses.mean()) == pytest.approx(by_hand("simpo"), abs=1e-6)


def test_odds_of_certain_and_of_impossible_answers_stay_finite() -> None:
    x = torch.tensor([0.0, -1e-9, -1e-3, -0.6931, -0.7, -5.0, -80.0], requires_grad=True)
    found = _log_rest(x)
    found.sum().backward()
    assert x.grad is not None and torch.isfinite(found).all() and torch.isfinite(x.grad).all()
    right = torch.log(-torch.expm1(x.detach()[2:].double()))
    torch.testing.assert_close(found[2:].double(), right, rtol=1e-6, atol=1e-7)
