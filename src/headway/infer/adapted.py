"""Models on disk that are a base and an adapter: what is stored comes in, one model without updates goes out, or its two halves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.peft import PeftAdapter, base_of, is_adapter, read_adapter
from headway.model.config import ModelConfig

if TYPE_CHECKING:
    import torch

    Values = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Carried:
    """The adapter a stored model carries, and the weights beneath it."""

    config: AdapterConfig
    base: str | None
    """Where the base lies, as far as it is known."""
    base_weights: Callable[[], Values]
    """Every parameter of the model without the updates."""
    updates: Callable[[], Mapping[str, torch.Tensor]]
    whole: Callable[[], list[str]]
    """Names of the model's own parameters that were trained beside the updates."""
    patterned: bool = False
    """Whether its linears had ranks or alphas of their own: such an adapter is merged, never trained further."""

    def merged(self, model: ModelConfig) -> Values:
        """Every parameter of the model that does the same without an adapter."""
        from headway.model.adapter.lora import merged, with_updates

        modules = self.config.modules(model)
        return merged(with_updates(self.base_weights(), self.config, modules, 0, self.updates()), self.config, modules)


def carry(folder: Path, model: ModelConfig, base: str, base_weights: Callable[[], Values]) -> Carried:
    """A PEFT folder over a base."""

    @cache
    def opened() -> PeftAdapter:
        return read_adapter(folder, model)

    def replaced() -> Values:
        whole = opened().whole
        for name, value in base_weights():
            yield name, whole.get(name, value)

    return Carried(opened().config, base, replaced, lambda: opened().updates, lambda: sorted(opened().whole), opened().patterned)


def base_folder(folder: Path) -> str:
    """Where the base of an adapter folder lies; refused where that cannot be known."""
    base = base_of(folder)
    if base is None:
        raise ConfigError(f"{folder}: is an adapter and does not say of which model. Give the model, and this folder as init.adapter.")
    return base


__all__ = ["Carried", "base_folder", "carry", "is_adapter"]
