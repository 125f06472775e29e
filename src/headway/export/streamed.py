"""A safetensors file that is written one tensor at a time: names, shapes and a dtype come in first, then the tensors in any order.

The header needs nothing but shapes, so it is written at once and every tensor goes to its place in the file. Memory holds one tensor.
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
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}
ALIGN = 8
LENGTH_BYTES = 8


class StreamedFile:
    """An open file that takes the tensors it was made for."""

    def __init__(
        self,
        path: Path,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: str,
        notes: Mapping[str, str],
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(sorted(notes.items()))}
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + WIDTHS[dtype] * prod(shape)
            self._places[name] = (begin, end)
            header[name] = {
                "dtype": CODES[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
        content = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        content = content.ljust(-(-len(content) // ALIGN) * ALIGN)
        self.path, self._first = path, LENGTH_BYTES + len(content)
        self._file = open(path, "xb")  # noqa: SIM115
        self._file.write(len(content).to_bytes(LENGTH_BYTES, "little") + content)
        self._file.truncate(self._first + end)

    def write(self, name: str, value: torch.Tensor) -> None:
        """Put a tensor, on the CPU in the file's dtype, into its place."""
        import torch

        begin, end = self._places.pop(name)
        content = value.contiguous().flatten().view(torch.uint8).numpy()
        assert content.nbytes == end - begin, f"{name} has another size than the header says"
        self._file.seek(self._first + begin)
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
            assert not self._places, f"{next(iter(self._places), '')} was not written"
            fsync_file(self._file.fileno())
        self._file.close()
