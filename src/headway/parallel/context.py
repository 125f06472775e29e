"""Context parallelism (Ulysses): the tokens of every row are split over ranks; attention, which needs all of them, is split by heads.

Shapes: B rows, T tokens of a row, P ranks, t = T / P, H query heads, KV key and value heads, hd head width.

    halves of a block    q [B,t,H,hd], k and v [B,t,KV,hd]            this rank's tokens, all heads
         all-to-all
    core                 q [B,T,H/P,hd], k and v [B,T,KV/P,hd] -> o   all tokens, this rank's heads, the mask of whole rows
         all-to-all
    halves of a block    o [B,t,H,hd]

Each KV head is sent once, together with its query heads. The backward of either exchange is the other one. A token's loss and a
head's gate belong to one rank alone, so gradients are the plain sum over ranks, as everywhere.

More ranks than KV heads: the largest number of ranks that divides both exchanges heads as above; these groups form a ring (ring.py).

    context 8, 2 KV heads    4 groups in a ring, each of 2 ranks that exchange heads; rank = group * 2 + position
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
from headway.parallel.ring import RingCore, ring_order

PER_TOKEN = ("tokens", "targets", "loss_weight", "position")
PER_TOKEN_EXTRA = (SLOT,)


def part_of(batch: Batch, context: RankGroup, ring: int = 1) -> Batch:
    """This rank's tokens of a microbatch. Documents and their bounds, from which the mask is made, stay those of whole rows."""
    if context.size == 1:
        return batch
    length = batch.tokens.shape[1]
    each = length // context.size
    begin = context.rank * each
    index = (
        None if ring == 1 else _ring_index(length, ring, batch.tokens.device)[begin : begin + each]
    )

    def part(column: Tensor) -> Tensor:
        return column[:, begin:][:, :each] if index is None else column.index_select(1, index)

    extra = {
        name: part(column) if name in PER_TOKEN_EXTRA else column
        for name, column in batch.extra.items()
    }
    return replace(batch, **{name: part(getattr(batch, name)) for name in PER_TOKEN}, extra=extra)


@functools.lru_cache(maxsize=4)
def _ring_index(length: int, ring: int, device: torch.device) -> Tensor:
    return torch.tensor(ring_order(length, ring), device=device)


def share_rows(model: Model, ranks: RankGroups, heads: slice, attention: str = "auto") -> None:
    """Let a model with these KV heads run on parts of rows: exchanges around every attention core, gates drawn for its part of them."""
    context = ranks.context
    if context.size == 1:
        return
    kv_heads = heads.stop - heads.start
    ring = ring_ranks(context.size, model.config.kv_heads, ranks.tensor.size)
    if ring > 1 and attention != "auto":
        raise ParallelError(
            f"kernels.attention is {attention!r} and parallel.context is {context.size}, beyond the {kv_heads} KV heads of a rank; "
            "its ring has one way to compute attention. Use auto."
        )
    around, group = split_context(ranks, ring)
    each = kv_heads // group.size
    wide = {spec.name for spec in model.param_specs() if spec.is_wide}
    gates_train = any(
        parameter.requires_grad for name, parameter in model.named_parameters() if name in wide
    )
    first = heads.start + group.rank * each
    model.shard_attention(
        lambda core: ContextCore(core if ring == 1 else RingCore(around), group, gates_train),
        slice(first, first + each),
    )


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
        """o [B,t,H,hd]. The sinks of a `rule` are those of all heads; their gradient is that of this rank's heads, and zero for others."""
        settings: dict[str, Any] = {"window": window}
        if rule is not None:
            each = q.shape[2] // self.group.size
            sinks = None if rule.sinks is None else rule.sinks[self.group.rank * each :][:each]
            settings["rule"] = replace(rule, sinks=sinks)
        if self.group.size == 1:
            return self.whole(q, k, v, mask, **settings)
        q, k, v = _ToHeads.apply(self.group, q, k, v)  # pyright: ignore[reportGeneralTypeIssues]
        o = self.whole(q, k, v, mask, **settings)
        if self.gates_train and torch.is_grad_enabled() and not o.requires_grad:
            # Nothing below trains and no gate of these heads is open, but another rank's may be: it waits for this one's gradients of o.
            o = o.detach().requires_grad_()
        return _ToTokens.apply(self.group, o)  # pyright: ignore[reportReturnType]


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: RankGroup, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return to_heads(parts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *to_tokens(grads, ctx.group)


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: RankGroup, o: Tensor) -> Tensor:
        ctx.group = group
        return to_tokens([o], group)[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *to_heads(grads, ctx.group)


def to_heads(parts: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """From all heads of this rank's tokens to all tokens of this rank's heads, in one exchange: [B,t,n,hd] -> [B,T,n/P,hd] of each."""
    given = [x.unflatten(2, (group.size, -1)).permute(2, 0, 1, 3, 4) for x in parts]
    return tuple(
        x.permute(1, 0, 2, 3, 4).flatten(1, 2).contiguous() for x in _exchanged(given, group)
    )


def to_tokens(parts: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """The way back: [B,T,n/P,hd] -> [B,t,n,hd] of each."""
    given = [x.unflatten(1, (group.size, -1)).permute(1, 0, 2, 3, 4) for x in parts]
    return tuple(
        x.permute(1, 2, 0, 3, 4).flatten(2, 3).contiguous() for x in _exchanged(given, group)
    )


def _exchanged(parts: Sequence[Tensor], group: RankGroup) -> tuple[Tensor, ...]:
    """Several [P,B,t,m,hd], each with one part for every rank, against what the ranks have for this one."""
    given = torch.cat(list(parts), dim=3) if len(parts) > 1 else parts[0].contiguous()
    received = torch.empty_like(given)
    group.all_to_all(received, given).wait()
    return received.split([x.shape[3] for x in parts], dim=3)
