"""Rotary angles counted by hand at the lengths where they change."""

import math
from typing import Any

import pytest
import torch

from headway.model.config import ModelConfig
from headway.model.rope import Rotation, document_lengths, inverse_frequencies

THETA = 100.0
HEAD = 4
SHORT = (1.0, 2.0)
LONG = (3.0, 5.0)
PLANE = (1.0, 1 / 10)
"""Frequencies of the two planes: 100^0 and 100^(-1/2)."""


def model_of(**scaling: Any) -> ModelConfig:
    shape = {
        "hidden_size": 2 * HEAD,
        "num_layers": 1,
        "num_heads": 2,
        "ffn_size": 8,
        "vocab_size": 8,
        "max_seq_len": 64,
    }
    return ModelConfig.model_validate({**shape, "rope_theta": THETA, "rope_scaling": scaling})


def longrope(original: int) -> Rotation:
    return Rotation(
        model_of(
            kind="longrope",
            factor=1.0,
            original_max_seq_len=original,
            short_factor=SHORT,
            long_factor=LONG,
        )
    )


def cosines(positions: list[int], factors: tuple[float, float]) -> list[list[float]]:
    return [
        [math.cos(position * plane / factor) for plane, factor in zip(PLANE, factors, strict=True)]
        for position in positions
    ]


def test_a_document_of_exactly_the_original_length_is_short_and_one_token_more_is_long() -> None:
    rotation = longrope(8)
    position = torch.tensor([[*range(8), *range(9), 0, *range(3)]])
    cos, sin = rotation(position)
    expected = [
        *cosines(list(range(8)), SHORT),
        *cosines(list(range(9)), LONG),
        *cosines([0], SHORT),
        *cosines(list(range(3)), SHORT),
    ]
    torch.testing.assert_close(cos[0], torch.tensor(expected))
    assert float(sin[0, 9, 0]) == pytest.approx(math.sin(1 / 3))
    assert float(sin[0, 1, 0]) == pytest.approx(math.sin(1.0))


def test_a_cache_of_exactly_the_original_length_is_short() -> None:
    rotation = longrope(8)
    position = torch.tensor([[7]])
    for capacity, factors in ((7, SHORT), (8, SHORT), (9, LONG)):
        torch.testing.assert_close(
            rotation(position, capacity)[0][0], torch.tensor(cosines([7], factors))
        )


def test_documents_of_one_token_have_a_length_of_their_own() -> None:
    position = torch.tensor([[0, 0, 0, 1, 0, 0, 1, 2]])
    assert document_lengths(position).tolist() == [[1, 1, 2, 2, 1, 3, 3, 3]]


def test_a_ramp_of_yarn_may_end_behind_the_last_plane() -> None:
    # a plane turns once over 2048 tokens at 2 ln(2048 / 2 pi) / ln(100) = 2.5, rounded up to 3, and 200 times at 0.2, rounded down to 0:
    # the second of two planes is a third of the way from its own frequency to a quarter of it
    model = model_of(
        kind="yarn", factor=4.0, original_max_seq_len=2048, beta_fast=200.0, beta_slow=1.0
    )
    assert inverse_frequencies(model).tolist() == pytest.approx(
        [1.0, 0.1 * (2 / 3 + 1 / 3 / 4)], rel=1e-6
    )
