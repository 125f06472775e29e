"""Grouped products are differentiable by themselves, too: compilers ask whether they are."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headway.kernels.grouped import grouped_inputs, grouped_linear

ENDS = torch.tensor([3, 3, 7], dtype=torch.int32)
"""Two experts with rows and one without."""


@pytest.mark.parametrize(("product", "width"), [(grouped_linear, 5), (grouped_inputs, 4)])
def test_gradients_are_those_of_finite_differences(
    product: Callable[[Tensor, Tensor, Tensor], Tensor], width: int
) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(7, width, dtype=torch.float64, generator=draw).requires_grad_()
    weight = torch.randn(3, 4, 5, dtype=torch.float64, generator=draw).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, weight: product(x, weight, ENDS), (x, weight))


def test_a_result_needs_a_gradient_where_its_inputs_do() -> None:
    x = torch.randn(7, 5, requires_grad=True)
    assert grouped_linear(x, torch.randn(3, 4, 5), ENDS).requires_grad
