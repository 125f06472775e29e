"""The losses of preference pairs, against TRL's own numbers, against formulas in fp64, and however a step is cut."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.pair_steps import PairStep, train_pairs
from support.preference_pairs import pair_batch
from support.trl_pairs import GOLDEN, LAYOUTS, MODEL, PAIRS, wave

from headway.data.batch import Batch
from headway.errors import ConfigError
from headway.model.base import build_frozen_model
from headway.parallel.collectives import DifferentiableCollectives, RankGroup
from headway.tasks.base import SeenRows, StepInfo
from headway.tasks.dpo import DPO, GAINS, Config
from headway.tasks.preference.loss import PairColumns, Pairs
from headway.train.frozen_model import score_with


def train(config: Config, microbatches: list[Batch], *, reference_shift: float = 0.1) -> PairStep:
    """One step against a reference whose weights are shifted."""
    prepare = None
    if not config.reference_free:
        weights = wave(reference_shift).items()
        reference = build_frozen_model(MODEL, weights, torch.device("cpu"), torch.float32)
        prepare = score_with(reference, 8, PairColumns())
    return train_pairs(
        MODEL,
        wave(0.0),
        config,
        microbatches,
        num_pairs=len(PAIRS),
        chunk_tokens=8,
        prepare=prepare,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "case", GOLDEN["cases"], ids=lambda case: f"{case['loss_type']}-{case['label_smoothing']}"
)
def test_losses_gradients_and_metrics_are_trls(case: dict[str, Any], layout: str) -> None:
    config = Config(
        loss_type=case["loss_type"], beta=GOLDEN["beta"], label_smoothing=case["label_smoothing"]
    )
    step = train(config, [pair_batch(LAYOUTS[layout], seq_len=64, max_documents=12)])
    assert step.loss == pytest.approx(case["loss"], abs=1e-6, rel=1e-6)
    assert step.gradient_norm == pytest.approx(case["grad_norm"], rel=1e-5)
    assert step.metrics == pytest.approx(case["metrics"], abs=2e-6, rel=1e-6)


@pytest.mark.parametrize(
    "loss_type", ["sigmoid", "robust", "hinge", "ipo", "kto_pair", "sppo_hard", "nca_pair"]
)
def test_cutting_a_step_into_microbatches_changes_nothing(loss_type: Any) -> None:
    config = Config(loss_type=loss_type, beta=0.3)
    rows = [PAIRS[:2], PAIRS[2:3], PAIRS[3:], []]
    whole = train(config, [pair_batch(rows, seq_len=48)])
    divided = train(config, [pair_batch([row], seq_len=48) for row in rows])
    assert divided.loss == pytest.approx(whole.loss, abs=1e-6)
    assert divided.metrics == pytest.approx(whole.metrics, abs=1e-5)
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(divided.gradients[name], gradient, rtol=1e-5, atol=1e-6)


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
    is_pair = torch.ones(3, 4, dtype=torch.float64)
    is_pair[1, 2:] = 0
    beta = 0.4

    chosen = c[is_pair > 0]
    rejected = r[is_pair > 0]
    mean_chosen = chosen.mean().clamp(min=0)
    mean_rejected = rejected.mean().clamp(min=0)
    chosen_losses = 1 - torch.sigmoid(beta * (chosen - mean_rejected))
    rejected_losses = 1 - torch.sigmoid(beta * (mean_chosen - rejected))
    expected = torch.cat([chosen_losses, rejected_losses]).mean()

    objective = Config(loss_type="kto_pair", beta=beta).build()
    seen = {}
    if parts > 1:
        # The means are those of the whole step, which a first pass has seen before.
        first_pass = torch.stack([c, r, is_pair], -1).flatten(0, 1).detach()
        seen = {GAINS: SeenRows(first_pass)}
    total = torch.zeros((), dtype=torch.float64)
    for rows in torch.arange(3).chunk(parts):
        pairs = as_pairs(c[rows], r[rows], is_pair[rows])
        losses = objective.per_pair(pairs, StepInfo(0, 1, seen=seen)) * pairs.is_pair
        total = total + losses.sum() / is_pair.sum()

    assert total.item() == pytest.approx(expected.item(), abs=1e-12)
    gradients = torch.autograd.grad(total, [c, r])
    expected_gradients = torch.autograd.grad(expected, [c, r])
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=1e-12)


def test_smoothed_sigmoid_is_its_formula_in_fp64() -> None:
    generator = torch.Generator().manual_seed(1)
    chosen = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    rejected = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    beta = 0.7
    smoothing = 0.15
    preferred = 1 / (1 + torch.exp(-beta * (chosen - rejected)))
    expected = -(1 - smoothing) * preferred.log() - smoothing * (1 - preferred).log()
    objective = Config(beta=beta, label_smoothing=smoothing).build()
    pairs = as_pairs(chosen, rejected, torch.ones_like(chosen))
    losses = objective.per_pair(pairs, StepInfo(0, 1))
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("loss_type", "expected"), [("sigmoid", math.log(2)), ("kto_pair", 0.5)])
def test_a_model_that_is_its_own_reference_starts_at_ln_2_or_one_half(
    loss_type: Any, expected: float
) -> None:
    microbatches = [pair_batch([PAIRS], seq_len=64, max_documents=12)]
    step = train(Config(loss_type=loss_type), microbatches, reference_shift=0.0)
    assert step.loss == pytest.approx(expected, abs=1e-6)
    assert step.metrics["rewards/margins"] == 0.0
    assert step.metrics["rewards/accuracies"] == 0.5, "neither answer is preferred"


def test_without_a_reference_the_log_probabilities_themselves_are_compared() -> None:
    microbatches = [pair_batch([PAIRS], seq_len=64, max_documents=12)]
    metrics = train(Config(reference_free=True, beta=0.5), microbatches).metrics
    expected = GOLDEN["cases"][0]["metrics"]["logps/chosen"]
    assert metrics["logps/chosen"] == pytest.approx(expected, rel=1e-6)
    assert metrics["rewards/chosen"] == pytest.approx(0.5 * metrics["logps/chosen"])


def test_rows_without_pairs_and_weights_of_zero_count_for_nothing() -> None:
    objective = DPO(Config(reference_free=True))
    batch = pair_batch([PAIRS[:1], []], seq_len=32)
    silent = replace(batch, loss_weight=torch.zeros_like(batch.loss_weight))
    model = build_frozen_model(MODEL, wave(0.0).items(), torch.device("cpu"), torch.float32)
    out = model.forward_batch(batch)
    for microbatch, count in ((batch, 1.0), (silent, 0.0)):
        loss = objective.loss(
            out,
            microbatch,
            StepInfo(0, 1, training=False),
            DifferentiableCollectives(RankGroup()),
        )
        assert {float(weight) for _, weight in loss.metrics.values()} == {count}
        assert bool(loss.terms["dpo"].sum > 0) == bool(count)


def test_document_sums_are_sums_over_documents() -> None:
    batch = pair_batch([PAIRS[:2], PAIRS[2:3]], seq_len=32)
    lengths = batch.sum_documents(batch.loss_weight)
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
