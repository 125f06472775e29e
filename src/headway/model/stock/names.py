"""Names of tensors in a model folder and in a class of transformers, which renames some when it reads and writes a folder.

headway's names of a wrapped model are those of the class. A class that joins or cuts tensors on the way is refused: headway reads one at
a time.
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

    def __init__(self, given: dict[str, Any], *, trust_remote_code: bool) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            revert_weight_conversion,
        )

        model = empty_model(given, trust_remote_code=trust_remote_code)
        found = get_model_conversion_mapping(model)
        self._renamings: Any = [one for one in found if isinstance(one, WeightRenaming)]
        self._converters: Any = [one for one in found if isinstance(one, WeightConverter)]
        self._state: dict[str, Any] = dict(model.state_dict())
        self._prefix, self._class = model.base_model_prefix, type(model).__name__
        self._left_out = [
            re.compile(one)
            for one in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        ]
        self._buffers = {name for name, _ in model.named_buffers()}
        nothing = torch.empty(0, device="cpu")
        self._theirs = {
            name: next(iter(revert_weight_conversion(model, {name: nothing})))
            for name, _ in model.named_parameters()
        }

    def to_theirs(self, name: str) -> str:
        """The name in a folder."""
        return self._theirs.get(name, name)

    def to_ours(self, name: str) -> str | None:
        """The name in the class; None for a tensor that holds no parameter."""
        from transformers.core_model_loading import rename_source_key

        ours, converter = rename_source_key(
            name, self._renamings, self._converters, self._prefix, self._state
        )
        if converter is not None:
            raise ConfigError(
                f"{self._class} joins or cuts {name} when it reads a folder; model.family transformers cannot read that."
            )
        if ours in self._state:
            return ours
        holds_nothing = (
            ours in self._buffers
            or ours.endswith("rotary_emb.inv_freq")
            or any(one.search(ours) for one in self._left_out)
        )
        return None if holds_nothing else ours


def names_of(config: ModelConfig) -> StockNames:
    """The names of a wrapped model."""
    assert config.hf_config is not None
    return _names(canonical(config.hf_config), config.trust_remote_code)


@lru_cache(maxsize=16)
def _names(key: str, trust_remote_code: bool) -> StockNames:
    return StockNames(json.loads(key), trust_remote_code=trust_remote_code)
