"""The norm that clips: exact, the same however gradients are cut, and without the loss scale. Frozen parameters are loaded too."""

import math

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine

from headway.parallel.base import clip_guard, square_norm
from headway.parallel.collectives import RankGroup


@pytest.mark.parametrize(
    ("scaled_norm", "clip", "scale", "norm", "divisor"),
    [
        (8.0, 1.0, 4.0, 2.0, 8.0),  # a norm of 2 is halved; the scale goes too
        (
            2.0,
            1.0,
            4.0,
            0.5,
            4.0,
        ),  # below the clip nothing but the scale goes: small gradients stay small
        (0.5, 1.0, 1.0, 0.5, 1.0),
        (3.0, 1.5, 1.0, 3.0, 2.0),
        (65536.0, 2.0, 65536.0, 1.0, 65536.0),  # only the scale makes this norm large
        (8.0, None, 4.0, 2.0, 4.0),
    ],
)
def test_gradients_above_the_clip_come_down_to_it_and_the_others_stay(
    scaled_norm: float, clip: float | None, scale: float, norm: float, divisor: float
) -> None:
    seen, guard, overflow = clip_guard(torch.tensor(scaled_norm), clip, torch.tensor(scale))
    assert (float(seen), float(overflow), float(guard.found_inf)) == (norm, 0.0, 0.0)
    assert float(guard.scale) == pytest.approx(divisor, rel=2e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_norm_that_is_not_finite_skips_the_step_and_is_an_overflow(bad: float) -> None:
    _, guard, overflow = clip_guard(torch.tensor(bad), 1.0, torch.tensor(8.0))
    assert float(guard.found_inf) == float(overflow) == 1.0
    assert math.isfinite(float(guard.scale))


def test_a_step_skipped_on_purpose_is_no_overflow() -> None:
    _, guard, overflow = clip_guard(torch.tensor(2.0), 1.0, torch.tensor(1.0), torch.tensor(1.0))
    assert float(guard.found_inf) == 1.0
    assert float(overflow) == 0.0
    _, guard, _ = clip_guard(torch.tensor(2.0), 1.0, torch.tensor(1.0), torch.tensor(0.0))
    assert float(guard.found_inf) == 0.0


def test_the_norm_of_fifty_million_elements_is_exact() -> None:
    gradient = torch.full((50_000_000,), 1.1)
    square = float(gradient[0]) ** 2 * 50_000_000
    assert float(square_norm([gradient])) == pytest.approx(square, rel=1e-6)
    # what one sum in fp32 makes of it
    assert float(torch.linalg.vector_norm(gradient)) ** 2 != pytest.approx(square, rel=1e-2)


@pytest.mark.parametrize("cuts", [[1], [7, 1000], [1024, 100_000, 199_999]])
def test_cutting_the_gradients_does_not_change_their_norm(cuts: list[int]) -> None:
    whole = torch.randn(200_003, generator=torch.Generator().manual_seed(1))
    expected = float(whole.double().square().sum())
    parts = [*whole.tensor_split(cuts), torch.empty(0)]
    assert float(square_norm(parts)) == pytest.approx(expected, rel=1e-8)
    assert sum(float(square_norm([part])) for part in parts) == pytest.approx(expected, rel=1e-8)


def test_what_is_not_finite_stays_so() -> None:
    assert torch.isinf(square_norm([torch.ones(3000), torch.tensor([float("inf")])]))
    assert torch.isnan(square_norm([torch.ones(3000), torch.tensor([float("nan")])]))


def test_frozen_parameters_come_back_from_a_checkpoint_too() -> None:
    setup = Setup(config=CONFIG.with_(dropout=0.0), freeze=("layers.0", "embeddings"))
    engine = make_engine(RankGroup(), setup)
    # weights that no seed gives
    engine.fill([(name, value + 1.0) for name, value in engine.masters.items()])
    wanted = {name: value.clone() for name, value in engine.masters.items()}
    saved = {(name, role): boxes[0][1].clone() for name, role, _, boxes in engine.tensors()}
    assert {role for name, role in saved if "layers.0" in name} == {"param"}
    other = make_engine(RankGroup(), setup)
    other.load(lambda name, role, offset, shape: saved[name, role], engine.scalars())
    assert all(torch.equal(other.masters[name], value) for name, value in wanted.items())
    assert all(
        torch.equal(parameter, wanted[name]) for name, parameter in other.model.named_parameters()
    )
