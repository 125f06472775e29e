"""How optimizer state is stored in memory: fp32, bf16, or 8 bits in blocks.

Logical fp32 tensors go in and out.

8 bits, blocks of 64 elements (buffers align parameters to 64, so no block holds two):

    codes   [n]       exp_avg as int8 -127..127, exp_avg_sq as uint8 0..255
    scale   [n / 64]  fp32, the largest magnitude of the block
    value   scale * (code / 127)^3  or  scale * (code / 255)^4
            fine near zero, where most elements are

Rounding is stochastic while training (a moment that changes by less than half a step would
otherwise never move) and to the nearest when values are put back. The largest element of a block
has the last code and so its exact value; therefore packing what was unpacked gives the same bits,
and a checkpoint that holds plain values restores 8-bit state exactly, on any layout.

The random numbers are a hash of the value itself and the number of the update: no generator, no
order, no position. So results do not depend on how ranks shard the state.

Blocks with a scale each are those of Dettmers et al. 2021, arXiv:2110.02861; the codes are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

BLOCK = 64
"""Elements with a common scale."""
SIGNED = 127
"""The largest code of exp_avg."""
UNSIGNED = 255
"""The largest code of a square."""
SCALE = ".scale"
"""Suffix of the tensor with a slot's scales."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": torch.uint8}


@runtime_checkable
class HasStorage(Protocol):
    """An optimizer that says how its state is stored; without this it is fp32."""

    storage: StateStorage


@dataclass(frozen=True)
class StateStorage:
    """The form in which state is stored."""

    dtype: torch.dtype = torch.float32
    """float32, bfloat16, or uint8 for blocks of 8 bits."""

    @property
    def is_blocked(self) -> bool:
        """State is stored as codes and scales."""
        return self.dtype == torch.uint8

    def allocate(
        self, slots: Sequence[str], size: int, device: torch.device, *, pin: bool = False
    ) -> dict[str, Tensor]:
        """The tensors behind `slots`, all zero, for `size` elements.

        With 8 bits, their number is rounded up to whole blocks.
        """
        options = {"device": device, "pin_memory": pin}
        if not self.is_blocked:
            return {slot: torch.zeros(size, dtype=self.dtype, **options) for slot in slots}
        blocks = -(-size // BLOCK)
        codes: dict[str, Tensor] = {}
        scales: dict[str, Tensor] = {}
        for slot in slots:
            dtype = torch.int8
            if is_square(slot):
                dtype = torch.uint8
            codes[slot] = torch.zeros(blocks * BLOCK, dtype=dtype, **options)
            scales[slot + SCALE] = torch.zeros(blocks, dtype=torch.float32, **options)
        return codes | scales

    def read(self, state: dict[str, Tensor], slot: str, start: int, size: int) -> Tensor:
        """Elements of a slot: a view, or with 8 bits their values in fp32.

        The latter are on the host, since the device has no room for them.
        """
        if not self.is_blocked:
            return state[slot][start : start + size]
        first_block = start // BLOCK
        last_block = -(-(start + size) // BLOCK)
        codes = state[slot][first_block * BLOCK : last_block * BLOCK].view(-1, BLOCK)
        scale = state[slot + SCALE][first_block:last_block, None]
        values = unpack(codes, scale, square=is_square(slot)).view(-1)
        skipped = start - first_block * BLOCK
        return values[skipped : skipped + size].cpu()

    def write(self, state: dict[str, Tensor], slot: str, start: int, values: Tensor) -> None:
        """Put elements back, rounded to the nearest.

        With 8 bits, from the beginning of a block to the end of one, or of the state.
        """
        if not self.is_blocked:
            state[slot][start : start + values.numel()].copy_(values)
            return
        assert start % BLOCK == 0, "blocks are written whole"
        flat = values.to(state[slot].device, torch.float32)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
        codes, scale = pack(blocks, square=is_square(slot))
        state[slot][start : start + codes.numel()].copy_(codes.view(-1))
        first_block = start // BLOCK
        state[slot + SCALE][first_block : first_block + scale.numel()].copy_(scale.view(-1))


def storage_of(optimizer: object) -> StateStorage:
    """How an optimizer stores its state."""
    if isinstance(optimizer, HasStorage):
        return optimizer.storage
    return StateStorage()


def is_square(slot: str) -> bool:
    """Whether a slot holds squares, which are never negative."""
    return slot.endswith("_sq")


def unpack(codes: Tensor, scale: Tensor, *, square: bool) -> Tensor:
    """Values of codes [blocks, 64] under scale [blocks, 1]."""
    largest = UNSIGNED if square else SIGNED
    return scale * _power(codes.float() / largest, square)


def pack(values: Tensor, *, square: bool, chance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes and scale [blocks, 1] of values [blocks, 64].

    Rounded to the nearest code, or with `chance` in [0, 1) up or down at random.
    """
    # A block of zeros has scale 0; dividing by 1 instead keeps its codes 0.
    scale = values.abs().amax(-1, keepdim=True)
    part = values.abs() / torch.where(scale > 0, scale, 1.0)
    if square:
        largest = UNSIGNED
        root = part.sqrt().sqrt()
    else:
        largest = SIGNED
        root = part.pow(1 / 3)
    exact = root * largest

    if chance is None:
        code = exact.round()
    else:
        # Up with the chance that keeps the mean of the value, not of the code: codes are not evenly
        # spaced.
        low = exact.floor().clamp(max=largest - 1)
        below = _power(low / largest, square)
        above = _power((low + 1) / largest, square)
        code = low + (chance < (part - below) / (above - below))
    if square:
        # A square that is not zero never becomes zero: the update divides by its root.
        return torch.where(part > 0, code.clamp(min=1), 0).to(torch.uint8), scale
    return (code * values.sign()).to(torch.int8), scale


def _power(part: Tensor, square: bool) -> Tensor:
    """The value of a code in [-1, 1] relative to its scale: the 4th or the 3rd power."""
    if square:
        return part.square().square()
    return part * part.square()


def hashed(values: Tensor, step: Tensor, salt: int) -> Tensor:
    """int32 noise from the bits of fp32 values and the number of the update.

    Wellons' hash lowbias32 (https://nullprogram.com/blog/2018/07/31/) in signed arithmetic: the
    masks make arithmetic shifts logical ones. Updates are 2^32 / phi apart, so that their hashes
    are not related.
    """
    h = values.view(torch.int32) + step.to(torch.int32) * -1640531527 + salt
    h = (h ^ ((h >> 16) & 0xFFFF)) * 2146121005
    h = (h ^ ((h >> 15) & 0x1FFFF)) * -2073254261
    return h ^ ((h >> 16) & 0xFFFF)


def chance_of(values: Tensor, step: Tensor, salt: int) -> Tensor:
    """Noise as fp32 in [0, 1)."""
    return (hashed(values, step, salt) & 0xFFFFFF).float() * 2.0**-24


def to_bf16(values: Tensor, step: Tensor, salt: int) -> Tensor:
    """fp32 rounded to bf16, up or down at random so that the mean is kept."""
    # bf16 is the upper half of fp32: noise in the lower half carries over with the chance that the
    # half stands for.
    noisy = values.view(torch.int32) + (hashed(values, step, salt) & 0xFFFF)
    return (noisy & -65536).view(torch.float32).to(torch.bfloat16)
