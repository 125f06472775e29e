"""ORPO and SimPO: formulas in fp64, TRL's own functions where it is installed, and however a step is cut."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.pair_steps import PairStep, train_pairs
from support.preference_pairs import pair_batch
from support.trl_pairs import LAYOUTS, MODEL, PAIRS, wave

from headway.data.batch import Batch
from headway.model.base import ModelOut, build_frozen_model
from headway.tasks.base import TaskConfig
from headway.tasks.dpo import Config as DPOConfig
from headway.tasks.orpo import Config as ORPOConfig
from headway.tasks.orpo import _log_rest
from headway.tasks.simpo import Config as SimPOConfig

CONFIGS = {
    "orpo": ORPOConfig(beta=0.3),
    "simpo": SimPOConfig(beta=1.7, gamma=0.4, label_smoothing=0.1),
}


def train(config: TaskConfig, microbatches: list[Batch]) -> PairStep:
    return train_pairs(MODEL, wave(0.0), config, microbatches, num_pairs=len(PAIRS), chunk_tokens=8)


def means() -> tuple[list[float], list[float]]:
    """Mean log-probability of a token of every chosen and of every rejected answer, one pair at a time."""
    model = build_frozen_model(MODEL, wave(0.0).items(), torch.device("cpu"), torch.float32)
    dpo = DPOConfig(reference_free=True).build()
    averages: tuple[list[float], list[float]] = ([], [])
    for pair in PAIRS:
        batch = pair_batch([[pair]], seq_len=64)
        out = model.forward_batch(batch)
        assert isinstance(out, ModelOut)
        pair_sums = dpo.pairs(out, batch)
        averages[0].append(float(pair_sums.chosen[0, 0] / pair_sums.chosen_length[0, 0]))
        averages[1].append(float(pair_sums.rejected[0, 0] / pair_sums.rejected_length[0, 0]))
    return averages


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
@pytest.mark.parametrize(("kind", "scale"), [("orpo", 0.3), ("simpo", 1.7)])
def test_the_loss_is_the_formula_however_pairs_are_packed(
    kind: str, scale: float, layout: str
) -> None:
    microbatches = [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)]
    step = train(CONFIGS[kind], microbatches)
    assert step.loss == pytest.approx(by_hand(kind), abs=1e-6)
    chosen, rejected = means()
    reward = scale * sum(chosen) / len(chosen)
    assert step.metrics["rewards/chosen"] == pytest.approx(reward, abs=1e-6)
    num_right = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    assert step.metrics["rewards/accuracies"] == pytest.approx(num_right / len(PAIRS))
    assert "nll" not in step.metrics, "a validation would report it as its loss"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_orpo_reports_the_likelihood_of_chosen_answers(layout: str) -> None:
    step = train(CONFIGS["orpo"], [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)])
    chosen, _ = means()
    assert step.metrics["nll/chosen"] == pytest.approx(-sum(chosen) / len(chosen), abs=1e-6)


@pytest.mark.parametrize("kind", CONFIGS)
def test_microbatches_and_empty_rows_do_not_change_orpo_or_simpo(kind: str) -> None:
    rows = [PAIRS[:2], PAIRS[2:]]
    whole = train(CONFIGS[kind], [pair_batch(rows, seq_len=64)])
    divided = train(CONFIGS[kind], [pair_batch([row], seq_len=64) for row in (*rows, [])])
    assert divided.loss == pytest.approx(whole.loss, abs=1e-6)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(divided.gradients[name], gradient, rtol=1e-5, atol=1e-6)
        assert torch.isfinite(divided.gradients[name]).all(), name


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
    rest = _log_rest(x)
    rest.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(rest).all()
    assert torch.isfinite(x.grad).all()
    right = torch.log(-torch.expm1(x.detach()[2:].double()))
    torch.testing.assert_close(rest[2:].double(), right, rtol=1e-6, atol=1e-7)
