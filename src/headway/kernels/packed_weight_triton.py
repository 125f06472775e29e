"""The kernels of packed_weight.py for CUDA: the bytes of a matrix in, the matrix out. Imports
Triton, so it is imported where they run.

Each program reads some codes and writes their values; scales and tables come from the GPU's cache.
Sums are not fused with products (`enable_fp_fusion=False`), so that values are those of the
reference. The sections of the bytes are drawn in packed_layout.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from headway.kernels.packed_layout import PackedLayout
from headway.kernels.packed_weight import dynamic, levels, sections

CODES = 2048
"""Bytes of codes that one program reads."""


@triton.jit
def unpack_nf4(
    groups, offset, scale_codes, codes, dynamic_values, level_values, out, elements, CODES: tl.constexpr
):  # fmt: skip # pyright: ignore
    first = tl.program_id(0).to(tl.int64) * CODES
    # A byte holds the codes of two elements, the first one in its high bits.
    byte = first + tl.arange(0, CODES)
    inside = 2 * byte < elements
    pair = tl.load(codes + byte, mask=inside, other=0).to(tl.int32)
    # 64 elements (32 bytes) have one scale, 256 scales have one scale of scales.
    block = byte // 32
    scale_code = tl.load(scale_codes + block, mask=inside, other=0).to(tl.int32)
    group = tl.load(groups + block // 256, mask=inside, other=0.0)
    scale = tl.load(dynamic_values + scale_code) * group + tl.load(offset)
    high = tl.load(level_values + (pair >> 4)) * scale
    low = tl.load(level_values + (pair & 15)) * scale
    element = 2 * first + tl.arange(0, 2 * CODES)
    tl.store(
        out + element, tl.interleave(high, low).to(out.dtype.element_ty), mask=element < elements
    )


@triton.jit
def unpack_int8(scales, codes, out, elements, inputs, CODES: tl.constexpr):  # fmt: skip # pyright: ignore
    element = tl.program_id(0).to(tl.int64) * CODES + tl.arange(0, CODES)
    inside = element < elements
    code = tl.load(codes + element, mask=inside, other=0).to(tl.float32)
    # one scale per row (output), already divided by 127
    scale = tl.load(scales + element // inputs, mask=inside, other=0.0)
    tl.store(out + element, (code * scale).to(out.dtype.element_ty), mask=inside)


def unpack(packed: torch.Tensor, layout: PackedLayout, dtype: torch.dtype) -> torch.Tensor:
    """The matrix [O,I]."""
    out = torch.empty(layout.outputs, layout.inputs, dtype=dtype, device=packed.device)
    parts = sections(packed, layout)
    elements = layout.elements
    if layout.form == "int8":
        unpack_int8[(triton.cdiv(elements, CODES),)](  # pyright: ignore
            parts[0] / 127.0,
            parts[1],
            out,
            elements,
            layout.inputs,
            CODES=CODES,
            enable_fp_fusion=False,
        )
        return out
    unpack_nf4[(triton.cdiv(elements, 2 * CODES),)](  # pyright: ignore
        *parts,
        dynamic(packed.device),
        levels(packed.device),
        out,
        elements,
        CODES=CODES,
        enable_fp_fusion=False,
    )
    return out
