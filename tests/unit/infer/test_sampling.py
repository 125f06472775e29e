"""Sampling draws from the distribution it is given, cut as asked."""

import pytest
import torch

from headway.infer.engine.sampler import RowChoice, choose_rows
from headway.infer.sampling import Sampling

PROBABILITY = torch.tensor([0.4, 0.3, 0.2, 0.1])
DRAWS = [(i + 0.5) / 1000 for i in range(1000)]


def shares(sampling: Sampling) -> list[float]:
    scores = PROBABILITY.log().repeat(len(DRAWS), 1)
    tokens = choose_rows(scores, [RowChoice(0, sampling, draw) for draw in DRAWS])
    counts = torch.bincount(tokens, minlength=4)
    return (counts / len(DRAWS)).tolist()


def test_temperature_zero_takes_the_likeliest() -> None:
    assert shares(Sampling()) == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        (Sampling(1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1.0, top_k=9), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(1.0, top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(1.0, top_p=0.01), [1, 0, 0, 0]),
        (Sampling(1.0, top_k=3, top_p=0.65), [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_tokens_come_as_often_as_they_are_likely(sampling: Sampling, expected: list[float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=2e-3)


def test_the_extremes_of_a_draw_choose_a_possible_token() -> None:
    scores = torch.tensor([[0.0, -torch.inf, 0.0]]).repeat(2, 1)
    rows = [RowChoice(0, Sampling(1.0), draw) for draw in (0.0, 1 - 2**-53)]
    assert choose_rows(scores, rows).tolist() == [0, 2]


def test_a_draw_depends_on_seed_key_and_position() -> None:
    draws = {
        Sampling(1.0, seed=seed).draw(key, position)
        for seed in (0, 1)
        for key in ("a", "b")
        for position in (0, 1)
    }
    assert len(draws) == 8
    assert all(0 <= draw < 1 for draw in draws)
