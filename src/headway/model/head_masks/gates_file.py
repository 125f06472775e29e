"""Trained head gates of a model: masks come out of them. A Hugging Face folder stores them in files
next to the weights.

    head_gates.json            {"window": 1024, "sinks": 128, "log_alpha": [[4.2, -9.8, ...], ...]}
                               one row per layer
    masks.tsv, masks.json      the masks these gates give, for programs that read masks

Other programs ignore these files. headway continues training with them, or exports masks at another
sparsity.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, first_line
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    import torch

    from headway.model.head_masks.masks import HeadMasks

GATES_FILE = "head_gates.json"
MASKS_FILE = "masks.tsv"
DECIDED = 0.9
"""Probability of one side from which a gate has decided."""
RAW_COLUMNS = ("layer", "head", "log_alpha", "expected_z", "p_streaming", "p_full")


@dataclass(frozen=True)
class TrainedGates:
    """The gates of a model on disk."""

    config: HeadGatesConfig
    log_alpha: torch.Tensor
    """fp32 [num_layers, num_kv_heads]"""

    def masks(self, sparsity: float | None = None, *, equal_per_layer: bool = False) -> HeadMasks:
        """Select heads by log_alpha: as many as the sparsity leaves, or without one, as many as
        the gates expect to be full."""
        from headway.model.head_gates import expected_full_heads
        from headway.model.head_masks.masks import num_full_heads, select_heads, warn_if_unreached

        if sparsity is None:
            num_full = expected_full_heads(self.log_alpha)
        else:
            num_full = num_full_heads(self.log_alpha.numel(), sparsity)
        masks = select_heads(self.log_alpha.tolist(), num_full, equal_per_layer=equal_per_layer)
        if equal_per_layer:
            warn_if_unreached(masks, sparsity, num_full)
        return masks.with_reach(self.config.window, self.config.sinks)

    @property
    def sparsity(self) -> float:
        """The share of heads that they expect to stream."""
        from headway.model.head_gates import expected_z

        return float(1 - expected_z(self.log_alpha.double()).mean())

    @property
    def undecided(self) -> float:
        """The share of gates whose z is on one side of a half in fewer than 9 of 10 draws."""
        # P(z > 1/2) = sigmoid(log_alpha), as the stretch is symmetric around a half.
        on_one_side = (self.log_alpha.double().abs()).sigmoid()
        return float((on_one_side < DECIDED).double().mean())

    def raw(self) -> list[tuple[int, int, float, float, float, float]]:
        """One row per head: layer, head, log_alpha, E[z], P(z=0) and P(z=1)."""
        from headway.model.head_gates import expected_z, probability_one, probability_zero

        log_alpha = self.log_alpha.double()
        tables = (
            log_alpha,
            expected_z(log_alpha),
            probability_zero(log_alpha),
            probability_one(log_alpha),
        )
        columns = [table.flatten().tolist() for table in tables]
        heads = log_alpha.shape[1]
        return [
            (index // heads, index % heads, *values)
            for index, values in enumerate(zip(*columns, strict=True))
        ]

    def write_raw(self, path: Path) -> None:
        """Write `raw` as a table with a header.

        It is no mask file, and reading it as one is refused.
        """
        from headway.model.head_masks.file import prepare_output

        prepare_output(path)
        lines = ["\t".join(RAW_COLUMNS), *("\t".join(map(repr, row)) for row in self.raw())]
        write_atomic(path, "\n".join(lines) + "\n")


def write_gates(folder: Path, config: HeadGatesConfig, log_alpha: torch.Tensor) -> None:
    """Write the gates and the masks they give."""
    from headway.model.head_masks.file import write_masks

    gates = TrainedGates(config, log_alpha.detach().float().cpu())
    fields = {"window": config.window, "sinks": config.sinks, "log_alpha": gates.log_alpha.tolist()}
    write_atomic(folder / GATES_FILE, json.dumps(fields) + "\n")
    write_masks(gates.masks(), folder / MASKS_FILE)


def read_gates(folder: Path, config: ModelConfig) -> TrainedGates | None:
    """The gates of a folder, or None.

    Their other settings only matter where gates begin, so defaults stand in for them.
    """
    path = folder / GATES_FILE
    if not path.is_file():
        return None
    import torch

    try:
        fields: Any = read_object(path, CheckpointError)
        log_alpha = torch.tensor(fields["log_alpha"], dtype=torch.float32, device="cpu")
        gates = HeadGatesConfig(window=fields["window"], sinks=fields["sinks"])
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as problem:
        raise CheckpointError(
            f"{path}: cannot be read as head gates ({first_line(problem)}). Delete it to run "
            "without gates."
        ) from None
    # A file that was copied beside another model would otherwise decide about its heads.
    if tuple(log_alpha.shape) != (config.num_layers, config.kv_heads):
        raise CheckpointError(
            f"{path}: holds gates of shape {list(log_alpha.shape)}; the model has "
            f"{config.num_layers} layers of {config.kv_heads} KV "
            "heads. The file belongs to another model; delete it."
        )
    return TrainedGates(gates, log_alpha)
