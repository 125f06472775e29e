"""The losses of preference pairs, against TRL's own numbers, against formulas in fp64, and however a step is cut."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.pairs import pair_batch
from support.trl_pairs import GOLDEN, LAYOUTS, MODEL, PAIRS, wave

from headway.data.batch import Batch, StepBatch, StepStats
from headway.errors import ConfigError
from headway.model.base import build_frozen_model
from headway.optim.adamw import Config as AdamW
from headway.parallel.assemble import assemble
from headway.parallel.collectives import DifferentiableCollectives, RankGroup
from headway.parallel.engine import EngineSpec
from headway.tasks.base import SURVEY, SeenRows, StepInfo
from headway.tasks.dpo import DPO, Config
from headway.tasks.preference.loss import PairColumns, Pairs, document_sums
from headway.train.frozen_model import score_with


def scored(
    config: Config, micro: list[Batch], *, reference_shift: float = 0.1
) -> tuple[float, float, dict[str, float], dict[str, Any]]:
    """Loss, gradient norm, metrics and gradients of one step over some microbatches."""
    device = torch.device("cpu")
    reference = build_frozen_model(MODEL, wave(reference_shift).items(), device, torch.float32)
    prepare = None if config.reference_free else score_with(reference, 8, PairColumns())
    engine: Any = assemble(EngineSpec(MODEL, config, AdamW(), chunk_tokens=8, prepare=prepare))
    engine.fill(wave(0.0).items())
    totals = {"pairs": float(len(PAIRS)), "targets": 1.0, "rows": 1.0}
    result = engine.forward_backward(
        StepBatch(tuple(micro), totals, StepStats(1, 1, 1, 1, 1, 0)),
        StepInfo(0, 1),
    )
    grads = {
        name: view.clone() for buffer in engine.buffers for name, view in buffer.gradients.items()
    }
    norm = torch.stack([grad.double().norm() for grad in grads.values()]).norm()
    metrics = {
        name: float(total) / float(weight) for name, (total, weight) in result.metrics.items()
    }
    return float(result.loss), float(norm), metrics, grads


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: f"{case['loss_type']}-{case['label_smoothing']}"
)
def test_losses_gradients_and_metrics_are_trls(case: dict[str, Any], layout: str) -> None:
    config = Config(
        loss_type=case["loss_type"], beta=GOLDEN["beta"], label_smoothing=case["label_smoothing"]
    )
    loss, norm, metrics, _ = scored(
        config, [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)]
    )
    assert loss == pytest.approx(case["loss"], abs=1e-6, rel=1e-6)
    assert norm == pytest.approx(case["grad_norm"], rel=1e-5)
    assert metrics == pytest.approx(case["metrics"], abs=2e-6, rel=1e-6)


@pytest.mark.parametrize(
    "loss_type", ["sigmoid", "robust", "hinge", "ipo", "kto_pair", "sppo_hard", "nca_pair"]
)
def test_cutting_a_step_into_microbatches_changes_nothing(loss_type: Any) -> None:
    config = Config(loss_type=loss_type, beta=0.3)
    whole = pair_batch([PAIRS[:2], PAIRS[2:3], PAIRS[3:], []], seq_len=48)
    parts = [pair_batch([row], seq_len=48) for row in (PAIRS[:2], PAIRS[2:3], PAIRS[3:], [])]
    right, got = scored(config, [whole]), scored(config, parts)
    assert got[0] == pytest.approx(right[0], abs=1e-6)
    assert got[2] == pytest.approx(right[2], abs=1e-5)
    for name, grad in right[3].items():
        torch.testing.assert_close(got[3][name], grad, rtol=1e-5, atol=1e-6)


def as_pairs(c: torch.Tensor, r: torch.Tensor, held: torch.Tensor) -> Pairs:
    ones = torch.ones_like(c)
    return Pairs(c, r, c, r, ones, ones, held)


@pytest.mark.parametrize("shift", [(0.7, 0.4), (-0.7, 0.4), (0.7, -0.4), (-0.7, -0.4)])
@pytest.mark.parametrize("parts", [1, 3])
def test_kto_pair_is_its_formula_in_fp64_through_the_means_too(
    shift: tuple[float, float], parts: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    c = (torch.randn(3, 4, generator=generator, dtype=torch.float64) + shift[0]).requires_grad_()
    r = (torch.randn(3, 4, generator=generator, dtype=torch.float64) + shift[1]).requires_grad_()
    held = torch.ones(3, 4, dtype=torch.float64)
    held[1, 2:] = 0
    beta, count = 0.4, held.sum()
    ours, theirs = (x[held > 0] for x in (c, r))
    mean_c, mean_r = ours.mean().clamp(min=0), theirs.mean().clamp(min=0)
    up, down = (
        1 - torch.sigmoid(beta * (ours - mean_r)),
        1 - torch.sigmoid(beta * (mean_c - theirs)),
    )
    right = torch.cat([up, down]).mean()
    wanted = torch.autograd.grad(right, [c, r])

    objective = Config(loss_type="kto_pair", beta=beta).build()
    survey = torch.stack([c, r, held], -1).flatten(0, 1).detach()
    total = torch.zeros((), dtype=torch.float64)
    for piece in torch.arange(3).chunk(parts):
        pairs = as_pairs(c[piece], r[piece], held[piece])
        at = StepInfo(0, 1, seen={} if parts == 1 else {SURVEY: SeenRows(survey)})
        total = total + (objective.per_pair(pairs, at) * pairs.is_pair).sum() / count
    assert total.item() == pytest.approx(right.item(), abs=1e-12)
    for got, one in zip(torch.autograd.grad(total, [c, r]), wanted, strict=True):
        torch.testing.assert_close(got, one, rtol=0, atol=1e-12)


def test_smoothed_sigmoid_is_its_formula_in_fp64() -> None:
    c, r = (
        torch.randn(5, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in (1, 2)
    )
    beta, e = 0.7, 0.15
    s = 1 / (1 + torch.exp(-beta * (c - r)))
    right = -(1 - e) * s.log() - e * (1 - s).log()
    got = (
        Config(beta=beta, label_smoothing=e)
        .build()
        .per_pair(as_pairs(c, r, torch.ones_like(c)), StepInfo(0, 1))
    )
    torch.testing.assert_close(got, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss_type", ["sigmoid", "kto_pair"])
def test_a_model_that_is_its_own_reference_starts_at_ln_2_or_one_half(loss_type: Any) -> None:
    loss, _, metrics, _ = scored(
        Config(loss_type=loss_type),
        [pair_batch([PAIRS], seq_len=64, max_documents=12)],
        reference_shift=0.0,
    )
    assert loss == pytest.approx(math.log(2) if loss_type == "sigmoid" else 0.5, abs=1e-6)
    assert metrics["rewards/margins"] == 0.0
    assert metrics["rewards/accuracies"] == 0.5, "neither answer is preferred"


def test_without_a_reference_the_log_probabilities_themselves_are_compared() -> None:
    micro = [pair_batch([PAIRS], seq_len=64, max_documents=12)]
    _, _, metrics, _ = scored(Config(reference_free=True, beta=0.5), micro)
    assert metrics["rewards/chosen"] == pytest.approx(0.5 * metrics["logps/chosen"])
    assert metrics["logps/chosen"] == pytest.approx(
        GOLDEN["cases"][0]["metrics"]["logps/chosen"], rel=1e-6
    )


def test_rows_without_pairs_and_weights_of_zero_count_for_nothing() -> None:
    objective = DPO(Config(reference_free=True))
    batch = pair_batch([PAIRS[:1], []], seq_len=32)
    silent = replace(batch, loss_weight=torch.zeros_like(batch.loss_weight))
    model = build_frozen_model(MODEL, wave(0.0).items(), torch.device("cpu"), torch.float32)
    out = model.forward_batch(batch)
    for one, count in ((batch, 1.0), (silent, 0.0)):
        loss = objective.loss(
            out,
            one,
            StepInfo(0, 1, training=False),
            DifferentiableCollectives(RankGroup()),
        )
        assert {float(weight) for _, weight in loss.metrics.values()} == {count}
        assert bool(loss.terms["dpo"].sum > 0) == bool(count)


def test_document_sums_are_sums_over_documents() -> None:
    batch = pair_batch([PAIRS[:2], PAIRS[2:3]], seq_len=32)
    lengths = document_sums(batch.loss_weight, batch)
    assert lengths[0].tolist() == [5, 2, 2, 5, 0, 0, 0, 0]
    assert lengths[1].tolist() == [3, 3, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing"),
        ({"reference_free": True, "reference": "runs/x"}, "reference_free"),
        ({"reference_free": True, "reference_logps": "cached"}, "reference_free"),
        ({"label_smoothing": 0.5}, "less than 0.5"),
        ({"loss_type": "exo"}, "sigmoid"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, Any], said: str
) -> None:
    from headway.config.load import validate

    with pytest.raises(ConfigError, match=said):
        validate(Config, settings)
