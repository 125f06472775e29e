"""Compiles an elementwise update over flat tensors: on CUDA one kernel per tensor, on the CPU plain
torch a piece at a time.

A rule is `rule(tensors, numbers)`: `tensors` are flat and equally long, some are changed in place;
`numbers` are 0-dim tensors on the same device, so that no value is compiled in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

PIECE = 1 << 20
"""Elements at a time on the CPU, so that temporaries stay small."""
Rule = Callable[[tuple[Tensor, ...], Any], None]


def run_elementwise(rule: Rule, tensors: Sequence[Tensor], numbers: Any) -> None:
    """Run a rule (a module's function, so that it is compiled once) over tensors of any one
    shape."""
    flat = tuple(tensor.view(-1) for tensor in tensors)
    if flat[0].is_cuda:
        # Lengths differ from bucket to bucket; one kernel serves all of them.
        for tensor in flat:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        _compiled(rule)(flat, numbers)
        return
    for start in range(0, flat[0].numel(), PIECE):
        rule(tuple(tensor[start : start + PIECE] for tensor in flat), numbers)


def on_device(device: torch.device, *values: float) -> list[Tensor]:
    """0-dim fp32 tensors, made without waiting for the device."""
    return [torch.full((), value, dtype=torch.float32, device=device) for value in values]


@cache
def _compiled(rule: Rule) -> Rule:
    return torch.compile(rule, fullgraph=True)
