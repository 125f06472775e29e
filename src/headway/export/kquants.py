"""Block quantisation of llama.cpp's k types: fp32 rows whose length is a multiple of 256 come in, bytes in the layout of ggml go out.

    q4_k   256 weights: 8 parts of 32 with 4-bit values; weight = scale * value - minimum; 6-bit scales and minima; 144 bytes
    q6_k   256 weights: 16 parts of 16 with 6-bit values; weight = scale * (value - 32); 8-bit scales; 210 bytes

The gguf package reads these types and cannot write them. For each part several scales are tried and refined by least squares, with
weights that count large values more, and the best is kept. tests/unit/export/test_kquants.py bounds the error by what gguf reads back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 256
BLOCK_BYTES = {"q4_k": 144, "q6_k": 210}
CHUNK_BLOCKS = 512
"""Blocks quantised at a time: their temporaries stay in the cache of a core."""
TRIES = 21


def quantise(rows: Tensor, kind: str) -> Any:
    """Rows [N, columns] as uint8 [N, bytes of a row] of one type."""
    import torch

    assert rows.shape[-1] % BLOCK == 0, f"rows of {rows.shape[-1]} are no whole blocks of {BLOCK}"
    blocks = rows.detach().reshape(-1, BLOCK)
    pack = {"q4_k": _q4_k, "q6_k": _q6_k}[kind]
    done = [pack(part.to("cpu", torch.float32)) for part in blocks.split(CHUNK_BLOCKS)]
    return torch.cat(done).reshape(rows.shape[0], -1).numpy()


def _half(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values rounded to fp16, in fp32 and as bytes."""
    import torch

    made = values.to(torch.float16)
    return made.float(), made.contiguous().view(torch.uint8).reshape(len(values), 2)


def _inverse(values: Tensor) -> Tensor:
    """1/x, and 0 for 0."""
    import torch

    return torch.where(
        values == 0,
        torch.zeros_like(values),
        1 / torch.where(values == 0, torch.ones_like(values), values),
    )


def _q4_k(x: Tensor) -> Tensor:
    import torch

    x = x.reshape(-1, 8, 32)
    scale, least = _affine(x)
    d, d_bytes = _half(scale.amax(dim=1) / 63)
    m, m_bytes = _half(least.amax(dim=1) / 63)
    scales = (scale * _inverse(d)[:, None]).round().clamp(0, 63)
    minima = (least * _inverse(m)[:, None]).round().clamp(0, 63)
    width, base = d[:, None] * scales, m[:, None] * minima
    q = ((x + base[..., None]) * _inverse(width)[..., None]).round().clamp(0, 15).to(torch.uint8)
    s, b = scales.to(torch.uint8), minima.to(torch.uint8)
    packed = torch.cat(
        (
            s[:, :4] | (s[:, 4:] >> 4) << 6,
            b[:, :4] | (b[:, 4:] >> 4) << 6,
            s[:, 4:] & 15 | (b[:, 4:] & 15) << 4,
        ),
        dim=1,
    )
    nibbles = q[:, 0::2] | q[:, 1::2] << 4
    return torch.cat((d_bytes, m_bytes, packed, nibbles.reshape(-1, 128)), dim=1)


def _affine(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and minimum (both >= 0) of each part, so that scale * value - minimum with values 0..15 is near x."""
    import torch

    weight = x.square().mean(dim=-1, keepdim=True).sqrt() + x.abs()
    low = x.amin(dim=-1, keepdim=True).clamp(max=0)
    span = x.amax(dim=-1, keepdim=True) - low
    total, total_x = weight.sum(-1), (weight * x).sum(-1)
    best_scale, best_least = (span / 15).squeeze(-1), -low.squeeze(-1)
    best_error = torch.full_like(best_scale, float("inf"))
    for step in torch.linspace(-1, 1, TRIES).tolist():
        q = ((x - low) * ((15 + step) * _inverse(span))).round().clamp(0, 15)
        wq = weight * q
        first, second, cross = wq.sum(-1), (wq * q).sum(-1), (wq * x).sum(-1)
        spread = total * second - first * first
        scale = (total * cross - total_x * first) * _inverse(spread)
        offset = (second * total_x - first * cross) * _inverse(spread)
        alone = offset > 0  # a minimum is subtracted, so it cannot be negative: fit the scale alone
        scale = torch.where(alone, cross * _inverse(second), scale)
        offset = torch.where(alone, torch.zeros_like(offset), offset)
        error = (weight * (scale[..., None] * q + offset[..., None] - x).square()).sum(-1)
        better = (error < best_error) & (scale > 0)
        best_error = torch.where(better, error, best_error)
        best_scale, best_least = (
            torch.where(better, scale, best_scale),
            torch.where(better, -offset, best_least),
        )
    return best_scale, best_least


def _q6_k(x: Tensor) -> Tensor:
    import torch

    x = x.reshape(-1, 16, 16)
    scale = _symmetric(x)
    widest = scale.gather(1, scale.abs().argmax(dim=1, keepdim=True)).squeeze(1)
    d, d_bytes = _half(widest / -128)
    scales = (scale * _inverse(d)[:, None]).round().clamp(-128, 127)
    width = d[:, None] * scales
    q = (
        ((x * _inverse(width)[..., None]).round().clamp(-32, 31) + 32)
        .to(torch.uint8)
        .reshape(-1, 2, 4, 32)
    )
    one, two, three, four = q.unbind(dim=2)
    low = torch.cat((one & 15 | (three & 15) << 4, two & 15 | (four & 15) << 4), dim=-1)
    high = one >> 4 | (two >> 4) << 2 | (three >> 4) << 4 | (four >> 4) << 6
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

    weight = x.square()
    top = x.gather(-1, x.abs().argmax(dim=-1, keepdim=True))
    best = torch.zeros_like(top.squeeze(-1))
    best_gain = torch.full_like(best, -1.0)
    for step in torch.linspace(-1, 1, TRIES).tolist():
        q = (x * (-(32 + step) * _inverse(top))).round().clamp(-32, 31)
        cross, second = (weight * q * x).sum(-1), (weight * q * q).sum(-1)
        gain = cross.square() * _inverse(second)  # what the fit takes off the error
        better = gain > best_gain
        best_gain, best = (
            torch.where(better, gain, best_gain),
            torch.where(better, cross * _inverse(second), best),
        )
    return best
