"""Block quantisation of llama.cpp's k types: fp32 rows whose length is a multiple of 256 come in,
bytes in the layout of ggml go out.

    q4_k   256 weights in 8 parts of 32, 144 bytes: 4-bit values, 6-bit scales and minima
           weight = d * scale * value - m * minimum
    q5_k   as q4_k with a fifth bit of each value, 176 bytes: 32 bytes of fifth bits stand before the
           low four
    q6_k   256 weights in 16 parts of 16, 210 bytes: 6-bit values, 8-bit scales
           weight = d * scale * (value - 32)

d and m are fp16 numbers of the block.

The gguf package reads these types and cannot write them. For each part several scales are tried and
refined by least squares, with weights that count large values more, and the best is kept.
tests/unit/export/test_kquants.py bounds the error by what gguf reads back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
"""Weights of a block."""
BLOCK_BYTES = {"q4_k": 144, "q5_k": 176, "q6_k": 210}
CHUNK_BLOCKS = 512
"""Blocks quantised at a time: their temporaries stay in the cache of a core."""
TRIES = 21
"""Scales tried for each part."""


def quantise(rows: Tensor, kind: str) -> Any:
    """Rows [N, columns] as uint8 [N, bytes of a row] of one type."""
    import torch

    assert rows.shape[-1] % BLOCK == 0, f"rows of {rows.shape[-1]} are no whole blocks of {BLOCK}"
    blocks = rows.detach().reshape(-1, BLOCK)
    pack = {"q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k}[kind]
    packed = [pack(chunk.to("cpu", torch.float32)) for chunk in blocks.split(CHUNK_BLOCKS)]
    return torch.cat(packed).reshape(rows.shape[0], -1).numpy()


def _half(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values [N] rounded to fp16: in fp32 [N], and as bytes [N, 2]."""
    import torch

    rounded = values.to(torch.float16)
    return rounded.float(), rounded.contiguous().view(torch.uint8).reshape(len(values), 2)


def _inverse(values: Tensor) -> Tensor:
    """1/x, and 0 for 0."""
    import torch

    return torch.where(
        values == 0,
        torch.zeros_like(values),
        1 / torch.where(values == 0, torch.ones_like(values), values),
    )


def _q4_k(x: Tensor) -> Tensor:
    """Blocks [N, 256] as bytes [N, 144]: d, m, 12 bytes of scales and minima, 128 of values."""
    import torch

    header, q = _affine_values(x, 15)
    # A byte holds the values at one position of two neighbouring parts.
    nibbles = q[:, 0::2] | q[:, 1::2] << 4
    return torch.cat((header, nibbles.reshape(-1, 128)), dim=1)


def _q5_k(x: Tensor) -> Tensor:
    """Blocks [N, 256] as bytes [N, 176]: d, m, 12 bytes of scales and minima, 32 of fifth bits,
    128 of low bits."""
    import torch

    header, q = _affine_values(x, 31)
    low = q & 15
    nibbles = low[:, 0::2] | low[:, 1::2] << 4
    # Bit p of a byte is the fifth bit of the value at its position in part p.
    high = torch.zeros_like(q[:, 0])
    for part in range(8):
        high |= (q[:, part] >> 4) << part
    return torch.cat((header, high, nibbles.reshape(-1, 128)), dim=1)


def _affine_values(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """The first 16 bytes of a block [N, 16], and its values 0 .. largest, uint8 [N, 8, 32]."""
    import torch

    x = x.reshape(-1, 8, 32)
    scale, minimum = _affine(x, largest)
    d, d_bytes = _half(scale.amax(dim=1) / 63)
    m, m_bytes = _half(minimum.amax(dim=1) / 63)
    scales = (scale * _inverse(d)[:, None]).round().clamp(0, 63)
    minima = (minimum * _inverse(m)[:, None]).round().clamp(0, 63)

    # The values are chosen for the rounded scales, which a reader multiplies by.
    width = d[:, None] * scales
    base = m[:, None] * minima
    shifted = (x + base[..., None]) * _inverse(width)[..., None]
    q = shifted.round().clamp(0, largest).to(torch.uint8)

    # ggml's layout: 6 bits each of the first four scales and minima fill a byte's low bits. The
    # high two bits there belong to the last four, whose low four bits share the last 4 bytes.
    s = scales.to(torch.uint8)
    b = minima.to(torch.uint8)
    packed = torch.cat(
        (
            s[:, :4] | (s[:, 4:] >> 4) << 6,
            b[:, :4] | (b[:, 4:] >> 4) << 6,
            s[:, 4:] & 15 | (b[:, 4:] & 15) << 4,
        ),
        dim=1,
    )
    return torch.cat((d_bytes, m_bytes, packed), dim=1), q


def _affine(x: Tensor, largest: int) -> tuple[Tensor, Tensor]:
    """Scale and minimum (both >= 0) of each part, so that scale * value - minimum with values 0 ..
    largest is near x.
    """
    import torch

    # The weights that llama.cpp gives the errors of this type: rms(x) + |x|.
    weight = x.square().mean(dim=-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(dim=-1, keepdim=True).clamp(max=0)
    span = x.amax(dim=-1, keepdim=True) - low
    total = weight.sum(-1)
    total_x = (weight * x).sum(-1)

    best_scale = (span / largest).squeeze(-1)
    best_minimum = -low.squeeze(-1)
    best_error = torch.full_like(best_scale, float("inf"))
    for step in torch.linspace(-1, 1, TRIES).tolist():
        q = ((x - low) * ((largest + step) * _inverse(span))).round().clamp(0, largest)

        # The scale s and offset o that minimise sum(w * (s*q + o - x)^2) for these q: the normal
        # equations of weighted least squares.
        wq = weight * q
        sum_wq = wq.sum(-1)
        sum_wqq = (wq * q).sum(-1)
        sum_wqx = (wq * x).sum(-1)
        determinant = total * sum_wqq - sum_wq * sum_wq
        scale = (total * sum_wqx - total_x * sum_wq) * _inverse(determinant)
        offset = (sum_wqq * total_x - sum_wq * sum_wqx) * _inverse(determinant)

        # A minimum is subtracted and cannot be negative. There the scale is fitted alone.
        positive = offset > 0
        scale = torch.where(positive, sum_wqx * _inverse(sum_wqq), scale)
        offset = torch.where(positive, torch.zeros_like(offset), offset)

        error = (weight * (scale[..., None] * q + offset[..., None] - x).square()).sum(-1)
        better = (error < best_error) & (scale > 0)
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, -offset, best_minimum)
    return best_scale, best_minimum


def _q6_k(x: Tensor) -> Tensor:
    """Blocks [N, 256] as bytes [N, 210]: 128 with low bits, 64 with high bits, 16 scales, d."""
    import torch

    x = x.reshape(-1, 16, 16)
    scale = _symmetric(x)
    widest = scale.gather(1, scale.abs().argmax(dim=1, keepdim=True)).squeeze(1)
    # Divided by -128 rather than 127: int8 has one value more on its negative side.
    d, d_bytes = _half(widest / -128)
    scales = (scale * _inverse(d)[:, None]).round().clamp(-128, 127)
    width = d[:, None] * scales
    values = (x * _inverse(width)[..., None]).round().clamp(-32, 31) + 32

    # ggml's layout: each half of a block is four quarters of 32 values. A byte of `low` holds the
    # low four bits of two quarters, a byte of `high` the high two bits of all four.
    halves = values.to(torch.uint8).reshape(-1, 2, 4, 32)
    q1, q2, q3, q4 = halves.unbind(dim=2)
    low = torch.cat((q1 & 15 | (q3 & 15) << 4, q2 & 15 | (q4 & 15) << 4), dim=-1)
    high = q1 >> 4 | (q2 >> 4) << 2 | (q3 >> 4) << 4 | (q4 >> 4) << 6
    return torch.cat(
        (
            low.reshape(-1, 128),
            high.reshape(-1, 64),
            scales.to(torch.int8).view(torch.uint8),
            d_bytes,
        ),
        dim=1,
    )


def _symmetric(x: Tensor) -> Tensor:
    """The scale of each part, so that scale * value with values -32..31 is near x."""
    import torch

    # The weights that llama.cpp gives the errors of this type: x^2.
    weight = x.square()
    largest = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    best_scale = torch.zeros_like(largest.squeeze(-1))
    best_gain = torch.full_like(best_scale, -1.0)
    for step in torch.linspace(-1, 1, TRIES).tolist():
        # The value of largest magnitude becomes about -32, the farther end of -32..31.
        q = (x * (-(32 + step) * _inverse(largest))).round().clamp(-32, 31)

        # Of all scales s, sum(w*q*x) / sum(w*q^2) has the least error, which is
        # sum(w*x^2) - gain. Only the gain depends on q.
        sum_wqx = (weight * q * x).sum(-1)
        sum_wqq = (weight * q * q).sum(-1)
        gain = sum_wqx.square() * _inverse(sum_wqq)
        better = gain > best_gain
        best_gain = torch.where(better, gain, best_gain)
        best_scale = torch.where(better, sum_wqx * _inverse(sum_wqq), best_scale)
    return best_scale
