"""The ids of a text that comes in blocks: in memory while they are few, in a temporary file when they are many."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

IN_MEMORY_TOKENS = 1 << 22


class FileIds(Sequence[int]):
    """Ids that lie in a file; a slice of them is read when it is asked for."""

    def __init__(self, values: npt.NDArray[np.uint32]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._values[index].tolist()


def encode_blocks(blocks: Iterable[str], tokenizer: Tokenizer) -> tuple[Sequence[int], int]:
    """The ids of a text, and its length in bytes; memory does not grow with the text where the tokenizer has cuts."""
    ids: list[int] = []
    size = 0
    file = None
    for piece in tokenizer.pieces(blocks):
        ids += tokenizer.encode_pieces([piece])[0]
        size += len(piece.text.encode())
        if len(ids) > IN_MEMORY_TOKENS:
            file = tempfile.TemporaryFile(prefix="headway-ids-") if file is None else file  # noqa: SIM115 - the mapping keeps it
            file.write(np.array(ids, np.uint32).data)
            ids = []
    if file is None:
        return ids, size
    with file:
        file.write(np.array(ids, np.uint32).data)
        file.flush()
        return FileIds(np.memmap(file, np.uint32, "r")), size
