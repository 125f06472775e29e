"""What encoders read: a picture, a sound or a text comes in, an array of one shape and dtype goes
out. Imports without torch.

    ImageInput      MediaRef -> uint8   [3, size, size]
    CellInput       MediaRef -> uint8   [cells, ...]           a picture at its own size
    MelInput        MediaRef -> float32 [mels, frames]         log-mel in dB
    PurrSight...    the same two as PurrSight prepares them (media/purrsight.py)
    WaveInput       MediaRef -> float32 [samples]              mono, cut or padded with zeros
    ByteInput       str      -> int32   [max_bytes]            UTF-8, -1 after the end
    TokenInput      str      -> int32   [max_tokens]           a tokenizer's ids, -1 after the end

`key` says everything that decides the array, for cache keys.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from headway.errors import DataError
from headway.media import purrsight
from headway.media.items import (
    AudioSpec,
    ImageSpec,
    MediaRef,
    decode_audio,
    decode_image,
    decode_waveform,
)
from headway.media.patches import Grid, PictureSpec, read_cells

Array = np.ndarray[Any, Any]
Item = MediaRef | str


class MediaInputSpec(Protocol):
    """How an item becomes an array."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the array, as numpy calls it."""
        ...

    @property
    def key(self) -> str:
        """Everything that decides the array."""
        ...

    def read(self, item: Item) -> Array:
        """The array of an item; a DataError names an item that cannot be read."""
        ...


def content_hash(item: Item) -> str:
    """The name of an item's content: equal items have equal names, wherever they come from."""
    if isinstance(item, MediaRef):
        return item.content_hash()
    # With a prefix: a text must not have the name of a file with the same bytes.
    return hashlib.sha256(b"text\0" + item.encode()).hexdigest()


def name_of(item: Item) -> str:
    """The name of an item in messages."""
    if isinstance(item, MediaRef):
        return item.name
    return f"the text {item[:40]!r}"


def _media(item: Item) -> MediaRef:
    assert isinstance(item, MediaRef), "a text was given to an encoder of media"
    return item


def _text(item: Item) -> str:
    assert isinstance(item, str), "media were given to an encoder of texts"
    return item


@dataclass(frozen=True)
class ImageInput:
    """Pixels."""

    spec: ImageSpec = ImageSpec()
    dtype: str = "uint8"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def key(self) -> str:
        return repr(self.spec)

    def read(self, item: Item) -> Array:
        """uint8 [3, size, size]."""
        return decode_image(_media(item), self.spec)


@dataclass(frozen=True)
class CellInput:
    """The cells of a picture of any size, for a model's own vision tower."""

    spec: PictureSpec
    grid: Grid = (0, 0)
    """Rows and columns of one picture; (0, 0): not known yet."""
    dtype: str = "uint8"

    def sized(self, grid: Grid) -> CellInput:
        """The input of a picture with so many rows and columns."""
        return replace(self, grid=grid)

    @property
    def shape(self) -> tuple[int, ...]:
        rows, columns = self.grid
        return (rows * columns, *self.spec.cell_shape)

    @property
    def key(self) -> str:
        return repr(self.spec)

    def read(self, item: Item) -> Array:
        """uint8 [rows * columns, *cell_shape]."""
        grid, cells = read_cells(_media(item), self.spec)
        if grid != self.grid:
            raise DataError(f"{name_of(item)}: is of another size than its header says.")
        return cells


@dataclass(frozen=True)
class MelInput:
    """A log-mel."""

    spec: AudioSpec = AudioSpec()
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def key(self) -> str:
        return repr(self.spec)

    def read(self, item: Item) -> Array:
        """float32 [mels, frames]."""
        return decode_audio(_media(item), self.spec)


@dataclass(frozen=True)
class PurrSightImageInput:
    """Pixels as PurrSight prepares them."""

    shape: tuple[int, ...] = (3, purrsight.SIZE, purrsight.SIZE)
    dtype: str = "uint8"
    key: str = "PurrSight's picture"

    def read(self, item: Item) -> Array:
        """uint8 [3, 224, 224]."""
        return purrsight.purrsight_pixels(_media(item))


@dataclass(frozen=True)
class PurrSightMelInput:
    """A log-mel as PurrSight prepares it, with the mel filters of the encoder's own file, `[257,
    64]`."""

    # Not in the key: the filters belong to the encoder, whose identity is part of a table's name.
    filters: Array = field(repr=False, compare=False)
    shape: tuple[int, ...] = (purrsight.MELS, purrsight.FRAMES)
    dtype: str = "float32"
    key: str = "PurrSight's log-mel"

    def read(self, item: Item) -> Array:
        """float32 [64, 256]."""
        return purrsight.purrsight_mel(_media(item), self.filters)


@dataclass(frozen=True)
class WaveInput:
    """Samples of a sound, for encoders with features of their own."""

    rate: int
    samples: int
    dtype: str = "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.samples,)

    @property
    def key(self) -> str:
        return repr(self)

    def read(self, item: Item) -> Array:
        """float32 [samples]."""
        wave = decode_waveform(_media(item), self.rate)[: self.samples]
        return np.pad(wave, (0, self.samples - len(wave)))


@dataclass(frozen=True)
class ByteInput:
    """The bytes of a text."""

    max_bytes: int
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.max_bytes,)

    @property
    def key(self) -> str:
        return repr(self)

    def read(self, item: Item) -> Array:
        """int32 [max_bytes]."""
        return _padded(list(_text(item).encode()[: self.max_bytes]), self.max_bytes)


@dataclass(frozen=True)
class TokenInput:
    """A text as ids of a tokenizer; `encode` gives them with the tokenizer's special tokens, cut to
    `max_tokens`."""

    max_tokens: int
    fingerprint: str
    """The fingerprint of the tokenizer."""
    # Neither in the repr nor compared: the fingerprint stands for it in keys.
    encode: Callable[[str], Sequence[int]] = field(repr=False, compare=False)
    dtype: str = "int32"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.max_tokens,)

    @property
    def key(self) -> str:
        return repr(self)

    def read(self, item: Item) -> Array:
        """int32 [max_tokens]."""
        ids = list(self.encode(_text(item)))
        # `encode` cuts by itself, and an empty text has nothing to embed.
        if not 0 < len(ids) <= self.max_tokens:
            raise DataError(
                f"{name_of(item)}: {len(ids)} tokens; 1 to {self.max_tokens} are expected."
            )
        return _padded(ids, self.max_tokens)


def _padded(ids: list[int], length: int) -> Array:
    # -1 is no byte and no id, so an encoder can tell padding from content.
    return np.array(ids + [-1] * (length - len(ids)), np.int32)
