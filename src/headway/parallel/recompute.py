"""Activations that backward recomputes instead of storing; the model's code is unchanged.

    whole blocks   only the input of a block is stored; backward runs the block's forward once
                   more, with the same random numbers
    selective      of every half of a block, the results of matrix products are stored (and
                   attention's q, k, v and o, which are between the halves); norms, rotations,
                   activations and sums are computed again

Gradients are the same: on the CPU bit for bit, since the same operations run on the same numbers.

With compiled halves, selective recompute is a mark in the graph: the compiler keeps the marked
results and fuses the rest into the backward kernels. Whole blocks are recomputed around the
compiled halves, so nothing compiles again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from headway.kernels.grouped import GROUPED
from headway.kernels.packed_weight import PRODUCT, UPDATED, recomputing


def recompute_method(block: nn.Module, method: str, *, is_random: bool, compiled: bool) -> None:
    """Recompute one method of a block selectively; called before the method is compiled."""
    if compiled:
        _quiet_compiler()
    inner: Callable[..., Any] = getattr(block, method)
    choose = partial(create_selective_checkpoint_contexts, partial(_policy, compiled))

    def wrapped(*inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return inner(*inputs, **named)
        # The generator's state is saved only where something is drawn. A compiled half keeps what
        # it has drawn (`_policy`).
        restore = not compiled and is_random and block.training
        return checkpoint(
            inner,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=restore,
            context_fn=choose,
            **named,
        )

    setattr(block, method, wrapped)


def recompute_whole(block: nn.Module, *, is_random: bool) -> None:
    """Keep only the block's input."""
    prepare = getattr(block, "before_recompute", None)
    if prepare is not None:
        prepare()
    inner = block.forward

    def forward(*inputs: Any, **named: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return inner(*inputs, **named)
        return checkpoint(
            inner,
            *inputs,
            use_reentrant=False,
            preserve_rng_state=is_random and block.training,
            context_fn=_contexts,
            **named,
        )

    block.forward = forward


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward and of its repetition, in which some products skip their work."""
    return nullcontext(), recomputing()


@cache
def _kept() -> frozenset[Any]:
    """Operations whose results are worth more than their bytes."""
    aten = torch.ops.aten
    plain = (
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten._scaled_mm.default,
    )
    return frozenset((*plain, aten._grouped_mm.default, GROUPED, PRODUCT, UPDATED))


def _policy(
    compiled: bool, _context: object, operation: Any, *_inputs: object, **_options: object
) -> CheckpointPolicy:
    # A compiled half keeps what was drawn at random; eager code draws it again from the same state,
    # since it fills tensors in place.
    drawn = compiled and torch.Tag.nondeterministic_seeded in operation.tags
    if drawn or operation in _kept():
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@cache
def _quiet_compiler() -> None:
    """Silence the compiler's warning that marked regions must not change tensors in place.

    Ours do not.
    """
    logger = logging.getLogger("torch._higher_order_ops.wrap")
    logger.addFilter(lambda record: "context_fn is passed" not in record.getMessage())
