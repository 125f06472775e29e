"""headway's attention behind the attention interface of transformers: it gets q, k and v after the
class's own projections and rotation.

    StockModel -> `passing(pass)` -> the class builds its mask
               -> our mask function returns a `StockMask`, which holds the pass
               -> the class hands it to every layer
               -> our attention function attends inside documents, or to what a KV cache holds

The mask travels as an argument of every layer, so a layer that is recomputed in backward sees the
same pass.

Shapes: B rows, T tokens, H query heads, KV key and value heads, hd head width; transformers hands
q [B,H,T,hd] and k, v [B,KV,T,hd].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.kernels.attention import AttentionMask, ScoreRule, attend
from headway.model.base import AttentionCache
from headway.model.stock.classes import IMPLEMENTATION

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(row, head, position of the query, position of the key) -> whether the query sees the key."""
SAME_SCALE = 1e-6
"""A scale this close to 1 / sqrt(hd) is that, rounded."""


@dataclass(frozen=True)
class AttentionCall:
    """What a class hands to attention in one layer."""

    module: nn.Module
    q: Tensor
    """[B,T,H,hd]"""
    k: Tensor
    """[B,T,KV,hd]"""
    v: Tensor
    scaling: float | None
    dropout: float
    softcap: float | None
    sinks: Tensor | None
    """[H]: a trained logit of each head beside its keys."""
    others: dict[str, Any]
    """Further arguments that are not None."""


class StockPass(Protocol):
    """One forward through a class."""

    def attend(self, call: AttentionCall, mask: StockMask) -> Tensor:
        """o [B,T,H,width of v]."""
        ...


@dataclass(frozen=True)
class StockMask:
    """Stands where a class expects its attention mask."""

    of: StockPass
    function: MaskFunction
    """Which key a query of the same document sees, as the class states it."""


@dataclass(frozen=True)
class LayerPass:
    """A forward of headway's: over documents of a batch, or over tokens that a cache is given."""

    windows: Mapping[int, int | None]
    """The sliding window of each layer."""
    rule: ScoreRule
    cached_heads: int
    """KV heads that a cache stores in every layer; a layer may have fewer."""
    cached_size: int
    """Width of the keys and values in a cache; those of a layer may be narrower."""
    backend: str
    mask: AttentionMask | None
    """None with a cache, which decides what tokens see."""
    cache: AttentionCache | None = None
    position: Tensor | None = None
    calls: list[int] = field(default_factory=lambda: [0])
    """Calls of attention over the cache so far."""

    def attend(self, call: AttentionCall, mask: StockMask) -> Tensor:
        """o [B,T,H,width of v], under the window of the layer."""
        layer = layer_of(call.module)
        k = call.k
        v = call.v
        value_width = v.shape[-1]
        # Kernels and caches take queries, keys and values of one width.
        width = max(call.q.shape[-1], value_width)
        if self.cache is not None:
            width = self.cached_size
            # Each KV head of the layer serves several neighbouring ones of the cache.
            k, v = (x.repeat_interleave(self.cached_heads // x.shape[2], dim=2) for x in (k, v))

        # Kernels divide scores by sqrt(width). Another scale is reached by longer queries.
        scaling = call.scaling
        if scaling is None:
            scaling = call.q.shape[-1] ** -0.5
        factor = scaling * width**0.5
        q = call.q
        if abs(factor - 1.0) >= SAME_SCALE:
            q = q * factor
        # Zeros change no score, and the channels of padded values are left out again.
        q, k, v = (_widened(x, width) for x in (q, k, v))

        if self.cache is None:
            assert self.mask is not None
            o = attend(
                q,
                k,
                v,
                self.mask,
                window=self.windows[layer],
                backend=self.backend,
                rule=replace(self.rule, sinks=call.sinks),
            )
        else:
            assert self.position is not None
            # q, k and v are transposed views here.
            o = self.cache.attend(
                self._next_call(),
                q.contiguous(),
                k.contiguous(),
                v.contiguous(),
                self.position,
                call.sinks,
            )
        if value_width == width:
            return o
        return o[..., :value_width]

    def _next_call(self) -> int:
        """How many calls came before: each has its own place in the cache."""
        # Nothing is recomputed over a cache, so calls come in the order of the first forward.
        number = self.calls[0]
        self.calls[0] += 1
        return number


def _widened(x: Tensor, width: int) -> Tensor:
    """[..., width]: x with zeros behind its channels."""
    if x.shape[-1] == width:
        return x
    return F.pad(x, (0, width - x.shape[-1]))


def layer_of(module: nn.Module) -> int:
    """The layer that an attention module belongs to."""
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise ConfigError(
            f"{type(module).__name__} does not know its layer, so headway's attention cannot take its place."
        )
    return layer


_PASS: ContextVar[StockPass | None] = ContextVar("stock_pass", default=None)


@contextmanager
def passing(stock_pass: StockPass) -> Iterator[None]:
    """Masks that a class builds inside of this context carry this pass."""
    # A context variable: classes build their mask deep inside, and threads have passes of their own.
    token = _PASS.set(stock_pass)
    try:
        yield
    finally:
        _PASS.reset(token)


def stock_mask(*_arguments: Any, mask_function: MaskFunction, **_others: Any) -> StockMask:
    """The mask that a class asks for, under the interface of transformers."""
    current = _PASS.get()
    assert current is not None, "a class with headway's attention is called by headway"
    return StockMask(current, mask_function)


def stock_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention under the interface of transformers: (o [B,T,H,hd], no weights)."""
    if not isinstance(attention_mask, StockMask):
        raise ConfigError(
            f"{type(module).__name__} makes a mask of its own, which headway's attention cannot read."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    further = {name: value for name, value in others.items() if value is not None}
    call = AttentionCall(module, q, k, v, scaling, dropout, softcap, s_aux, further)
    return attention_mask.of.attend(call, attention_mask), None


def register() -> None:
    """Make headway's attention known to transformers; once is enough."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, stock_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, stock_mask)


def window_of(function: MaskFunction) -> int | None:
    """The window of a mask that a class states; None where a query sees everything before it.

    Any other mask is a ConfigError.
    """

    def sees(query: int, key: int) -> bool:
        zero = torch.tensor(0, device="cpu")
        positions = (torch.tensor(query, device="cpu"), torch.tensor(key, device="cpu"))
        try:
            return bool(function(zero, zero, *positions))
        except NotImplementedError:
            # It asks for numbers of the forward, which had none.
            raise ConfigError("its mask is neither causal nor a sliding window.") from None

    far = 1 << 40
    if sees(far, far + 1) or not sees(far, far):
        raise ConfigError(
            "its mask lets tokens see later ones. Set is_decoder to true if config.json has it."
        )
    if sees(far, 0):
        return None

    # Bisection: a query sees `low` tokens back, and not `high`.
    low = 0
    high = far
    while high - low > 1:
        middle = (low + high) // 2
        if sees(far, far - middle):
            low = middle
        else:
            high = middle

    # A sliding window has the same edge at every position; a chunked mask has not.
    for offset in (1, high // 2, high - 1):
        query = far + offset
        if not sees(query, query - low) or sees(query, query - high):
            raise ConfigError("its mask is neither causal nor a sliding window.")
    return high
