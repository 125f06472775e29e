"""Names of tensors in a model folder and in a class of transformers, which renames, joins and cuts
some when it reads and writes a folder.

    StockNames     the names of one class, in both directions
    StockJoin      tensors of a folder that are joined or cut into parameters, and back

headway's names of a wrapped model are those of the class. The functions that transformers itself
reads and writes with do the work, so that names and values cannot differ.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.model.families.base import HfPiece
from headway.model.stock.classes import canonical, empty_model

if TYPE_CHECKING:
    from headway.model.config import ModelConfig


@dataclass(frozen=True, eq=False)
class StockJoin:
    """Tensors of a folder that become parameters of the class together; implements `Join` of
    families/base.py."""

    model: Any
    """The class, without memory."""
    converter: Any
    """Of transformers: from the tensors of a folder to parameters."""
    key: str
    sources: tuple[tuple[str, str], ...]
    """Name of a tensor in the folder, and the pattern by which the converter knows it."""
    names: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    """Of the tensors in the folder."""

    @property
    def hf_names(self) -> tuple[str, ...]:
        """The names of the tensors in the folder."""
        return tuple(name for name, _ in self.sources)

    def from_hf(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The parameters, of all tensors by their names in the folder."""
        # A converter collects tensors until it has all of them, so each join needs a new one.
        converter = copy.deepcopy(self.converter)
        for name, pattern in self.sources:
            converter.add_tensor(self.key, name, pattern, values[name])
        converted = converter.convert(self.key, model=self.model, config=self.model.config)
        return {name: _only(value).contiguous() for name, value in converted.items()}

    def to_hf(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of the folder, of all parameters."""
        return _reverted(self.model, values)


class StockNames:
    """The names of one class, in both directions."""

    def __init__(self, hf_config: dict[str, Any], *, trust_remote_code: bool) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

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

        parameters = dict(model.named_parameters())
        self._joins = self._find_joins(model, parameters)
        # transformers renames tensors, not names: an empty one stands for each parameter.
        nothing = torch.empty(0, device="cpu")
        self._hf_names = {
            name: next(iter(_reverted(model, {name: nothing})))
            for name in parameters
            if name not in self._joins
        }

    def _find_joins(self, model: Any, parameters: Mapping[str, Tensor]) -> dict[str, StockJoin]:
        """The join of every parameter that is not one tensor of a folder."""
        if not self._converters:
            return {}
        by_pattern = {
            pattern: converter
            for converter in self._converters
            for pattern in converter.source_patterns
        }
        # All at once: one tensor of the folder may be cut into several parameters.
        values = {name: value.detach() for name, value in parameters.items()}
        tensors = _reverted(model, values)
        sources: dict[str, list[tuple[str, str]]] = {}
        for name in tensors:
            key, pattern = self._renamed(name)
            if pattern is not None:
                sources.setdefault(key, []).append((name, pattern))

        joins: dict[str, StockJoin] = {}
        for key, pairs in sources.items():
            shapes = {name: tuple(tensors[name].shape) for name, _ in pairs}
            converter = by_pattern[pairs[0][1]]
            draft = StockJoin(model, converter, key, tuple(pairs), (), shapes)
            # Which parameters come out, only a conversion says.
            converted = draft.from_hf({name: tensors[name] for name, _ in pairs})
            for name, value in converted.items():
                if name not in parameters or value.shape != parameters[name].shape:
                    raise ConfigError(
                        f"{self._class} joins or cuts {pairs[0][0]} in a way that headway cannot follow."
                    )
            join = StockJoin(model, converter, key, tuple(pairs), tuple(converted), shapes)
            joins |= dict.fromkeys(converted, join)
        return joins

    def _renamed(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        # The same function that transformers loads with, so that names cannot differ.
        return rename_source_key(name, self._renamings, self._converters, self._prefix, self._state)

    def pieces(self, name: str, stored: Collection[str] | None) -> tuple[HfPiece, ...]:
        """The tensors of a folder that hold a parameter; `stored`: the names in the folder."""
        join = self._joins.get(name)
        if join is None:
            return (HfPiece(self._hf_names[name]),)
        # Some folders hold what transformers would join as it is in the class.
        if stored is not None and name in stored and join.hf_names[0] not in stored:
            return (HfPiece(name),)
        return tuple(HfPiece(hf_name, join=join) for hf_name in join.hf_names)

    def to_hf_name(self, name: str) -> str:
        """The name in a folder of a parameter that is one tensor there."""
        return self._hf_names.get(name, name)

    def from_hf_name(self, name: str) -> str | None:
        """The name in the class; None for a tensor that holds no parameter."""
        ours, pattern = self._renamed(name)
        if pattern is None and ours in self._state:
            return ours
        if any(expression.search(name) or expression.search(ours) for expression in self._left_out):
            return None
        if pattern is not None:
            # Tensors of whole joins are found by `pieces`: this one belongs to none.
            return name
        if ours in self._buffers or ours.endswith("rotary_emb.inv_freq"):
            return None
        # Unknown: the caller refuses it by this name.
        return ours


def _reverted(model: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a folder, of parameters of a class."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, dict(values))


def _only(value: Any) -> Tensor:
    """A tensor, which transformers may give in a list."""
    if isinstance(value, list):
        assert len(value) == 1, "one parameter has one value"
        return value[0]
    return value


def names_of(config: ModelConfig) -> StockNames:
    """The names of a wrapped model."""
    assert config.hf_config is not None
    return _names(canonical(config.hf_config), config.trust_remote_code)


@lru_cache(maxsize=16)
def _names(key: str, trust_remote_code: bool) -> StockNames:
    return StockNames(json.loads(key), trust_remote_code=trust_remote_code)
