"""A Transformer that computes every token in the same bits, however many others are computed with it:
in a packed row that trains, in a piece of a prompt, in a decoding step.

    before and after attention    ROWS tokens at a time      kernels/row_blocks.py
    attention                     KEYS positions at a time   kernels/exact_attention.py
    logits, log-probabilities     ROWS tokens at a time      kernels/row_blocks.py

`make_exact` changes a model in place, before anything compiles or wraps its blocks; trainer and
inference engine each change theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import ConfigError
from headway.kernels.exact_attention import KEYS, attend_documents, attend_one, attend_piece
from headway.kernels.row_blocks import ROWS, by_rows, place_matters, row_logits
from headway.model.adapter.lora import AdaptedLinear

if TYPE_CHECKING:
    from headway.model.transformer import Transformer


def make_exact(model: Transformer) -> None:
    """Let a model compute in blocks of fixed size from now on."""
    for block in model.blocks().values():
        block.core = attend_documents
        adapted = [module for module in block.modules() if isinstance(module, AdaptedLinear)]
        for linear in adapted:
            linear.is_merged = True
        for method in model.BLOCK_METHODS:
            setattr(block, method, _token_wise(getattr(block, method), adapted))
    if hasattr(model.model, "norm"):
        norm = model.model.norm
        # An instance attribute: hooks of engines on the module stay where they are.
        norm.forward = _token_wise(norm.forward)
    model.is_exact = True


def _token_wise(
    function: Callable[..., Any], adapted: Sequence[AdaptedLinear] = ()
) -> Callable[..., Any]:
    """A function of tensors [B,T,...] that is called with [1,ROWS,...]. `adapted`: linears that
    merge their updates once for all of these calls."""

    def call(*tensors: Tensor) -> Any:
        shape = tensors[0].shape[:2]

        def of_block(*rows: Tensor) -> Tensor | tuple[Tensor, ...]:
            result = function(*(x[None] for x in rows))
            if isinstance(result, Tensor):
                return result[0]
            return tuple(x[0] for x in result)

        try:
            results = by_rows(of_block, *(x.flatten(0, 1) for x in tensors))
        finally:
            for linear in adapted:
                linear.merged = None
        # Copies: FSDP puts hooks on what a block returns, which a view would lose.
        results = [x.unflatten(0, shape).clone() for x in results]
        if len(results) == 1:
            return results[0]
        return tuple(results)

    return call


@torch.no_grad()
def check_machine(model: Transformer) -> None:
    """Refuse a machine on which the bits of a token depend on its place in a block."""
    config = model.config
    block = next(iter(model.blocks().values()))
    weight = model.head_weight
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        numbers = torch.randn(ROWS, *shape, generator=generator)
        return numbers.to(weight.device, weight.dtype)

    stream = drawn(config.hidden_size)
    heads = drawn(config.num_heads, config.head_size)
    turns = torch.rand(2, ROWS, config.rotary_size // 2, generator=generator).to(weight.device)

    def before(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        return tuple(y[0] for y in block.pre_attention(x[None], cos[None], sin[None]))

    def after(x: Tensor, o: Tensor) -> Tensor:
        result = block.post_attention(x[None], o[None])
        assert isinstance(result, Tensor)
        return result[0]

    def attention_differs() -> bool:
        """Of one token in a step and in a piece."""
        k, v = (drawn(config.kv_heads, config.head_size) for _ in range(2))
        together = attend_piece(heads, k, v, 0)

        def page(x: Tensor) -> Tensor:
            """[ROWS, KEYS, KV, hd]: the same page for every step."""
            return F.pad(x, (0, 0, 0, 0, 0, KEYS - ROWS)).expand(ROWS, -1, -1, -1)

        steps = attend_one(heads, page(k), page(v), torch.arange(ROWS, device=heads.device))
        return not torch.equal(together, steps)

    parts: dict[str, Callable[[], bool]] = {
        "the products before attention": lambda: place_matters(before, stream, *turns),
        "the products of attention": attention_differs,
        "the products after attention": lambda: place_matters(after, stream, heads),
        "logits": lambda: place_matters(lambda x: row_logits(x, weight), stream),
    }
    for name, is_unfit in parts.items():
        if is_unfit():
            raise ConfigError(
                f"rollout.exact is true; on this machine {name} give a token other bits at "
                f"another place in a block of {ROWS}. Set OMP_NUM_THREADS=1, or exact to false."
            )
