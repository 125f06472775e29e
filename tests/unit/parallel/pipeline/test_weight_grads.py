"""The divided backward of the zero-bubble schedule, against plain autograd: results, biases and gradients."""

import copy
from typing import Any

import torch
from torch import nn

from headway.parallel.pipeline.weight_grads import WeightGradQueue


class Blocks(nn.Module):
    """Two linears in a block, one with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False))

    def blocks(self) -> dict[str, nn.Module]:
        return {"block": self.block}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x)


def test_a_divided_linear_adds_its_bias_and_gives_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    divided: Any = copy.deepcopy(plain)
    queue = WeightGradQueue()
    assert queue.divide(divided) == 2
    x = torch.randn(2, 5, 3, requires_grad=True)
    other = torch.randn(2, 5, 3)
    other.copy_(x.detach())
    other.requires_grad_()
    expected = plain(x)
    output = divided(other)
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    with queue.collecting() as later:
        output.backward(upstream)
    # gradients of inputs and biases are there; those of matrices are computed when W runs
    torch.testing.assert_close(other.grad, x.grad)
    torch.testing.assert_close(divided.block[0].bias.grad, plain.block[0].bias.grad)
    assert divided.block[0].weight.grad is None
    assert len(later) == 2
    for compute in later:
        compute()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(dict(divided.named_parameters())[name].grad, parameter.grad)


def test_without_a_gradient_of_the_input_nothing_is_divided_and_the_bias_counts() -> None:
    torch.manual_seed(0)
    plain = Blocks()
    divided: Any = copy.deepcopy(plain)
    WeightGradQueue().divide(divided)
    x = torch.randn(2, 3)
    torch.testing.assert_close(divided(x), plain(x))
    with torch.no_grad():
        torch.testing.assert_close(divided(x), plain(x))
