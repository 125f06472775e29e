"""Names of tensors in a model folder and in a class of transformers, which renames some when it
reads and writes a folder.

headway's names of a wrapped model are those of the class. A class that joins or cuts tensors on the
way is refused: headway reads one at a time.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from headway.errors import ConfigError
from headway.model.stock.classes import canonical, empty_model

if TYPE_CHECKING:
    from headway.model.config import ModelConfig


class StockNames:
    """The names of one class, in both directions."""

    def __init__(self, hf_config: dict[str, Any], *, trust_remote_code: bool) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            revert_weight_conversion,
        )

        model = empty_model(hf_config, trust_remote_code=trust_remote_code)
        mapping = get_model_conversion_mapping(model)
        self._renamings: Any = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters: Any = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._state: dict[str, Any] = dict(model.state_dict())
        self._prefix = model.base_model_prefix
        self._class = type(model).__name__
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        self._left_out = [re.compile(pattern) for pattern in ignored]
        self._buffers = {name for name, _ in model.named_buffers()}

        # transformers renames tensors, not names: an empty one stands for each parameter.
        nothing = torch.empty(0, device="cpu")
        self._hf_names = {
            name: next(iter(revert_weight_conversion(model, {name: nothing})))
            for name, _ in model.named_parameters()
        }

    def to_hf_name(self, name: str) -> str:
        """The name in a folder."""
        return self._hf_names.get(name, name)

    def from_hf_name(self, name: str) -> str | None:
        """The name in the class; None for a tensor that holds no parameter."""
        from transformers.core_model_loading import rename_source_key

        # The same function that transformers loads with, so that names cannot differ.
        ours, converter = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if converter is not None:
            raise ConfigError(
                f"{self._class} joins or cuts {name} when it reads a folder; model.family transformers cannot read that."
            )
        if ours in self._state:
            return ours
        if ours in self._buffers or ours.endswith("rotary_emb.inv_freq"):
            return None
        if any(pattern.search(ours) for pattern in self._left_out):
            return None
        # Unknown: the caller refuses it by this name.
        return ours


def names_of(config: ModelConfig) -> StockNames:
    """The names of a wrapped model."""
    assert config.hf_config is not None
    return _names(canonical(config.hf_config), config.trust_remote_code)


@lru_cache(maxsize=16)
def _names(key: str, trust_remote_code: bool) -> StockNames:
    return StockNames(json.loads(key), trust_remote_code=trust_remote_code)
