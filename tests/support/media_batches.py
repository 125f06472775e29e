"""Small multimodal batches and models made by hand: rows of documents with soft tokens of images and sounds."""

from dataclasses import replace
from typing import Any

import torch

from headway.data.batch import TENSOR_FIELDS, Batch, StepBatch, StepStats
from headway.model.config import ModelConfig
from headway.model.media_shape import MediaInput, MediaShape
from headway.optim.groups import hypers
from headway.parallel.collectives import RankGroup
from headway.tasks.base import StepInfo
from support.batches import make_batch

SHAPE = MediaShape(
    (MediaInput("image", 6, 3), MediaInput("audio", 5, 3)), hidden=8, shared=True, aligned=4
)
PATCHES = MediaShape((MediaInput("image", 6, 4, vectors=4),), hidden=32)
ITEMS = 2
ROWS = 16


def media_config(shape: MediaShape = SHAPE, **changes: Any) -> ModelConfig:
    """A small language model with media inputs."""
    sizes = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_size": 48,
        "vocab_size": 64,
        "max_seq_len": 32,
    }
    return ModelConfig(**{**sizes, "media": shape, **changes})


def with_media(
    batch: Batch, shape: MediaShape, seed: int = 0, *, present: bool | None = None
) -> Batch:
    """Soft tokens at fixed places of every row, loss only elsewhere; about a third of the items are absent unless `present` is given."""
    generator = torch.Generator().manual_seed(100 + seed)
    rows, length = batch.tokens.shape
    slot = torch.full((rows, length), -1, dtype=torch.int32)
    extra: dict[str, torch.Tensor] = {}
    begin = column = 0
    for modality in shape.inputs:
        features = torch.randn(rows, ITEMS, modality.vectors, modality.width, generator=generator)
        here = (
            torch.rand(rows, ITEMS, generator=generator) > 0.3
            if present is None
            else torch.full((rows, ITEMS), present)
        )
        extra |= {
            f"media.{modality.modality}": features,
            f"media.{modality.modality}.present": here,
        }
        for item in range(ITEMS):
            for row in range(0, rows, 1 + item):  # not every row has all items
                position = column + row % 2
                slot[row, position : position + modality.tokens] = (
                    begin
                    + item * modality.tokens
                    + torch.arange(modality.tokens, dtype=torch.int32)
                )
            column += modality.tokens + 1
        begin += ITEMS * modality.tokens
    weight = batch.loss_weight.clone()
    weight[:, :-1][slot[:, 1:] >= 0] = 0.0
    return replace(batch, loss_weight=weight, extra={"media.slot": slot, **extra})


def media_batch(index: int, shape: MediaShape = SHAPE, **columns: Any) -> Batch:
    """The rows of step `index`."""
    rows = [[16], [7, 5], [3, 3, 3], [12], [2, 9], [4, 4, 4, 4], [9], [5]] * 2
    return with_media(make_batch(rows, seq_len=16, vocab=64, seed=index), shape, index, **columns)


def media_share(
    index: int, micro: int, rank: int, world: int, shape: MediaShape = SHAPE
) -> StepBatch:
    """This rank's microbatches of step `index`."""
    batch = media_batch(index, shape)
    size = ROWS // micro
    each = micro // world
    parts = [slice(i * size, (i + 1) * size) for i in range(rank * each, (rank + 1) * each)]
    micros = tuple(
        replace(
            batch,
            **{name: getattr(batch, name)[part] for name in TENSOR_FIELDS},
            extra={name: column[part] for name, column in batch.extra.items()},
        )
        for part in parts
    )
    totals = {"targets": float(batch.loss_weight.sum()), "rows": float(ROWS)}
    return StepBatch(
        micros, totals, StepStats(batch.tokens.numel(), 1, 1, 1, 1, 0), first_microbatch=rank * each
    )


def train_media(engine: Any, group: RankGroup, micro: int, steps: int) -> list[tuple[float, float]]:
    """Train; returns (loss, norm) of every step."""
    seen = []
    data = engine.spec.ranks.data
    for index in range(steps):
        share = media_share(index, micro, data.rank, data.size, engine.spec.model.media)
        result = engine.forward_backward(share, StepInfo(index, 20))
        update = engine.update(hypers(engine.spec.optim, engine.groups, index, 20))
        seen.append((float(result.loss), float(update.norm)))
    return seen
