"""Preference pairs for tests: a store of them, and batches made by hand."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from headway.data.batch import Batch
from headway.store.writer import StoreWriter

Pair = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Prompt, chosen answer, rejected answer."""


def make_pair_store(
    path: Path, *, pairs: int = 40, vocab: int = 64, seed: int = 0, longest: int = 12
) -> Path:
    """Random prompts; chosen answers count up from the prompt's last id, rejected ones are noise."""
    rng = np.random.default_rng(seed)
    sources = ["kind=preference template=chatml", "made by a test"]
    writer = StoreWriter(
        path, dtype="uint16", tokenizer_fingerprint=None, masked=True, sources=sources
    )
    for _ in range(pairs):
        prompt = rng.integers(2, vocab, rng.integers(2, longest)).astype(np.uint16)
        for side in range(2):
            length = int(rng.integers(2, longest))
            answer = (
                (prompt[-1] + 1 + np.arange(length)) % vocab
                if side == 0
                else rng.integers(2, vocab, length)
            )
            mask = np.arange(len(prompt) + length) >= len(prompt)
            writer.add(np.concatenate([prompt, answer]).astype(np.uint16), mask)
    writer.finish()
    return path


def pair_batch(rows: Sequence[Sequence[Pair]], *, seq_len: int, max_documents: int = 8) -> Batch:
    """Rows of pairs, chosen before rejected, as the loader lays them out."""
    shape = (len(rows), seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    targets = torch.zeros(shape, dtype=torch.int64)
    weight = torch.zeros(shape)
    position = torch.zeros(shape, dtype=torch.int32)
    document = torch.zeros(shape, dtype=torch.int32)
    bounds = torch.full((len(rows), max_documents + 1), seq_len, dtype=torch.int32)
    for row, pairs in enumerate(rows):
        start = 0
        texts = [
            (prompt, answer) for prompt, chosen, rejected in pairs for answer in (chosen, rejected)
        ]
        for index, (prompt, answer) in enumerate(texts):
            ids = torch.tensor([*prompt, *answer])
            stop = start + len(ids)
            tokens[row, start:stop] = ids
            targets[row, start : stop - 1] = ids[1:]
            weight[row, start + len(prompt) - 1 : stop - 1] = 1.0
            position[row, start:stop] = torch.arange(len(ids)).int()
            document[row, start:stop] = index
            bounds[row, index] = start
            start = stop
        position[row, start:] = torch.arange(seq_len - start).int()
        document[row, start:] = len(texts)
        bounds[row, len(texts)] = start
    return Batch(
        tokens,
        targets,
        weight,
        position,
        document,
        torch.zeros(len(rows), dtype=torch.int32),
        bounds,
    )
