"""Activations that backward computes again instead of keeping them; the model's own code knows nothing of it.

    whole blocks   only the input of a block is kept; backward runs the block's forward once more, with the same random numbers
    selective      of every half of a block, the results of matrix products are kept (and attention's q, k, v and o, which lie between the
                   halves); norms, rotations, activations and sums are computed again

Gradients are the same: on the CPU bit for bit, since the same operations run on the same numbers.

With compiled halves, selective recompute is a mark in the graph: the compiler keeps the marked results and fuses the rest into the backward
kernels. Whole blocks are recomputed around the compiled halves, so nothing compiles again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from headway.kernels.attention import AttentionMask
from headway.model.transformer import Block
from headway.parallel.config import MemoryConfig


def recompute_in_halves(block: Block, memory: MemoryConfig, *, compiled: bool) -> None:
    """Wrap the halves of a block if recompute is selective; before they are compiled."""
    if memory.recompute == "selective":
        if compiled:
            _quiet_compiler()
        block.before = _selective(block.before, block, compiled=compiled)
        block.after = _selective(block.after, block, compiled=compiled)


def recompute_whole(block: Block) -> None:
    """Keep only the block's input."""
    inner = block.forward

    def forward(x: Tensor, cos: Tensor, sin: Tensor, mask: AttentionMask) -> Tensor:
        if not torch.is_grad_enabled():
            return inner(x, cos, sin, mask)
        return checkpoint(inner, x, cos, sin, mask, use_reentrant=False, preserve_rng_state=_is_random(block))

    block.forward = forward


def _selective(half: Callable[..., Any], block: Block, *, compiled: bool) -> Callable[..., Any]:
    choose = partial(create_selective_checkpoint_contexts, partial(_policy, compiled))

    def wrapped(*inputs: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return half(*inputs)
        again = not compiled and _is_random(block)
        return checkpoint(half, *inputs, use_reentrant=False, preserve_rng_state=again, context_fn=choose)

    return wrapped


def _is_random(block: Block) -> bool:
    return block.training and block.dropout > 0


@cache
def _kept() -> frozenset[Any]:
    """Operations whose results are worth more than their bytes."""
    aten = torch.ops.aten
    return frozenset((aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._scaled_mm.default))


def _policy(compiled: bool, _context: object, operation: Any, *_inputs: object, **_options: object) -> CheckpointPolicy:
    # A compiled half keeps what was drawn at random; eager code draws it again from the same state, since it fills tensors in place.
    drawn = compiled and torch.Tag.nondeterministic_seeded in operation.tags
    return CheckpointPolicy.MUST_SAVE if drawn or operation in _kept() else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _quiet_compiler() -> None:
    """Keep the compiler from announcing, once per run, that marked regions must not change tensors in place; ours do not."""
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
