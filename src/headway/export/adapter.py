"""The weights of an adapter come in, a folder that `peft` loads goes out, whole or not at all:
adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.stored_model import FINAL, find_model_of_family
from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import MARK, Dtype, atomic_folder, converted, save_weights
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.peft import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    adapter_settings,
    is_adapter,
    notes_of,
    their_tensors,
)
from headway.model.adapter.stored import StoredAdapter
from headway.optim.groups import ADAPTER
from headway.runtime.digests import write_digests
from headway.runtime.storage import writing

if TYPE_CHECKING:
    import torch

    from headway.model.config import ModelConfig

log = logging.getLogger("headway")

EXPERT_NAMES = ("gate_proj", "up_proj", "down_proj")
FOLDER = "adapter"
"""The adapter folder inside a run's final/."""


def write_adapter(
    values: Mapping[str, torch.Tensor],
    config: AdapterConfig,
    model: ModelConfig,
    out: Path,
    *,
    base: str | None,
    dtype: Dtype = "float32",
) -> None:
    """Write a PEFT folder; replaces an earlier adapter there.

    `values` has low-rank updates and parameters that were trained fully, under headway's names.
    `base` is the base model that the folder names; None: unknown.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir()) and not is_adapter(out)):
        raise ConfigError(
            f"out is {str(out)!r}, which contains something other than an earlier adapter. Give a "
            "folder that does not exist yet."
        )
    # ADAPTER is a part of the name of every low-rank matrix.
    fully_trained = [name for name in values if ADAPTER not in name]
    settings = adapter_settings(config, model, fully_trained, base)
    confused = taken_for_experts(config, model)
    if confused:
        log.warning(
            "%s: with transformers 5, PEFT takes the adapter of %s and others like it for those of "
            "experts and computes another model. headway reads them; for PEFT export the merged "
            "model.",
            out,
            confused[0],
        )

    # Cloned: safetensors refuses tensors that share memory, as views of one parameter do.
    tensors = {
        name: converted(name, value, dtype).contiguous().clone()
        for name, value in their_tensors(values, config, model)
    }

    with writing(out, error=CheckpointError), atomic_folder(out) as folder:
        save_weights(tensors, folder / ADAPTER_WEIGHTS, MARK | notes_of(config, model))
        (folder / ADAPTER_CONFIG).write_text(
            json.dumps(settings, indent=2) + "\n", encoding="utf-8"
        )
        write_digests(folder)


def taken_for_experts(config: AdapterConfig, model: ModelConfig) -> list[str]:
    """Linears of a mixture outside of its experts whose names PEFT 0.21 reads as those of experts:
    of dense layers, shared experts."""
    if model.experts is None:
        return []
    paths = config.modules(model)
    return [path for path in paths if path.rpartition(".")[2] in EXPERT_NAMES]


def export_adapter(
    model: Path | str, out: Path, *, dtype: Dtype = "float32", family: str | None = None
) -> None:
    """Write only the adapter of what `--model` names: a run or a checkpoint that was trained with
    one, or an adapter folder.
    """
    path = Path(model)

    # A run's final/ holds the merged model, from which no adapter can be read. The adapter is in
    # a folder inside it.
    source = path
    for folder in (path / FINAL / FOLDER, path / FOLDER):
        if is_adapter(folder):
            source = folder
            break

    stored = find_model_of_family(source, family)
    adapter: StoredAdapter | None = stored.adapter
    if adapter is None:
        raise ConfigError(
            f"{path}: was trained without an adapter. Leave --adapter out to export the whole "
            "model."
        )

    values = dict(adapter.updates())
    fully_trained = set(adapter.full_weights())
    # `base_weights` has the trained values of these parameters in place of the base's. Without such
    # parameters it is not read: it may be many gigabytes.
    if fully_trained:
        for name, value in adapter.base_weights():
            if name in fully_trained:
                values[name] = value

    write_adapter(values, adapter.config, stored.config, out, base=adapter.base, dtype=dtype)
