"""Context parallelism (Ulysses): the tokens of every row are split over ranks.

Attention, which needs all of them, is split by heads.

Shapes: B rows, T tokens of a row, P ranks, t = T / P, H query heads, KV key and value heads, hd
head width.

    halves of a block    q [B,t,H,hd], k and v [B,t,KV,hd]            this rank's tokens, all heads
         all-to-all
    core                 q [B,T,H/P,hd], k and v [B,T,KV/P,hd] -> o   all tokens, this rank's heads,
                                                                      the mask of whole rows
         all-to-all
    halves of a block    o [B,t,H,hd]

Each KV head is sent once, together with its query heads. The backward of either exchange is the
other one. A token's loss and a head's gate belong to one rank alone, so gradients are the plain sum
over ranks, as everywhere.

More ranks than KV heads: the largest number of ranks that divides both exchanges heads as above;
these groups form a ring (ring.py).

    context 8, 2 KV heads    4 groups in a ring, each of 2 ranks that exchange heads;
                             rank = group * 2 + position

DeepSpeed Ulysses: Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from headway.data.batch import Batch
from headway.errors import ParallelError
from headway.kernels.attention import AttentionMask, ScoreRule
from headway.model.base import AttentionCore, Model
from headway.model.projector import SLOT
from headway.parallel.collectives import RankGroup, RankGroups, split_context
from headway.parallel.mesh import ring_ranks

PER_TOKEN = ("tokens", "targets", "loss_weight", "position")
"""The columns of a batch with a value for every token, [B,T]."""
PER_TOKEN_EXTRA = (SLOT,)
"""As PER_TOKEN, of `Batch.extra`; every rank has all of its other columns."""


def part_of(batch: Batch, context: RankGroup, ring: int = 1) -> Batch:
    """This rank's tokens of a microbatch.

    Documents and their bounds, from which the mask is made, stay those of whole rows.
    """
    if context.size == 1:
        return batch
    length = batch.tokens.shape[1]
    local_length = length // context.size
    begin = context.rank * local_length
    # In a ring, a rank's tokens are two chunks of a row, which balances causal work (ring.py).
    index = None
    if ring != 1:
        index = _ring_index(length, ring, batch.tokens.device)[begin : begin + local_length]

    def part(column: Tensor) -> Tensor:
        if index is None:
            return column[:, begin:][:, :local_length]
        return column.index_select(1, index)

    extra = {
        name: part(column) if name in PER_TOKEN_EXTRA else column
        for name, column in batch.extra.items()
    }
    return replace(batch, **{name: part(getattr(batch, name)) for name in PER_TOKEN}, extra=extra)


@functools.lru_cache(maxsize=4)
def _ring_index(length: int, ring: int, device: torch.device) -> Tensor:
    """`ring_order` on the device; every microbatch of a run asks for the same."""
    from headway.parallel.ring import ring_order

    return torch.tensor(ring_order(length, ring), device=device)


def share_rows(model: Model, ranks: RankGroups, heads: slice, attention: str = "auto") -> None:
    """Let a model with these KV heads run on parts of rows.

    Exchanges are put around every attention core, and gates are drawn for this rank's heads.
    """
    context = ranks.context
    if context.size == 1:
        return
    kv_heads = heads.stop - heads.start
    ring = ring_ranks(context.size, model.config.kv_heads, ranks.tensor.size)
    if ring > 1 and attention != "auto":
        raise ParallelError(
            f"kernels.attention is {attention!r} and parallel.context is {context.size}, beyond "
            f"the {kv_heads} KV heads of a rank; its ring has one way to compute attention. Use "
            "auto."
        )
    from headway.parallel.ring import RingCore

    ring_group, heads_group = split_context(ranks, ring)
    float32_names = {spec.name for spec in model.param_specs() if spec.keeps_float32}
    gates_train = any(
        parameter.requires_grad
        for name, parameter in model.named_parameters()
        if name in float32_names
    )

    def split_core(core: AttentionCore) -> ContextCore:
        if ring > 1:
            core = RingCore(ring_group)
        return ContextCore(core, heads_group, gates_train)

    local_heads = kv_heads // heads_group.size
    first = heads.start + heads_group.rank * local_heads
    model.shard_attention(split_core, slice(first, first + local_heads))


@dataclass(frozen=True)
class ContextCore:
    """Attention of parts of rows: an attention core of whole rows between two exchanges."""

    whole: AttentionCore
    group: RankGroup
    gates_train: bool = False

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: AttentionMask,
        *,
        window: int | None = None,
        rule: ScoreRule | None = None,
    ) -> Tensor:
        """o [B,t,H,hd].

        The sinks of a `rule` are those of all heads; their gradient is that of this rank's heads,
        and zero for others.
        """
        settings: dict[str, Any] = {"window": window}
        if rule is not None:
            local_heads = q.shape[2] // self.group.size
            sinks = None
            if rule.sinks is not None:
                sinks = rule.sinks[self.group.rank * local_heads :][:local_heads]
            settings["rule"] = replace(rule, sinks=sinks)
        if self.group.size == 1:
            return self.whole(q, k, v, mask, **settings)
        q, k, v = _ToHeads.apply(self.group, q, k, v)  # pyright: ignore[reportGeneralTypeIssues]
        o = self.whole(q, k, v, mask, **settings)
        if self.gates_train and torch.is_grad_enabled() and not o.requires_grad:
            # Nothing below trains and no gate of these heads is open, but another rank's may be: it
            # waits for this one's gradients of o.
            o = o.detach().requires_grad_()
        return _ToTokens.apply(self.group, o)  # pyright: ignore[reportReturnType]


class _ToHeads(torch.autograd.Function):
    """`to_heads`, whose backward is `to_tokens`."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return to_heads(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *to_tokens(grads, ctx.group)


class _ToTokens(torch.autograd.Function):
    """`to_tokens`, whose backward is `to_heads`."""

    @staticmethod
    def forward(ctx: Any, group: RankGroup, o: Tensor) -> Tensor:
        ctx.group = group
        return to_tokens([o], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *to_heads(grads, ctx.group)


def to_heads(parts: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """[B,t,n,hd] of this rank's tokens -> [B,T,n/P,hd] of this rank's heads, for each tensor.

    All of them travel in one exchange.
    """
    # [B,t,P,n/P,hd] -> [P,B,t,n/P,hd]: the heads of each rank
    sent = [x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4) for x in parts]
    # [P,B,t,n/P,hd] -> [B,P,t,n/P,hd] -> [B,T,n/P,hd]: the tokens of each rank
    return tuple(
        x.permute(1, 0, 2, 3, 4).flatten(1, 2).contiguous() for x in _exchange(sent, group)
    )


def to_tokens(parts: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """The way back: [B,T,n/P,hd] -> [B,t,n,hd] of each."""
    # [B,P,t,n/P,hd] -> [P,B,t,n/P,hd]: the tokens of each rank
    sent = [x.unflatten(1, (group.size, -1)).permute(1, 0, 2, 3, 4) for x in parts]
    # [P,B,t,n/P,hd] -> [B,t,P,n/P,hd] -> [B,t,n,hd]: the heads of each rank
    return tuple(
        x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous() for x in _exchange(sent, group)
    )


def _exchange(parts: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """All-to-all of several tensors [P,B,t,m,hd] along dim 0, in one message."""
    if len(parts) > 1:
        sent = torch.cat(list(parts), dim=3)
    else:
        sent = parts[0].contiguous()
    received = torch.empty_like(sent)
    group.all_to_all(received, sent).wait()
    return received.split([x.shape[3] for x in parts], dim=3)
