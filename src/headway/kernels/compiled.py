"""torch.compile as the blocks of a model use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST_VARIANTS = 64
"""All blocks share their code, so the compiler counts the variants of all of them together: with gradients and without, trained or frozen,
a reference beside the model, every stage of a run. Its own limit of 8 would end such a run."""


def compile_half(half: Callable[..., Any], options: dict[str, Any] | None = None) -> Callable[..., Any]:
    """A half of a block as one graph per shape; anything that would break the graph is an error."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_VARIANTS)
    return torch.compile(half, fullgraph=True, dynamic=False, options=options)
