"""Causal attention inside documents: q, k, v of one layer come in, o of the same shape as q goes
out; no document sees another.

Shapes: B rows, T tokens, H query heads, KV key and value heads, hd head width.  q [B,T,H,hd], k and
v [B,T,KV,hd], o [B,T,H,hd].

    backend     where           what it does
    reference   anywhere        dense mask, fp32 softmax in plain torch: what the others are
                                compared with
    sdpa        CPU             one causal SDPA call per document (a banded mask where a window is
                                set)
    sdpa        CUDA            causal SDPA over whole rows where each holds one document, else SDPA
                                with a dense mask
    varlen      CUDA, 16 bit    FlashAttention over all documents of all rows at once, with or
                                without a window or sinks
    fa4         Hopper, 16 bit  FlashAttention-4 for all of these, where the package is installed
    flex        CUDA            soft-capped scores, by torch's flex_attention (flex.py)

A score is q k / sqrt(hd). A model with another scale multiplies its queries (`Attention.project`),
so no kernel has to know it; what else happens to scores is a `ScoreRule`, a constant of the layer.

A row of one document followed by padding needs no document mask: the padding comes later, so
nothing before it can see it. The results of the padding are meaningless and carry no loss.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import ConfigError
from headway.kernels import flash4
from headway.kernels.flex import attend_flex
from headway.kernels.sinks import attend_with_sinks, softmax

if TYPE_CHECKING:
    from headway.data.batch import Batch
    from headway.kernels.head_mix import HeadMix
    from headway.kernels.segments import Segments

BACKENDS = ("reference", "sdpa", "varlen", "fa4", "flex")
CAPPING = ("reference", "sdpa", "flex")
"""Backends that can soft-cap scores."""
HALF = (torch.bfloat16, torch.float16)
BF16_GAP = 2e-2
"""How far a backend may be from the reference on values of about 1, in bf16."""


@dataclass(frozen=True)
class ScoreRule:
    """What happens to the scores of a layer before and in the softmax."""

    softcap: float | None = None
    """Scores become softcap * tanh(score / softcap)."""
    sinks: Tensor | None = field(default=None, compare=False)
    """[H]: a trained logit of each query head, one more term of the softmax's denominator
    (sinks.py)."""

    @property
    def is_plain(self) -> bool:
        """Scores stay as they are."""
        return self.softcap is None and self.sinks is None

    def __call__(self, scores: Tensor) -> Tensor:
        """The scores under the rule, where they exist as a tensor."""
        if self.softcap is None:
            return scores
        return self.softcap * torch.tanh(scores / self.softcap)


PLAIN = ScoreRule()


@dataclass(frozen=True)
class AttentionMask:
    """Which tokens belong to the same document, in every form a backend reads."""

    document: Tensor
    """int32 [B,T]: the number of each token's document in its row"""
    bounds: Tensor
    """int32 [B, max_documents + 1]: start of each document, padded with T"""
    single_document: bool
    """No row holds more than one document before its padding."""
    cu_seqlens: Tensor
    """int32 [B * max_documents + 1]: the same starts in the flattened rows"""
    max_length: int
    """No document is longer than this."""
    host_bounds: tuple[tuple[int, ...], ...] | None
    """`bounds` as Python numbers, without the padding, if the host knows them."""
    mix: HeadMix | None = None
    """The head gates of this pass, if the model has any."""
    blocks: dict[int | None, Any] = field(default_factory=dict, compare=False, repr=False)
    """Block masks of flex_attention by window, so that all layers share them."""
    segments: list[Segments] = field(default_factory=list, compare=False, repr=False)
    """The documents for layers with a state, once one has asked (`Segments.of_mask`)."""

    def on_host(self) -> tuple[tuple[int, ...], ...]:
        """The bounds of every row's documents as Python numbers; waits for the device if the host
        does not know them."""
        if self.host_bounds is not None:
            return self.host_bounds
        return bounds_on_host(self.bounds, self.document.shape[1])


def mask_of(batch: Batch, *, max_length: int | None = None) -> AttentionMask:
    """The mask of a microbatch, made without waiting for the device. A document may fill a row
    unless `max_length` bounds it."""
    rows, length = batch.document.shape
    bound = max_length or batch.max_length or length
    mask = _mask(
        batch.document,
        batch.bounds,
        single_document=batch.single_document,
        max_length=bound,
        rows=rows,
    )
    if mask.host_bounds is None and batch.host_bounds is not None:
        # Reading them from the device would wait for it.
        return replace(mask, host_bounds=bounds_on_host(batch.host_bounds, length))
    return mask


def causal_mask(rows: int, length: int, device: torch.device | str = "cpu") -> AttentionMask:
    """The mask of rows that each hold one document."""
    document = torch.zeros(rows, length, dtype=torch.int32, device=device)
    bounds = torch.tensor([[0, length]], dtype=torch.int32, device=device).expand(rows, 2)
    return _mask(document, bounds, single_document=True, max_length=length, rows=rows)


def _mask(
    document: Tensor, bounds: Tensor, *, single_document: bool, max_length: int, rows: int
) -> AttentionMask:
    """The mask in every form; padded bounds become documents of length 0 in `cu_seqlens`."""
    length = document.shape[1]
    row_starts = torch.arange(rows, dtype=torch.int32, device=bounds.device)[:, None] * length
    flat = (bounds[:, :-1] + row_starts).flatten()
    cu_seqlens = F.pad(flat, (0, 1), value=rows * length)
    host_bounds = None
    if bounds.device.type == "cpu":
        host_bounds = bounds_on_host(bounds, length)
    return AttentionMask(document, bounds, single_document, cu_seqlens, max_length, host_bounds)


def bounds_on_host(bounds: Tensor, length: int) -> tuple[tuple[int, ...], ...]:
    """Starts of each row's documents and the row's end, without the padding."""
    # Padding repeats the length: `fromkeys` keeps the first of equal numbers, in order.
    return tuple(tuple(dict.fromkeys([*row, length])) for row in bounds.tolist())


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: AttentionMask,
    *,
    window: int | None = None,
    backend: str = "auto",
    rule: ScoreRule = PLAIN,
) -> Tensor:
    """Attention of each token to itself and to the tokens before it in its document, at most
    `window` including itself."""
    if backend == "auto":
        backend = choose(q, mask, window, rule)
    elif reason := why_not(backend, q.device.type, q.dtype, q.shape[-1], rule):
        raise ConfigError(f"attention backend is {backend!r}, but {reason}. Use auto.")

    if backend == "flex":
        return attend_flex(q, k, v, mask, window, rule.softcap)
    if backend == "fa4":
        return _fa4(q, k, v, mask, window)
    if backend == "varlen":
        if rule.sinks is None:
            return _varlen(q, k, v, mask, window)
        return attend_with_sinks(q, k, v, rule.sinks, mask, window)
    if backend == "reference":
        return reference(q, k, v, visible(mask, window), rule)

    # What is left is sdpa, in the cheapest form that is exact.
    if mask.single_document and window is None and rule.is_plain:
        return _causal(q, k, v)
    if mask.host_bounds is not None and q.device.type == "cpu":
        return _per_document(q, k, v, mask, window, rule)
    return dense(q, k, v, visible(mask, window), rule)


def choose(q: Tensor, mask: AttentionMask, window: int | None, rule: ScoreRule = PLAIN) -> str:
    """The fastest exact backend for this case."""
    on_cuda = q.device.type == "cuda"
    if rule.softcap is not None:
        # Flash kernels do not cap scores; flex has no sinks.
        return "flex" if on_cuda and rule.sinks is None else "sdpa"

    can_varlen = not why_not("varlen", q.device.type, q.dtype, q.shape[-1])
    if rule.sinks is not None:
        return "varlen" if can_varlen else "sdpa"
    if on_cuda and not why_not("fa4", "cuda", q.dtype, q.shape[-1]):
        return "fa4"
    if not on_cuda or (mask.single_document and window is None):
        # Whole causal rows: SDPA picks cuDNN or FlashAttention itself.
        return "sdpa"
    return "varlen" if can_varlen else "sdpa"


def why_not(
    backend: str, device_type: str, dtype: torch.dtype, head_dim: int, rule: ScoreRule = PLAIN
) -> str:
    """Why a backend cannot compute a case; empty if it can."""
    if backend not in BACKENDS:
        return f"there are only {', '.join(BACKENDS)}"
    if rule.softcap is not None and backend not in CAPPING:
        return (
            f"{backend} cannot soft-cap scores and the model's attention_softcap is {rule.softcap}"
        )
    if rule.sinks is not None and backend in ("fa4", "flex"):
        return f"{backend} has no trained sinks and the model's attention_sinks is true"
    if backend in ("reference", "sdpa"):
        return ""
    if device_type != "cuda":
        return f"{backend} runs on CUDA and the tensors are on {device_type}"
    if backend == "flex":
        return ""
    if dtype not in HALF:
        return (
            f"{backend} computes in bfloat16 or float16 and the tensors are "
            f"{str(dtype).removeprefix('torch.')}"
        )
    # What the kernels of FlashAttention-2 were built for.
    if head_dim % 8 or head_dim > 256:
        return (
            f"{backend} needs a head width that is a multiple of 8 up to 256 and it is {head_dim}"
        )
    if backend == "fa4":
        return flash4.why_not()
    return ""


def working_backends(device: torch.device | str) -> list[tuple[str, bool, str]]:
    """Try each backend on a small case: name, whether its result agrees with the reference, and the
    reason if not."""
    kind = torch.device(device).type
    dtype = torch.bfloat16 if kind == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 16, heads, 32, generator=generator).to(device, dtype) for heads in (4, 2, 2)
    )
    # Two documents in one row and one in the other, with grouped heads: what kernels get wrong.
    bounds = torch.tensor([[0, 5, 16], [0, 16, 16]], dtype=torch.int32, device=device)
    document = (torch.arange(16, device=device)[None, :] >= bounds[:, 1:2]).int()
    mask = _mask(document, bounds, single_document=False, max_length=16, rows=2)
    expected = reference(q, k, v, visible(mask, None)).float()
    results: list[tuple[str, bool, str]] = []
    for backend in BACKENDS:
        reason = why_not(backend, kind, dtype, 32)
        if not reason:
            try:
                gap = (attend(q, k, v, mask, backend=backend).float() - expected).abs().max().item()
                if gap >= BF16_GAP:
                    reason = f"its result is off by {gap:.2g}"
            except (RuntimeError, ImportError) as error:
                # A kernel that was not built for this GPU raises only when it runs.
                reason = str(error).splitlines()[0]
        results.append((backend, not reason, reason))
    return results


def visible(mask: AttentionMask, window: int | None) -> Tensor:
    """The dense mask, bool [B, T of queries, T of keys]."""
    same = mask.document[:, :, None] == mask.document[:, None, :]
    return same & band(mask.document.shape[1], window, mask.document.device)


def band(length: int, window: int | None, device: torch.device | str) -> Tensor:
    """Bool [length, length]: a query sees itself and what comes before it, at most `window`
    tokens."""
    position = torch.arange(length, device=device)
    distance = position[:, None] - position[None, :]
    seen = distance >= 0
    if window is None:
        return seen
    return seen & (distance < window)


def reference(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: ScoreRule = PLAIN) -> Tensor:
    """Attention in plain fp32 torch under a dense mask [B,T,S]."""
    groups = q.shape[2] // k.shape[2]
    k32, v32 = (x.float().repeat_interleave(groups, dim=2) for x in (k, v))
    scores = rule(torch.einsum("bthd,bshd->bhts", q.float(), k32) * q.shape[-1] ** -0.5)
    sinks = None
    if rule.sinks is not None:
        sinks = rule.sinks[:, None, None]
    weights = softmax(scores.masked_fill(~seen[:, None], -torch.inf), sinks)
    return torch.einsum("bhts,bshd->bthd", weights, v32).to(q.dtype)


def dense(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, rule: ScoreRule = PLAIN) -> Tensor:
    """SDPA under a dense mask [B,T,S], plain torch where scores follow a rule; the query heads of
    one group are folded into the query tokens, so keys are never copied.
    """
    B, T, H, hd = q.shape
    KV = k.shape[2]
    # [B,KV,G*T,hd]: G groups of T queries behind each other, so the mask repeats G times.
    folded = q.view(B, T, KV, H // KV, hd).permute(0, 2, 3, 1, 4).reshape(B, KV, H // KV * T, hd)
    seen = seen[:, None].repeat(1, 1, H // KV, 1)
    keys = k.transpose(1, 2)
    values = v.transpose(1, 2)
    if rule.is_plain:
        o = F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen)
    else:
        scores = rule(torch.matmul(folded * hd**-0.5, keys.transpose(2, 3)).float())
        sinks = None
        if rule.sinks is not None:
            sinks = rule.sinks.view(KV, H // KV, 1).expand(-1, -1, T).reshape(KV, -1, 1)
        o = torch.matmul(softmax(scores.masked_fill(~seen, -torch.inf), sinks).to(q.dtype), values)
    return o.view(B, KV, H // KV, T, hd).permute(0, 3, 1, 2, 4).reshape(B, T, H, hd)


def _causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.transpose(1, 2)
    k = k.transpose(1, 2)
    v = v.transpose(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
    ).transpose(1, 2)


def _per_document(
    q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, window: int | None, rule: ScoreRule
) -> Tensor:
    assert mask.host_bounds is not None
    pieces: list[Tensor] = []
    for row, bounds in enumerate(mask.host_bounds):
        for start, stop in itertools.pairwise(bounds):
            document_q, document_k, document_v = (x[row : row + 1, start:stop] for x in (q, k, v))
            # A window that covers the document hides nothing.
            if rule.is_plain and (window is None or stop - start <= window):
                pieces.append(_causal(document_q, document_k, document_v))
            else:
                seen = band(stop - start, window, q.device)[None]
                pieces.append(dense(document_q, document_k, document_v, seen, rule))
    return torch.cat(pieces, dim=1).view(q.shape)


def _fa4(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, window: int | None) -> Tensor:
    if mask.single_document:
        return flash4.causal(q, k, v, window)
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    return flash4.documents(flat_q, flat_k, flat_v, mask.cu_seqlens, mask.max_length, window).view(
        q.shape
    )


def _varlen(q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, window: int | None) -> Tensor:
    flat_q, flat_k, flat_v = (x.flatten(0, 1) for x in (q, k, v))
    # FlashAttention counts the keys left of the query; a window counts the query too.
    left = -1
    if window is not None:
        left = window - 1
    kernel = varlen_kernel(q.shape[2] != k.shape[2])
    starts = mask.cu_seqlens
    longest = mask.max_length
    return kernel(
        flat_q, flat_k, flat_v, starts, starts, longest, longest, window_size=(left, 0)
    ).view(q.shape)


@functools.cache
def varlen_kernel(grouped: bool) -> Callable[..., Any]:
    """FlashAttention over packed sequences, for heads that share keys where `grouped`."""
    from torch.nn.attention.varlen import varlen_attn

    # The kernel supports grouped heads in every version; newer ones need a flag.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    if has_flag and grouped:
        return functools.partial(varlen_attn, enable_gqa=True)
    return varlen_attn


QUERY_BLOCK = 1024
"""Queries that share one dense mask."""


def attend_chunk(q: Tensor, k: Tensor, v: Tensor, *, start: int, rule: ScoreRule = PLAIN) -> Tensor:
    """o [B,T,H,hd] of q [B,T,H,hd] at positions from `start` on; k, v [B,S,KV,hd] of all of
    them."""
    if not why_not("varlen", q.device.type, q.dtype, q.shape[-1], rule):
        from headway.kernels.past_attention import attend_past

        return attend_past(q, k, v, rule.sinks)
    # A block at a time: a mask of all queries would have T * S elements. Keys behind the block's
    # last query are left out.
    position = torch.arange(k.shape[1], device=q.device)
    blocks: list[Tensor] = []
    for begin in range(0, q.shape[1], QUERY_BLOCK):
        end = min(begin + QUERY_BLOCK, q.shape[1])
        stop = start + end
        seen = position[:stop] <= position[start + begin : stop, None]
        blocks.append(dense(q[:, begin:end], k[:, :stop], v[:, :stop], seen[None], rule))
    return torch.cat(blocks, dim=1)
