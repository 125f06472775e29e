"""Attention of a layer whose KV heads differ: z * full + (1 - z) * streaming per KV head, before
the output projection (PruLong, arXiv:2506.17121).

Shapes: B rows, T tokens, H query heads, KV key and value heads, G = H / KV, hd head width.  q
[B,T,H,hd], k and v [B,T,KV,hd], z [KV].

    heads in order     full (z = 1)     both (0 < z < 1)     streaming (z = 0)
    full attention     '------------- run ------------'
    streaming                           '--------------- run --------------'

A head whose z is exactly 0 or 1 runs only the branch it needs: the other one has weight 0 in output
and gradients. The host knows z, so it knows the groups without waiting for the device. KV heads
move as wholes; nothing is copied to all query heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.kernels.streaming import StreamingWindow, stream

if TYPE_CHECKING:
    from headway.kernels.attention import AttentionMask


@dataclass(frozen=True)
class LayerMix:
    """The gates of one layer."""

    z: Tensor
    """fp32 [KV] on the device; carries the gradient of the gates"""
    order: Tensor
    """int64 [KV] on the device: full heads, then both, then streaming ones"""
    full: int
    both: int
    streaming: int


@dataclass(frozen=True)
class HeadMix:
    """The gates of a model for one forward pass."""

    layers: tuple[LayerMix, ...]
    reach: StreamingWindow

    @classmethod
    def of(
        cls,
        z: Tensor,
        on_host: Tensor,
        reach: StreamingWindow,
        *,
        heads: slice = slice(None),
        skip: bool = True,
    ) -> HeadMix:
        """From z [L,KV] on the device and the same numbers on the host; `heads` = the KV heads this
        rank computes.

        Without `skip` every head runs both branches, for any z.
        """
        z = z[:, heads]
        host = on_host[:, heads]
        # 0: full attention alone, 1: both branches, 2: streaming alone
        if skip:
            kind = torch.where(host == 1, 0, torch.where(host == 0, 2, 1))
        else:
            kind = torch.ones_like(host, dtype=torch.int64)
        # Stable: heads of one kind keep their order, so a run can be repeated bit for bit.
        order = kind.argsort(dim=1, stable=True)
        if z.is_cuda:
            order = order.pin_memory().to(z.device, non_blocking=True)
        counts = torch.stack([(kind == number).sum(1) for number in range(3)], dim=1).tolist()
        layers = (
            LayerMix(layer_z, layer_order, *count)
            for layer_z, layer_order, count in zip(z.unbind(), order.unbind(), counts, strict=True)
        )
        return cls(tuple(layers), reach)


Full = Callable[[Tensor, Tensor, Tensor], Tensor]


def mix_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    mix: HeadMix,
    layer: int,
    *,
    full: Full,
    backend: str = "auto",
) -> Tensor:
    """o [B,T,H,hd] of one layer; `full` is attention to all that the mask shows, `backend` that of
    streaming."""
    gates = mix.layers[layer]
    # Layers of one kind need no sorting of heads.
    if gates.full == len(gates.order):
        return full(q, k, v)
    if gates.streaming == len(gates.order):
        return stream(q, k, v, mask, mix.reach, backend=backend)
    kv_heads = k.shape[2]
    whole_qkv, near_qkv = zip(
        *(_split(x.unflatten(2, (kv_heads, -1)), gates) for x in (q, k, v)), strict=True
    )
    # A branch without heads does not run.
    whole = None
    near = None
    if gates.full + gates.both:
        whole = full(*_joined(whole_qkv))
    if gates.both + gates.streaming:
        near_q, near_k, near_v = _joined(near_qkv)
        near = stream(near_q, near_k, near_v, mask, mix.reach, backend=backend)

    empty = q.new_empty(0)
    branches = [
        empty if o is None else o.unflatten(2, (-1, q.shape[2] // kv_heads)) for o in (whole, near)
    ]
    return _Combine.apply(
        *branches, gates.z, gates.order, (gates.full, gates.both, gates.streaming)
    ).flatten(2, 3)  # pyright: ignore


def _split(x: Tensor, gates: LayerMix) -> tuple[Tensor, Tensor]:
    """x [B,T,KV,g,hd] -> the heads that run full attention, and those that stream."""
    return _Split.apply(x, gates.order, gates.full, gates.both)  # pyright: ignore[reportReturnType]


def _joined(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """[B,T,n,g,hd] -> [B,T,n*g,hd]: the query heads of a group stay together."""
    return tuple(part.flatten(2, 3) for part in parts)


class _Split(torch.autograd.Function):
    """Heads in order -> those of both branches; a head that runs both is in both results."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, full: int, both: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(order)
        ctx.sizes = (full, both)
        ctx.shape = x.shape
        ctx.set_materialize_grads(False)
        return x.index_select(2, order[: full + both]), x.index_select(2, order[full:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        (order,) = ctx.saved_tensors
        full, both = ctx.sizes
        whole, near = grads
        # A branch that did not run has no gradient (`set_materialize_grads`).
        known = whole if whole is not None else near
        assert known is not None, "at least one branch has a gradient"
        if whole is None:
            whole = known.new_zeros(*ctx.shape[:2], full + both, *ctx.shape[3:])
        if near is None:
            near = known.new_zeros(*ctx.shape[:2], len(order) - full, *ctx.shape[3:])
        # Every head is in exactly one of the three ranges, so nothing is left uninitialised.
        total = known.new_empty(ctx.shape)
        total.index_copy_(2, order[:full], whole[:, :, :full])
        total.index_copy_(2, order[full : full + both], whole[:, :, full:] + near[:, :, :both])
        total.index_copy_(2, order[full + both :], near[:, :, both:])
        return total, None, None, None


class _Combine(torch.autograd.Function):
    """Outputs of both branches -> o [B,T,KV,G,hd] in the order of heads; z has a gradient where a
    head ran both.
    """

    @staticmethod
    def forward(
        ctx: Any, whole: Tensor, near: Tensor, z: Tensor, order: Tensor, sizes: tuple[int, int, int]
    ) -> Tensor:
        full, both, _ = sizes
        some = whole if whole.numel() else near
        o = some.new_empty(*some.shape[:2], sum(sizes), *some.shape[3:])
        if full:
            o.index_copy_(2, order[:full], whole[:, :, :full])
        if both:
            weight = z[order[full : full + both]][:, None, None]
            # In fp32: near 0 and 1 a gate's small part would be lost in bf16.
            mixed = torch.lerp(near[:, :, :both].float(), whole[:, :, full:].float(), weight)
            o.index_copy_(2, order[full : full + both], mixed.to(o.dtype))
            ctx.save_for_backward(whole[:, :, full:], near[:, :, :both], z, order)
        else:
            ctx.save_for_backward(None, None, z, order)
        if sizes[2]:
            o.index_copy_(2, order[full + both :], near[:, :, both:])
        ctx.sizes = sizes
        return o

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        whole_both, near_both, z, order = ctx.saved_tensors
        full, both, streaming = ctx.sizes
        g = grads[0]
        needs_whole, needs_near, needs_z = ctx.needs_input_grad[:3]
        mixed_heads = order[full : full + both]
        weight = z[mixed_heads][:, None, None]
        d_whole = d_near = d_z = None
        if both and needs_z:
            # d o / d z = full - streaming
            gap = (whole_both.float() - near_both.float()) * g.index_select(2, mixed_heads).float()
            d_z = torch.zeros_like(z).index_copy_(0, mixed_heads, gap.sum((0, 1, 3, 4)))
        if full + both and needs_whole:
            d_whole = g.index_select(2, order[: full + both])
            if both:
                d_whole[:, :, full:] = d_whole[:, :, full:].float() * weight
        if both + streaming and needs_near:
            d_near = g.index_select(2, order[full:])
            if both:
                d_near[:, :, :both] = d_near[:, :, :both].float() * (1 - weight)
        return d_whole, d_near, d_z, None, None
