"""Head gates beside the weights in a Hugging Face folder, where no parameter of that format could hold them.

    head_gates.json            {"window": 1024, "sinks": 128, "log_alpha": [[4.2, -9.8, ...], ...]}      one row per layer
    masks.tsv, masks.json      the same gates settled, for programs that read masks

Other programs ignore these files; headway goes on training with them, or exports masks at another sparsity.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, first_line
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.head_masks import HeadMasks, keep_heads, rank_heads, write_masks
from headway.runtime.json_file import read_object
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    import torch

GATES_FILE = "head_gates.json"
MASKS_FILE = "masks.tsv"


@dataclass(frozen=True)
class TrainedGates:
    """The gates of a model on disk."""

    config: HeadGatesConfig
    log_alpha: torch.Tensor
    """fp32 [num_layers, num_kv_heads]"""

    def masks(self, sparsity: float | None = None, *, equal_per_layer: bool = False) -> HeadMasks:
        """Rank by log_alpha and keep as many heads as the sparsity leaves; without one, as many as the gates expect to be full."""
        from headway.model.head_gates import settled_masks

        window, sinks = self.config.window, self.config.sinks
        if sparsity is not None:
            return rank_heads(self.log_alpha.tolist(), sparsity, equal_per_layer=equal_per_layer).with_reach(window, sinks)
        settled = settled_masks(self.log_alpha, window, sinks)
        if not equal_per_layer:
            return settled
        return keep_heads(self.log_alpha.tolist(), settled.num_full, equal_per_layer=True).with_reach(window, sinks)

    def raw(self) -> list[tuple[int, int, float, float, float, float]]:
        """One row per head: layer, head, log_alpha, E[z], P(z=0) and P(z=1)."""
        from headway.model.head_gates import expected_z, probability_one, probability_zero

        wide = self.log_alpha.double()
        columns = [values.flatten().tolist() for values in (wide, expected_z(wide), probability_zero(wide), probability_one(wide))]
        heads = wide.shape[1]
        return [(number // heads, number % heads, *values) for number, values in enumerate(zip(*columns, strict=True))]


def write_gates(folder: Path, config: HeadGatesConfig, log_alpha: torch.Tensor) -> None:
    """Write the gates and the masks they stand for."""
    from headway.model.head_gates import settled_masks

    values = log_alpha.detach().float().cpu()
    content = {"window": config.window, "sinks": config.sinks, "log_alpha": values.tolist()}
    write_atomic(folder / GATES_FILE, json.dumps(content) + "\n")
    write_masks(settled_masks(values, config.window, config.sinks), folder / MASKS_FILE)


def read_gates(folder: Path, config: ModelConfig) -> TrainedGates | None:
    """The gates of a folder, if it has any; the rest of their settings matter only where gates begin."""
    path = folder / GATES_FILE
    if not path.is_file():
        return None
    import torch

    try:
        content: Any = read_object(path, CheckpointError)
        log_alpha = torch.tensor(content["log_alpha"], dtype=torch.float32, device="cpu")
        gates = HeadGatesConfig(window=content["window"], sinks=content["sinks"])
    except (ValueError, KeyError, TypeError, RuntimeError, OverflowError) as problem:
        raise CheckpointError(f"{path}: cannot be read as head gates ({first_line(problem)}). Delete it to go on without gates.") from None
    if tuple(log_alpha.shape) != (config.num_layers, config.kv_heads):
        raise CheckpointError(
            f"{path}: holds gates of shape {list(log_alpha.shape)}; the model has {config.num_layers} layers of {config.kv_heads} KV "
            "heads. It is another model's; delete it."
        )
    return TrainedGates(gates, log_alpha)
