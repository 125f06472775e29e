"""A small aligner and steps of samples whose rows are the same however many ranks and microbatches share them."""

from typing import Any

import torch

from headway.data.batch import Batch, StepBatch, StepStats
from headway.model.config import ModelConfig

ROWS = 8
ENCODERS = {
    "text": {"kind": "text_bytes", "max_bytes": 12, "width": 16, "layers": 1, "heads": 2},
    "image": {"kind": "vit", "image_size": 16, "patch": 8, "width": 16, "layers": 2, "heads": 2},
    "audio": {"kind": "audio_cnn", "frames": 16, "width": 32, "stages": 2},
}
ALIGNER = ModelConfig.model_validate({"aligner": {"encoders": ENCODERS, "dim": 8}, "vocab_size": 1})
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "text": ((12,), torch.int32),
    "image": ((3, 16, 16), torch.uint8),
    "audio": ((64, 16), torch.float32),
}


def columns(seed: int, rows: int = ROWS, absent: float = 0.3) -> dict[str, torch.Tensor]:
    """Media of some samples; about a third of them lacks each modality, and the last row is empty."""
    draw = torch.Generator().manual_seed(seed)
    media_columns: dict[str, torch.Tensor] = {"sample": torch.arange(rows)}
    media_columns["sample"][-1] = -1
    # Samples 0 and 1, 2 and 3, ... have the same caption; every picture and sound is another.
    media_columns["content.text"] = torch.arange(rows) // 2
    media_columns["content.image"] = torch.arange(rows) + (1 << 40)
    media_columns["content.audio"] = torch.arange(rows) + (1 << 41)
    for name, (shape, dtype) in SHAPES.items():
        present = torch.rand(rows, generator=draw) >= absent
        present[-1] = False
        if dtype == torch.float32:
            values = torch.randn(rows, *shape, generator=draw) * 20 - 40
        else:
            values = torch.randint(0, 200, (rows, *shape), generator=draw).to(dtype)
        is_present = present.view(-1, *[1] * len(shape))
        media_columns[f"media.{name}"] = torch.where(
            is_present, values, torch.zeros((), dtype=dtype)
        )
        media_columns[f"present.{name}"] = present
    return media_columns


def batch_of(values: dict[str, torch.Tensor]) -> Batch:
    """A microbatch with these columns."""
    rows = len(values["sample"])
    zeros = torch.zeros(rows, 2, dtype=torch.int64)
    ints = zeros.int()
    return Batch(
        zeros,
        zeros,
        zeros.float(),
        ints,
        ints,
        ints[:, 0],
        torch.tensor([[0, 1, 2]] * rows).int(),
        True,
        2,
        extra=values,
    )


def share_of_samples(index: int, micro: int, rank: int, world: int, rows: int = ROWS) -> StepBatch:
    """This rank's microbatches of step `index`."""
    values = columns(index, rows)
    size = rows // micro
    each = micro // world
    parts = [slice(i * size, (i + 1) * size) for i in range(rank * each, (rank + 1) * each)]
    micros = tuple(
        batch_of({name: value[part] for name, value in values.items()}) for part in parts
    )
    return StepBatch(
        micros,
        {"targets": 0.0, "rows": float(rows - 1)},
        StepStats(rows, 1, 1, 1, 1, 0),
        first_microbatch=rank * each,
    )


def naive_loss(
    values: torch.Tensor, present: torch.Tensor, log_scales: torch.Tensor
) -> torch.Tensor:
    """The loss of unit vectors [N, M, D] by plain autograd: cross entropy both ways over samples that have both modalities."""
    losses: list[Any] = []
    for a in range(values.shape[1]):
        for b in range(a + 1, values.shape[1]):
            both = present[:, a] & present[:, b]
            if int(both.sum()) < 2:
                continue
            scale = (log_scales[a].exp() + log_scales[b].exp()) / 2
            logits = scale * values[both, a] @ values[both, b].T
            right = torch.arange(len(logits))
            losses.append(
                (
                    torch.nn.functional.cross_entropy(logits, right)
                    + torch.nn.functional.cross_entropy(logits.T, right)
                )
                / 2
            )
    return sum(losses) / len(losses) if losses else values.sum() * 0 + log_scales.sum() * 0
