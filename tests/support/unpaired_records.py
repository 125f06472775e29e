"""Labelled answers for tests: stores of them, and the batches a loader makes of them."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from headway.data.batch import Batch, StepBatch
from headway.data.config import DataConfig
from headway.data.loader import Loader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection
from headway.store.reader import open_store
from headway.store.writer import StoreWriter
from headway.tasks.kto.source import BAD, GOOD, UnpairedSource

Labelled = tuple[Sequence[int], Sequence[int], bool]
"""Prompt, answer, whether it is good."""


def write_unpaired_store(path: Path, records: Sequence[Labelled], dtype: str = "uint16") -> Path:
    """A store of labelled answers."""
    sources = ["kind=unpaired template=chatml", "made by a test"]
    writer = StoreWriter(
        path, dtype=dtype, tokenizer_fingerprint=None, masked=True, typed=True, sources=sources
    )  # pyright: ignore[reportArgumentType]
    for prompt, answer, is_good in records:
        mask = np.arange(len(prompt) + len(answer)) >= len(prompt)
        writer.add(
            np.array([*prompt, *answer], np.uint16), mask, type_name=GOOD if is_good else BAD
        )
    writer.finish()
    return path


def random_records(
    count: int, *, vocab: int = 64, seed: int = 0, longest: int = 12
) -> list[Labelled]:
    """Random prompts; good answers count up from the prompt's last id, bad ones are noise. Two of three are good."""
    rng = np.random.default_rng(seed)
    records: list[Labelled] = []
    for number in range(count):
        prompt = rng.integers(2, vocab, rng.integers(2, longest)).tolist()
        length = int(rng.integers(2, longest))
        is_good = number % 3 != 0
        answer = (
            ((prompt[-1] + 1 + np.arange(length)) % vocab).tolist()
            if is_good
            else rng.integers(2, vocab, length).tolist()
        )
        records.append((prompt, answer, is_good))
    return records


def steps_of(
    path: Path, *, seq_len: int, rows: int, micro_rows: int | None = None, packing: str = "best_fit"
) -> list[StepBatch]:
    """All steps of one pass over a store, in its order."""
    config = DataConfig(seq_len=seq_len, workers=0, packing=packing, max_documents=12)  # pyright: ignore[reportArgumentType]
    source = MixtureSource(Selection(UnpairedSource(open_store(path), seq_len), max_length=seq_len))
    with Loader(
        config,
        sources=[source],
        rows_per_step=rows,
        micro_rows=micro_rows or rows,
        seed=0,
        epochs=1,
        shuffle=False,
    ) as loader:
        return [step for step, _ in loader]


def documents_of(batch: Batch, row: int) -> list[tuple[list[int], list[int]]]:
    """The documents of a row, padding included: ids, and the targets that carry loss."""
    bounds = batch.bounds[row].tolist()
    documents = []
    for first, last in pairwise(bounds):
        weight = batch.loss_weight[row, first:last] > 0
        documents.append(
            (
                batch.tokens[row, first:last].tolist(),
                batch.targets[row, first:last][weight].tolist(),
            )
        )
    return [document for document in documents if document[0]]
