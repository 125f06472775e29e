"""A safetensors file that is written one tensor at a time: names, shapes and a dtype come in first,
then the tensors in any order.

The header needs nothing but shapes, so it is written at once and every tensor goes to its place in
the file. Memory holds one tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from headway.runtime.storage import fsync_file

if TYPE_CHECKING:
    from types import TracebackType

    import torch

CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""How the header names dtypes."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes of an element."""
ALIGN = 8
"""The header is padded with spaces to a multiple of this, so that tensors begin aligned."""
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its header as a little-endian integer."""


class StreamedFile:
    """An open file that takes the tensors it was made for."""

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        notes: Mapping[str, str],
    ) -> None:
        # Sorted, so that two exports of one model have the same bytes.
        header: dict[str, object] = {"__metadata__": dict(sorted(notes.items()))}
        # The tensors still to be written, each with its first byte and its end after the header.
        self._ranges: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            begin = end
            end = begin + WIDTHS[dtype] * prod(shape)
            self._ranges[name] = (begin, end)
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        content = content.ljust(-(-len(content) // ALIGN) * ALIGN)

        self.path = path
        self._data_begin = LENGTH_BYTES + len(content)
        self._file = open(path, "xb")  # noqa: SIM115
        self._file.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        # The file has its final size at once. Tensors may then be written in any order.
        self._file.truncate(self._data_begin + end)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Put a tensor, on the CPU in the file's dtype, into its place."""
        import torch

        begin, end = self._ranges.pop(name)
        # As bytes, because numpy has no bfloat16.
        content = value.contiguous().flatten().view(torch.uint8).numpy()
        assert content.nbytes == end - begin, f"{name} has another size than the header says"
        self._file.seek(self._data_begin + begin)
        self._file.write(content.data)

    def __enter__(self) -> StreamedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            assert not self._ranges, f"{next(iter(self._ranges), '')} was not written"
            fsync_file(self._file.fileno())
        self._file.close()
