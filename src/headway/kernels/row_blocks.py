"""Functions of tokens, computed for a fixed number of tokens at a time: what a token becomes then
does not depend on how many others are computed with it.

    x [N, ...] -> blocks of ROWS tokens, the last filled up with zeros -> function -> [N, ...]

A matrix product sums in an order that depends on its number of rows: of one row it is another
kernel than of many. Blocks of one size always take the same kernel. What is left is the place
of a token in its block; `place_matters` measures whether that changes a bit on this machine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS = 32
"""Tokens of a block."""


def by_rows(function: Callable[..., Tensor | tuple[Tensor, ...]], *tensors: Tensor) -> list[Tensor]:
    """The results [N, ...] of a function of tensors [N, ...], which is called with [ROWS, ...]."""
    size = tensors[0].shape[0]
    padding = -size % ROWS
    padded = [_filled(tensor, padding) for tensor in tensors]

    parts: list[tuple[Tensor, ...]] = []
    for begin in range(0, size + padding, ROWS):
        result = function(*(tensor[begin : begin + ROWS] for tensor in padded))
        if isinstance(result, Tensor):
            result = (result,)
        parts.append(result)
    return [torch.cat(results)[:size] for results in zip(*parts, strict=True)]


def _filled(tensor: Tensor, padding: int) -> Tensor:
    """[N + padding, ...] of [N, ...], with zeros behind the end."""
    if padding == 0:
        return tensor
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, padding))


def row_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 logits [N,V] of hidden states [N,D]."""
    return by_rows(lambda rows: (rows @ weight.t()).float(), hidden)[0]


def row_log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities [N] of targets [N] under fp32 logits [N,V]."""

    def of_block(some: Tensor, ids: Tensor) -> Tensor:
        return some.gather(1, ids[:, None])[:, 0] - torch.logsumexp(some, -1)

    return by_rows(of_block, logits, targets)[0]


@torch.no_grad()
def place_matters(function: Callable[..., Tensor | tuple[Tensor, ...]], *tensors: Tensor) -> bool:
    """Whether some token of a full block [ROWS, ...] has other bits at another place of it."""
    expected = by_rows(function, *tensors)
    for shift in range(1, ROWS):
        moved = by_rows(function, *(tensor.roll(shift, 0) for tensor in tensors))
        for got, right in zip(moved, expected, strict=True):
            if not torch.equal(got.roll(-shift, 0), right):
                return True
    return False
