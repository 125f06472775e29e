"""The container of llama.cpp: a GGUF file comes in; metadata values and tensors (name, shape, type,
place) go out.

    | "GGUF" version tensors values | key, type, value ... | name, shape, type, offset ... |
    | padding | data of tensors |

Every count and length is compared with what is left of the file before anything is allocated, so a
damaged or hostile file ends in one line. Values are numbers, texts and flat lists of them; nothing
in a file is run. Tensor data is mapped, not read.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from headway.config.regular_file import regular_only
from headway.errors import CheckpointError
from headway.runtime.optional import need

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Far above what models have: the vocabulary of a large one takes some 10 MB of the header.
MAX_HEADER_BYTES = 1 << 29
MAX_VALUES = 1 << 16
MAX_TENSORS = 1 << 16
MAX_KEY_BYTES = 1 << 16
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
"""Bytes to whose multiple the data of tensors is padded, where the file does not say."""
NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "<u1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Code of a type of values -> its dtype."""
BOOLEAN = 7
TEXT = 8
LIST = 9
PLAIN_TYPES = {0: ("F32", "<f4"), 1: ("F16", "<f2"), 30: ("BF16", "<u2"), 28: ("F64", "<f8")}
"""Types of tensors that are read without the gguf package: code -> name, dtype. numpy has no
bf16: its bits are read as integers."""
REMEDY = "Download or export it again."


@dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """As torch has it: the rows first."""
    type_code: int
    begin: int
    """From the start of the file."""


class GgufFile:
    """An open GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb", opener=regular_only) as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as problem:
            raise CheckpointError(f"{path}: cannot be read: {problem}. {REMEDY}") from None
        self.size = len(self._map)
        # Where reading has come to; it only moves forward, through the header.
        self._at = 0
        try:
            self._read_header()
        except (struct.error, UnicodeDecodeError, OverflowError) as problem:
            raise self._damaged(str(problem)) from None

    def _read_header(self) -> None:
        if self._take(4) != MAGIC:
            raise self._damaged("it does not begin with GGUF")
        (version,) = self._unpack("<I")
        if version not in VERSIONS:
            # In a big-endian file the bytes of the version stand the other way round.
            kind = "big-endian"
            if version not in [known << 24 for known in VERSIONS]:
                kind = f"version {version}"
            raise CheckpointError(
                f"{self.path}: is a GGUF file of {kind}; headway reads versions 2 and 3, little-endian. Convert it."
            )
        # The counts of a damaged file may be anything: refused before loops run over them.
        tensors, values = self._unpack("<QQ")
        if values > MAX_VALUES or tensors > MAX_TENSORS:
            raise self._damaged(f"it claims {values} values and {tensors} tensors")

        self.values: dict[str, Any] = {}
        for _ in range(values):
            key = self._text(MAX_KEY_BYTES)
            if key in self.values:
                raise self._damaged(f"it holds {key[:80]!r} twice")
            (kind,) = self._unpack("<I")
            self.values[key] = self._value(kind)
        # Metadata with the whole vocabulary: its hash names the tokenizer in the cache.
        self.header_bytes = bytes(self._map[: self._at])

        self.tensors: dict[str, GgufTensor] = {}
        entries = [self._tensor() for _ in range(tensors)]
        align = self.values.get("general.alignment", DEFAULT_ALIGNMENT)
        # A power of two, of a size that makes sense.
        if not isinstance(align, int) or align < 8 or align > 1 << 20 or align & (align - 1):
            raise self._damaged(f"general.alignment is {align!r}")
        # Offsets count from the first byte behind the padding.
        start = -(-self._at // align) * align
        for name, shape, code, offset in entries:
            if name in self.tensors:
                raise self._damaged(f"it holds the tensor {name[:80]!r} twice")
            self.tensors[name] = GgufTensor(name, shape, code, start + offset)

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """(name, shape, code of its type, offset) of the next tensor; GGUF lists the fastest dim
        first."""
        name = self._text(MAX_KEY_BYTES)
        (dims,) = self._unpack("<I")
        if not 1 <= dims <= MAX_DIMS:
            raise self._damaged(f"{name[:80]!r} has {dims} dimensions")
        shape = self._unpack(f"<{dims}Q")
        code, offset = self._unpack("<IQ")
        return name, tuple(reversed(shape)), code, offset

    def _take(self, count: int) -> bytes:
        """The next bytes of the header."""
        if count > self.size - self._at or self._at + count > MAX_HEADER_BYTES:
            raise self._damaged("it ends inside its header")
        taken = self._map[self._at : self._at + count]
        self._at += count
        return taken

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _text(self, most: int = MAX_HEADER_BYTES) -> str:
        (length,) = self._unpack("<Q")
        if length > most:
            raise self._damaged(f"a text claims {length} bytes")
        # Tokens of a vocabulary may be parts of characters; keys may not.
        errors = "surrogateescape" if most == MAX_HEADER_BYTES else "strict"
        return self._take(length).decode("utf-8", errors=errors)

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == LIST:
            inner, count = self._unpack("<IQ")
            return self._list(inner, count)
        if kind not in NUMBERS:
            raise self._damaged(f"a value has the unknown type {kind}")
        return self._list(kind, 1)[0]

    def _list(self, kind: int, count: int) -> list[Any]:
        import numpy as np

        if kind == TEXT:
            # Each text has at least the 8 bytes of its length.
            if count * 8 > self.size - self._at:
                raise self._damaged(f"a list claims {count} texts")
            return [self._text() for _ in range(count)]
        if kind not in NUMBERS:
            raise self._damaged(f"a list has the unsupported type {kind}")
        width = np.dtype(NUMBERS[kind]).itemsize
        if count * width > self.size - self._at:
            raise self._damaged(f"a list claims {count} numbers")
        numbers = np.frombuffer(self._take(count * width), NUMBERS[kind]).tolist()
        if kind == BOOLEAN:
            return [bool(number) for number in numbers]
        return numbers

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: is no whole GGUF file: {why}. {REMEDY}")

    def read(self, name: str) -> Any:
        """One tensor as a numpy array of its own: fp32, or fp16 and fp64 as they are stored;
        quantised ones are dequantised."""
        import numpy as np

        tensor = self.tensors[name]
        rows = prod(tensor.shape[:-1])
        columns = tensor.shape[-1]
        if tensor.type_code in PLAIN_TYPES:
            label, stored = PLAIN_TYPES[tensor.type_code]
            flat = self._data(tensor, rows * columns * np.dtype(stored).itemsize).view(stored)
            if label == "BF16":
                # bf16 is the upper half of fp32.
                flat = (flat.astype(np.uint32) << 16).view(np.float32)
            return flat.reshape(tensor.shape).copy()

        import warnings

        block, width = self.block(tensor)
        row_bytes = (columns // block) * width
        data = self._data(tensor, rows * row_bytes).reshape(rows, row_bytes)

        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        with warnings.catch_warnings():
            # Scales of a damaged file overflow; check_finite names the tensor.
            warnings.simplefilter("ignore")
            return dequantize(data, GGMLQuantizationType(tensor.type_code)).reshape(tensor.shape)

    def block(self, tensor: GgufTensor) -> tuple[int, int]:
        """Elements and bytes of a block of a quantised tensor."""
        need("gguf", f"{self.path}: reading quantised weights")
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import _type_traits  # pyright: ignore[reportPrivateUsage]

        try:
            kind = GGMLQuantizationType(tensor.type_code)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: {tensor.name} has the unknown type {tensor.type_code}. Update gguf, or give another quantisation."
            ) from None
        # Types that hold no weights (integers) have no way to become floats.
        if kind not in _type_traits:
            raise CheckpointError(
                f"{self.path}: {tensor.name} is stored as {kind.name}, which is no type of weights. {REMEDY}"
            )
        block, width = GGML_QUANT_SIZES[kind]
        if tensor.shape[-1] % block:
            raise self._damaged(
                f"{tensor.name} has rows of {tensor.shape[-1]}, and {kind.name} needs a multiple of {block}"
            )
        return block, width

    def _data(self, tensor: GgufTensor, count: int) -> Any:
        """The first bytes of a tensor, a view of the mapped file."""
        import numpy as np

        if tensor.begin + count > self.size:
            raise self._damaged(f"{tensor.name} lies beyond its end")
        return np.frombuffer(self._map, np.uint8, count, tensor.begin)
