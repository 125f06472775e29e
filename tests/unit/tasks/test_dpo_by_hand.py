"""Every loss of a pair in numbers counted by hand, on both sides of the margin."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.batches import make_batch

from headway.tasks.base import StepInfo
from headway.tasks.dpo import Config
from headway.tasks.preference.loss import Pairs

LN2 = math.log(2)


def loss(chosen: float, rejected: float, **settings: object) -> float:
    """Of one pair whose answers gained so much over the reference, 4 and 2 tokens long."""
    c = torch.tensor([[chosen]])
    r = torch.tensor([[rejected]])
    weight = torch.ones(1, 1)
    pairs = Pairs(c, r, c, r, 4 * weight, 2 * weight, weight)
    return float(
        Config.model_validate({"beta": 0.5, **settings}).build().per_pair(pairs, StepInfo(0, 1))
    )


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


@pytest.mark.parametrize(
    ("settings", "chosen", "rejected", "expected"),
    [
        ({}, 0.0, 0.0, LN2),
        ({}, 3.0, 1.0, -log_sigmoid(1.0)),
        ({"label_smoothing": 0.1}, 3.0, 1.0, -0.9 * log_sigmoid(1.0) - 0.1 * log_sigmoid(-1.0)),
        (
            {"loss_type": "robust", "label_smoothing": 0.1},
            3.0,
            1.0,
            (-0.9 * log_sigmoid(1.0) + 0.1 * log_sigmoid(-1.0)) / 0.8,
        ),
        ({"loss_type": "hinge"}, 1.0, 0.0, 0.5),
        ({"loss_type": "hinge"}, 2.0, 0.0, 0.0),
        (
            {"loss_type": "hinge"},
            6.0,
            0.0,
            0.0,
        ),  # a margin beyond 1 costs nothing, and earns nothing
        ({"loss_type": "hinge"}, 0.0, 2.0, 2.0),
        ({"loss_type": "ipo"}, 8.0, 2.0, 0.0),  # 8 / 4 - 2 / 2 is 1 = 1 / (2 beta)
        ({"loss_type": "ipo"}, 8.0, 4.0, 1.0),
        ({"loss_type": "sppo_hard"}, 1.0, -1.0, 0.0),
        ({"loss_type": "sppo_hard"}, 3.0, 0.0, 4.0 + 1.0),
        ({"loss_type": "nca_pair"}, 0.0, 0.0, 2 * LN2),
        (
            {"loss_type": "nca_pair"},
            2.0,
            -4.0,
            -log_sigmoid(1.0) - 0.5 * log_sigmoid(-1.0) - 0.5 * log_sigmoid(2.0),
        ),
    ],
)
def test_the_loss_of_a_pair_is_its_formula_in_numbers(
    settings: dict[str, object], chosen: float, rejected: float, expected: float
) -> None:
    assert loss(chosen, rejected, **settings) == pytest.approx(expected, abs=1e-6)


def test_a_pair_needs_targets_on_both_sides() -> None:
    # three pairs of answers with one target each; the second has none in its rejected answer, the third none in its chosen one
    batch = make_batch([[2] * 6], seq_len=14, vocab=8)
    weight = batch.loss_weight.clone()
    weight[0, 6] = weight[0, 8] = 0.0
    log_probs = torch.zeros(1, 14)
    log_probs[0, :12:2] = torch.tensor([-1.0, -3.0, -5.0, -5.0, -5.0, -5.0])
    out: Any = SimpleNamespace(head=SimpleNamespace(scores=lambda targets: (log_probs, None)))
    objective = Config(beta=0.5).build()
    loss_terms = objective.loss(out, replace(batch, loss_weight=weight), StepInfo(0, 1), None)  # type: ignore[arg-type]
    assert objective.pairs(out, replace(batch, loss_weight=weight)).is_pair.tolist() == [
        [1, 0, 0, 0]
    ]
    assert float(loss_terms.terms["dpo"].sum) == pytest.approx(-log_sigmoid(0.5 * 2.0))
    assert float(loss_terms.metrics["rewards/margins"][0]) == pytest.approx(1.0)
    assert float(loss_terms.metrics["rewards/margins"][1]) == 1.0
