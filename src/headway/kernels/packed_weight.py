"""Quantised matrices (nf4 with double quantisation, int8) and products with them. Floats go in
once; the product reads bytes.

    nf4    value = level[code] * scale(block)
           scale(block) = group scale * dynamic[8-bit code] + offset
           16 levels at quantiles of the normal distribution; blocks of 64 elements, groups of 256
           blocks: bitsandbytes' nf4, bit for bit
    int8   value = code * (largest magnitude of the row / 127)

`packed_linear` is an opaque operation for the compiler: the matrix is written out in the dtype of
the inputs, multiplied, and freed, in forward and again in backward. So nothing larger than the
bytes is ever saved, whatever a compiler decides to keep. Gradients of the inputs are exact for the
dequantised matrix; the matrix itself has none. A product that nobody reads while a block is
recomputed is then not computed (`recomputing`): its result holds nothing.

Shapes: O outputs, I inputs, M tokens, R rank: packed [bytes] (packed_layout.py), x [M,I], y [M,O].
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from headway.kernels.packed_layout import BLOCK, GROUP, PackedForm, PackedLayout

LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""NormalFloat4: the levels that the paper QLoRA (arXiv 2305.14314) lists."""
CHUNK = 1 << 20
"""Elements that are quantised at a time; a multiple of BLOCK."""
SMALLEST = 1e-38
"""In place of a scale of zero."""


@cache
def levels(device: torch.device) -> Tensor:
    """The 16 values of nf4."""
    return torch.tensor(LEVELS, dtype=torch.float32, device=device)


@cache
def dynamic(device: torch.device) -> Tensor:
    """The 256 values of the dynamic 8-bit type, in order: seven powers of ten, each finer than the
    one below it, with both signs.

    The power 10^-6 has one value of each sign, 10^0 has 64; they are midpoints of equal steps
    between a tenth and one.
    """
    values = [0.0, 1.0]
    for power in range(7):
        edges = torch.linspace(0.1, 1.0, 2**power + 1, dtype=torch.float32, device="cpu")
        means = 10.0 ** (power - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [*means.tolist(), *(-means).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu").to(device)


def _nearest(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest entry of a sorted table, uint8; the lower one of two that are equally
    near."""
    return torch.bucketize(values, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


def _blocks(flat: Tensor, size: int) -> Tensor:
    """[n] as [blocks, size], the last one filled up with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def _scaled(blocks: Tensor, scale: Tensor) -> Tensor:
    """Blocks [n, size] divided by their scales [n], within [-1, 1]."""
    # Multiplied by the inverse, as bitsandbytes does: a division rounds differently.
    return (blocks * (1.0 / scale.clamp(min=SMALLEST))[:, None]).clamp(-1, 1)


@torch.no_grad()
def pack(weight: Tensor, form: PackedForm) -> Tensor:
    """The bytes of a matrix [O,I], on its device. Temporary memory is a few times CHUNK
    elements."""
    layout = PackedLayout(form, *weight.shape)
    packed = torch.zeros(layout.nbytes, dtype=torch.uint8, device=weight.device)
    parts = sections(packed, layout)
    if form == "int8":
        rows = max(1, CHUNK // layout.inputs)
        scales, codes = parts
        for first in range(0, layout.outputs, rows):
            chunk = weight[first : first + rows].float()
            highest = chunk.abs().amax(1)
            scales[first : first + rows] = highest
            scaled = chunk * (127.0 / highest.clamp(min=SMALLEST))[:, None]
            begin = first * layout.inputs
            end = begin + chunk.numel()
            codes[begin:end] = scaled.round().clamp(-127, 127).to(torch.int8).view(-1)
        return packed

    # nf4: codes of all blocks first; then their scales, which are quantised in turn around their
    # mean.
    groups, offset, scale_codes, codes = parts
    flat = weight.reshape(-1)
    scales = torch.empty(layout.blocks, dtype=torch.float32, device=weight.device)
    for first in range(0, layout.elements, CHUNK):
        blocks = _blocks(flat[first : first + CHUNK].float(), BLOCK)
        scale = blocks.abs().amax(1)
        scales[first // BLOCK : first // BLOCK + len(scale)] = scale
        nearest = _nearest(_scaled(blocks, scale).view(-1), levels(weight.device))
        pairs = nearest.view(-1, 2)
        # The first element of a pair is in the upper half of the byte, as in bitsandbytes.
        joined = (pairs[:, 0] << 4) | pairs[:, 1]
        codes[first // 2 : first // 2 + len(joined)] = joined[: codes.numel() - first // 2]
    offset.copy_(scales.mean())
    grouped = _blocks(scales - offset, GROUP)
    groups.copy_(grouped.abs().amax(1))
    scale_codes.copy_(
        _nearest(_scaled(grouped, groups).view(-1), dynamic(weight.device))[: layout.blocks]
    )
    return packed


def sections(packed: Tensor, layout: PackedLayout) -> list[Tensor]:
    """Views of the sections of a packed matrix, each in its type."""
    if layout.form == "int8":
        types = (torch.float32, torch.int8)
    else:
        types = (torch.float32, torch.float32, torch.uint8, torch.uint8)
    return [
        packed[start : start + size].view(kind)
        for start, size, kind in zip(layout.starts[:-1], layout.sizes, types, strict=True)
    ]


def block_scales(packed: Tensor, layout: PackedLayout) -> Tensor:
    """The fp32 scale of every block of nf4."""
    groups, offset, scale_codes, _ = sections(packed, layout)
    values = dynamic(packed.device)[scale_codes.int()]
    return (_blocks(values, GROUP) * groups[:, None]).view(-1)[: layout.blocks] + offset


def unpack_reference(packed: Tensor, layout: PackedLayout, dtype: torch.dtype) -> Tensor:
    """The matrix [O,I], in plain operations."""
    if layout.form == "int8":
        scales, codes = sections(packed, layout)
        return (codes.view(layout.outputs, layout.inputs).float() * (scales / 127.0)[:, None]).to(
            dtype
        )
    codes = sections(packed, layout)[3].int()
    table = levels(packed.device)
    scales = block_scales(packed, layout)
    values = torch.stack([table[codes >> 4], table[codes & 15]], -1).view(-1)
    return (
        (_blocks(values, BLOCK)[: layout.blocks] * scales[:, None])
        .view(-1)[: layout.elements]
        .view(layout.outputs, layout.inputs)
        .to(dtype)
    )


def unpack(packed: Tensor, layout: PackedLayout, dtype: torch.dtype) -> Tensor:
    """The matrix [O,I]: one kernel on CUDA."""
    if packed.is_cuda:
        from headway.kernels.packed_weight_triton import unpack as fused

        return fused(packed, layout, dtype)
    return unpack_reference(packed, layout, dtype)


def _matrix(packed: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return unpack(packed, PackedLayout(form, *shape), dtype)  # pyright: ignore[reportArgumentType]


def _matrix_shape(packed: Tensor, form: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return packed.new_empty(list(shape), dtype=dtype)


class _Thread(threading.local):
    """Per thread: autograd may run backward, and recomputation with it, in threads of its own."""

    is_recomputing = False


_THREAD = _Thread()


@contextmanager
def recomputing() -> Iterator[None]:
    """While a forward runs again for its backward, products marked `once` return memory without
    values."""
    _THREAD.is_recomputing = True
    try:
        yield
    finally:
        _THREAD.is_recomputing = False


def _product(
    x: Tensor, packed: Tensor, form: str, shape: Sequence[int], by_outputs: bool, once: bool
) -> Tensor:
    if once and _THREAD.is_recomputing:
        return _product_shape(x, packed, form, shape, by_outputs, once)
    matrix = _matrix(packed, form, shape, x.dtype)
    return x @ (matrix if by_outputs else matrix.t())


def _product_shape(
    x: Tensor, packed: Tensor, form: str, shape: Sequence[int], by_outputs: bool, once: bool
) -> Tensor:
    return x.new_empty(x.shape[0], shape[1] if by_outputs else shape[0])


def _save_bytes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    # Only bytes are saved: backward writes the matrix out again.
    _, packed, ctx.form, ctx.shape, ctx.by_outputs, _ = inputs
    ctx.save_for_backward(packed)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (packed,) = ctx.saved_tensors
    return (
        PRODUCT(grad.contiguous(), packed, ctx.form, ctx.shape, not ctx.by_outputs, False),
        None,
        None,
        None,
        None,
        None,
    )


def _updated(
    x: Tensor,
    packed: Tensor,
    low: Tensor,
    factor: Tensor,
    scale: float,
    form: str,
    shape: Sequence[int],
    once: bool,
) -> Tensor:
    if once and _THREAD.is_recomputing:
        return _updated_shape(x, packed, low, factor, scale, form, shape, once)
    matrix = _matrix(packed, form, shape, x.dtype)
    # The large product adds to the small one where it lies: two results of this size would have to
    # be read again and added.
    return (low @ (factor * scale).t()).addmm_(x, matrix.t())


def _updated_shape(
    x: Tensor,
    packed: Tensor,
    low: Tensor,
    factor: Tensor,
    scale: float,
    form: str,
    shape: Sequence[int],
    once: bool,
) -> Tensor:
    return x.new_empty(x.shape[0], shape[0])


def _save_bytes_of_update(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, low, factor, ctx.scale, ctx.form, ctx.shape, _ = inputs
    ctx.save_for_backward(packed, low, factor)


def _backward_of_update(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    packed, low, factor = ctx.saved_tensors
    grad = grad.contiguous()
    scaled = factor * ctx.scale
    # y = x W^T + s low factor^T: by x, by low, by factor.
    by_x = PRODUCT(grad, packed, ctx.form, ctx.shape, True, False)
    return by_x, None, grad @ scaled, (grad.t() @ low) * ctx.scale, None, None, None, None


# Not torch.library.custom_op: its first call imports the compiler, which takes seconds.
_OPS = torch.library.Library("headway", "FRAGMENT")
_TAGS = (torch.Tag.pt2_compliant_tag,)
_OPS.define(
    "packed_matrix(Tensor packed, str form, int[] shape, ScalarType dtype) -> Tensor", tags=_TAGS
)
_OPS.define(
    "packed_product(Tensor x, Tensor packed, str form, int[] shape, bool by_outputs, bool once) "
    "-> Tensor",
    tags=_TAGS,
)
_OPS.define(
    "packed_updated(Tensor x, Tensor packed, Tensor low, Tensor factor, float scale, str form, "
    "int[] shape, bool once) -> Tensor",
    tags=_TAGS,
)
_OPS.impl("packed_matrix", _matrix, "CompositeExplicitAutograd")
_OPS.impl("packed_product", _product, "CompositeExplicitAutograd")
_OPS.impl("packed_updated", _updated, "CompositeExplicitAutograd")
torch.library.register_fake("headway::packed_matrix", _matrix_shape, lib=_OPS)
torch.library.register_fake("headway::packed_product", _product_shape, lib=_OPS)
torch.library.register_autograd(
    "headway::packed_product", _backward, setup_context=_save_bytes, lib=_OPS
)
torch.library.register_fake("headway::packed_updated", _updated_shape, lib=_OPS)
torch.library.register_autograd(
    "headway::packed_updated", _backward_of_update, setup_context=_save_bytes_of_update, lib=_OPS
)
MATRIX = torch.ops.headway.packed_matrix.default
PRODUCT = torch.ops.headway.packed_product.default
UPDATED = torch.ops.headway.packed_updated.default
"""The operations, as a compiler and selective recompute see them."""


def packed_matrix(packed: Tensor, layout: PackedLayout, dtype: torch.dtype) -> Tensor:
    """The matrix [O,I] as one operation of a compiled graph; without gradient."""
    return MATRIX(packed, layout.form, (layout.outputs, layout.inputs), dtype)


def packed_linear(
    x: Tensor,
    packed: Tensor,
    layout: PackedLayout,
    bias: Tensor | None = None,
    *,
    once: bool = False,
) -> Tensor:
    """F.linear with a packed matrix; `once`: its result has no values while a block is recomputed,
    see `recomputing`."""
    flat = x.reshape(-1, layout.inputs)
    y = PRODUCT(flat, packed, layout.form, (layout.outputs, layout.inputs), False, once).view(
        *x.shape[:-1], layout.outputs
    )
    if bias is None:
        return y
    return y + bias


def packed_linear_updated(
    x: Tensor,
    packed: Tensor,
    layout: PackedLayout,
    low: Tensor,
    factor: Tensor,
    scale: float,
    *,
    once: bool = False,
) -> Tensor:
    """F.linear with a packed matrix + scale * low @ factor.T: `low` [...,R] is A x, `factor` [O,R]
    is B. `once` as in `packed_linear`."""
    flat = x.reshape(-1, layout.inputs)
    shape = (layout.outputs, layout.inputs)
    y = UPDATED(
        flat, packed, low.reshape(-1, low.shape[-1]), factor, scale, layout.form, shape, once
    )
    return y.view(*x.shape[:-1], layout.outputs)
