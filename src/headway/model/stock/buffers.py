"""What a class of transformers computes from its config and keeps in buffers, such as rotary frequencies.

Buffers come in without values; plain attributes of the same names go out, with the values that the class itself knows how to compute. So
neither `to_empty` nor a change of dtype loses them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

UNSET = -7_654_321
"""Stands for a number that nobody has computed, where a type has no NaN."""


def computed_values(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Give every buffer its value as a plain attribute, on the CPU; a buffer that the class leaves open is a ConfigError."""
    found: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        names = [name for name, value in module._buffers.items() if value is not None]
        for name in names:
            module._buffers[name] = _unset(module._buffers[name])
        if names:
            for parameter in module._parameters.values():
                parameter._is_hf_initialized = True  # type: ignore[union-attr]  # transformers leaves it alone then
            with torch.no_grad(), torch.device("cpu"):
                model._init_weights(module)
        for name in names:
            _detach(module, name)
            found.append((module, name))
    return found


def _unset(buffer: Any) -> Tensor:
    value = float("nan") if buffer.is_floating_point() else UNSET
    if buffer.dtype == torch.bool:
        raise ConfigError("it keeps a mask of its own.")
    return torch.full_like(buffer, value, device="cpu")


def _detach(module: Any, name: str) -> None:
    value = module._buffers.pop(name)
    module._non_persistent_buffers_set.discard(name)
    if bool((value.isnan() if value.is_floating_point() else value == UNSET).any()):
        raise ConfigError(f"it does not say how {type(module).__name__}.{name} is computed.")
    object.__setattr__(module, name, value)
