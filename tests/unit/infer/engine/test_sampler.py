"""Rows with different rules, chosen at once, get the tokens that `choose_alone` gives each of them."""

import random

import pytest
import torch
from support.plain_sampler import choose_alone

from headway.infer.engine import sampler
from headway.infer.engine.sampler import NO_TOKEN, RowChoice, choose_rows
from headway.infer.sampling import Sampling

RULES = [
    Sampling(),
    Sampling(1.0),
    Sampling(0.3, top_k=1),
    Sampling(0.7, top_k=20),
    Sampling(1.5, top_k=20, top_p=0.6),
    Sampling(1.0, top_p=0.9),
    Sampling(1.0, min_p=0.2),
    Sampling(1e-6),
    Sampling(50.0, top_k=5000),
]


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize("coarse", [True, False])
def test_each_row_is_chosen_as_it_is_alone(
    bounded: bool, coarse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampler, "MOST_LISTED", 64)
    rng = random.Random(1)
    generator = torch.Generator().manual_seed(2)
    rules = [
        rule for rule in RULES if not bounded or rule.temperature == 0 or (rule.top_k or 99) <= 64
    ]
    for _ in range(30):
        scores = 3 * torch.randn(len(rules), 300, generator=generator)
        if coarse:  # as bf16 logits: many equal scores, zeros of both signs
            scores = scores.round().mul(0.5)
            scores[:, ::7] *= -0.0
        scores[:, 280:] = -torch.inf
        draws = [rng.choice([0.0, rng.random(), 1 - 2**-53]) for _ in rules]
        rows = [RowChoice(0, rule, draw) for rule, draw in zip(rules, draws, strict=True)]
        expected = [
            int(choose_alone(scores[i : i + 1].clone(), rule, [draws[i]])[0])
            for i, rule in enumerate(rules)
        ]
        assert choose_rows(scores, rows).tolist() == expected


@pytest.mark.parametrize(
    "rule", [Sampling(), Sampling(0.8), Sampling(0.8, top_k=5), Sampling(0.8, top_p=0.5)]
)
def test_a_row_whose_scores_are_no_numbers_has_no_token_and_the_others_have_theirs(
    rule: Sampling,
) -> None:
    """On a GPU an index below zero would end the process, not raise."""
    scores = 3 * torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    expected = choose_rows(scores.clone(), [RowChoice(0, rule, 0.4)] * 4).tolist()
    scores[1] = torch.nan
    scores[2] = -torch.inf
    assert choose_rows(scores, [RowChoice(0, rule, 0.4)] * 4).tolist() == [
        expected[0],
        NO_TOKEN,
        NO_TOKEN,
        expected[3],
    ]
    scores[0, 7] = torch.inf
    largest = 7 if rule.temperature == 0 else NO_TOKEN
    assert choose_rows(scores, [RowChoice(0, rule, 0.4)] * 4)[0] == largest
