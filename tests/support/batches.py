"""Small batches made by hand, for tests that need exact control over documents and targets."""

from collections.abc import Sequence

import torch

from headway.data.batch import Batch, StepBatch, StepStats


def make_batch(
    rows: Sequence[Sequence[int]],
    *,
    seq_len: int,
    vocab: int,
    seed: int = 0,
    targets: Sequence[int] | None = None,
) -> Batch:
    """Rows of documents of given lengths with random tokens; `targets` limits how many positions of each row carry loss."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, vocab, (len(rows), seq_len + 1), generator=generator)
    shape = (len(rows), seq_len)
    weight = torch.zeros(shape)
    position = torch.zeros(shape, dtype=torch.int32)
    document = torch.zeros(shape, dtype=torch.int32)
    bounds = torch.full((len(rows), max(9, 2 + max(map(len, rows)))), seq_len, dtype=torch.int32)
    for row, lengths in enumerate(rows):
        start = 0
        for index, length in enumerate([*lengths, seq_len - sum(lengths)]):
            bounds[row, index] = start
            position[row, start : start + length] = torch.arange(length, dtype=torch.int32)
            document[row, start : start + length] = index
            if index < len(lengths):
                weight[row, start : start + length - 1] = 1.0
            start += length
        if targets is not None:
            keep = weight[row].cumsum(0) <= targets[row]
            weight[row] *= keep
    source = torch.zeros(len(rows), dtype=torch.int32)
    single = all(len(lengths) <= 1 for lengths in rows)
    return Batch(
        tokens[:, :-1].clone(),
        tokens[:, 1:].clone(),
        weight,
        position,
        document,
        source,
        bounds,
        single,
    )


def make_step(batch: Batch, num_micro: int) -> StepBatch:
    """Cut one batch into equal microbatches of one step."""
    from dataclasses import replace

    from headway.data.batch import TENSOR_FIELDS

    size = batch.tokens.shape[0] // num_micro
    micro = tuple(
        replace(
            batch,
            **{name: getattr(batch, name)[i * size : (i + 1) * size] for name in TENSOR_FIELDS},
        )
        for i in range(num_micro)
    )
    totals = {"targets": float(batch.loss_weight.sum()), "rows": float(batch.tokens.shape[0])}
    return StepBatch(micro, totals, StepStats(batch.tokens.numel(), 1, 1, 1, 1, 0))
