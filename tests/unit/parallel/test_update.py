"""The norm that clips: exact for large models, and the same however their gradients are cut."""

import pytest
import torch

from headway.parallel.base import square_norm


def test_the_norm_of_fifty_million_elements_is_exact() -> None:
    gradient = torch.full((50_000_000,), 1.1)
    square = float(gradient[0]) ** 2 * 50_000_000
    assert float(square_norm([gradient])) == pytest.approx(square, rel=1e-6)
    assert float(torch.linalg.vector_norm(gradient)) ** 2 != pytest.approx(
        square, rel=1e-2
    )  # what one sum in fp32 makes of it


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
