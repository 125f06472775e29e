"""What a map task leaves for finding duplicates: sorted hashes, so that a reduce task reads one
range of them from each file.

    exact-0000.npy         hash of each text, sorted
    exact-rows-0000.npy    whose hash it is, as a row of the run
    keys-0000.npy          band keys of all texts, sorted
    keys-rows-0000.npy     whose key it is, as a row of the run
    entries-0000.npy       8 bits of each entry of the signatures, one row per text
    sizes-0000.npy         bytes of each text

A run is at most 65,536 texts, so memory does not grow with the size of a task.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from headway.text.clean import CleanRules
from headway.text.dedup import Hashes, NearDuplicates, text_hash

RUN_DOCUMENTS = 1 << 16
EXACT = "exact"
KEYS = "keys"


class SignatureWriter:
    """Collects the hashes of texts and writes them run by run."""

    def __init__(self, folder: Path, rules: CleanRules) -> None:
        self.folder = folder
        self.rules = rules
        self._near: NearDuplicates | None = None
        if rules.duplicates == "near":
            self._near = NearDuplicates(rules.similarity, seed=rules.seed)

        self._runs: list[int] = []
        self._hashes: list[int] = []
        self._sizes: list[int] = []
        self._keys: list[Hashes] = []
        self._entries: list[npt.NDArray[np.uint8]] = []

    def add(self, text: str, size: int) -> None:
        """Take the next row: a text and its bytes."""
        self._sizes.append(size)

        # Without deduplication only sizes are needed, for the report.
        if self.rules.duplicates != "keep":
            self._hashes.append(text_hash(text))

        if self._near is not None:
            signature = self._near.signature(text)
            self._keys.append(self._near.band_keys(signature))
            self._entries.append(signature.astype(np.uint8))

        if len(self._sizes) >= RUN_DOCUMENTS:
            self._flush()

    def finish(self) -> list[int]:
        """Write the rest; returns the number of rows in each run."""
        if self._sizes:
            self._flush()
        return self._runs

    def _flush(self) -> None:
        """Write the files of a run."""
        number = len(self._runs)
        np.save(run_file(self.folder, "sizes", number), np.array(self._sizes, np.int64))
        if self._hashes:
            self._save(EXACT, number, np.array(self._hashes, np.uint64), 1)
        if self._near is not None:
            self._save(KEYS, number, np.concatenate(self._keys), self._near.bands)
            np.save(run_file(self.folder, "entries", number), np.stack(self._entries))

        self._runs.append(len(self._sizes))
        self._hashes = []
        self._sizes = []
        self._keys = []
        self._entries = []

    def _save(self, what: str, number: int, hashes: Hashes, per_row: int) -> None:
        """Write hashes, of which each row has `per_row` in a row, sorted, and whose they are."""
        # Sorted by hash: a reduce task finds its range by binary search and reads nothing else.
        order = np.argsort(hashes, kind="stable")
        np.save(run_file(self.folder, what, number), hashes[order])
        np.save(run_file(self.folder, f"{what}-rows", number), (order // per_row).astype(np.uint32))


def run_file(folder: Path, what: str, number: int) -> Path:
    """The name of a file of a run."""
    return folder / f"{what}-{number:04d}.npy"
