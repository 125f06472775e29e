"""Every loss of a pair in numbers counted by hand, on both sides of the margin."""

import math

import pytest
import torch

from headway.objective.base import StepInfo
from headway.objective.dpo import Config
from headway.objective.pairs import Pairs

LN2 = math.log(2)


def loss(chosen: float, rejected: float, **settings: object) -> float:
    """Of one pair whose answers gained so much over the reference, 4 and 2 tokens long."""
    c, r, one = torch.tensor([[chosen]]), torch.tensor([[rejected]]), torch.ones(1, 1)
    pairs = Pairs(c, r, c, r, 4 * one, 2 * one, one)
    return float(Config.model_validate({"beta": 0.5, **settings}).build().per_pair(pairs, StepInfo(0, 1)))


def log_sigmoid(x: float) -> float:
    return -math.log(1 + math.exp(-x))


@pytest.mark.parametrize(
    ("settings", "chosen", "rejected", "expected"),
    [
        ({}, 0.0, 0.0, LN2),
        ({}, 3.0, 1.0, -log_sigmoid(1.0)),
        ({"label_smoothing": 0.1}, 3.0, 1.0, -0.9 * log_sigmoid(1.0) - 0.1 * log_sigmoid(-1.0)),
        ({"loss_type": "robust", "label_smoothing": 0.1}, 3.0, 1.0, (-0.9 * log_sigmoid(1.0) + 0.1 * log_sigmoid(-1.0)) / 0.8),
        ({"loss_type": "hinge"}, 1.0, 0.0, 0.5),
        ({"loss_type": "hinge"}, 2.0, 0.0, 0.0),
        ({"loss_type": "hinge"}, 6.0, 0.0, 0.0),  # a margin beyond 1 costs nothing, and earns nothing
        ({"loss_type": "hinge"}, 0.0, 2.0, 2.0),
        ({"loss_type": "ipo"}, 8.0, 2.0, 0.0),  # 8 / 4 - 2 / 2 is 1 = 1 / (2 beta)
        ({"loss_type": "ipo"}, 8.0, 4.0, 1.0),
        ({"loss_type": "sppo_hard"}, 1.0, -1.0, 0.0),
        ({"loss_type": "sppo_hard"}, 3.0, 0.0, 4.0 + 1.0),
        ({"loss_type": "nca_pair"}, 0.0, 0.0, 2 * LN2),
        ({"loss_type": "nca_pair"}, 2.0, -4.0, -log_sigmoid(1.0) - 0.5 * log_sigmoid(-1.0) - 0.5 * log_sigmoid(2.0)),
    ],
)
def test_the_loss_of_a_pair_is_its_formula_in_numbers(settings: dict[str, object], chosen: float, rejected: float, expected: float) -> None:
    assert loss(chosen, rejected, **settings) == pytest.approx(expected, abs=1e-6)
