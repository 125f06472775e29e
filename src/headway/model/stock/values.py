"""Values that only a class of transformers can compute: its initial weights, and what it keeps in
buffers, such as rotary frequencies.

    stock_value        the initial value of a parameter, drawn as the class draws it, from (seed, name)
    computed_values    buffers without values -> plain attributes of the same names, with the values
                       that follow from the config; so neither `to_empty` nor a change of dtype loses
                       them
"""

from __future__ import annotations

import json
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.model.stock.classes import canonical, empty_model
from headway.runtime.seed import derive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headway.model.config import ModelConfig

_ONE_AT_A_TIME = Lock()
"""A class draws from the default generator, and threads ask for values."""
STARTS = (0, 1)
"""Values of a buffer before its class computes it; True and False where it is a mask."""


def stock_value(name: str, config: ModelConfig, seed: int) -> Tensor:
    """The first value of a parameter, fp32 on the CPU."""
    assert config.hf_config is not None
    path, _, leaf = name.rpartition(".")
    with _ONE_AT_A_TIME:
        model = _empty(canonical(config.hf_config), config.trust_remote_code)
        module = model.get_submodule(path)
        # The class initializes whole modules: the parameters of this one get memory meanwhile.
        meta_parameters = dict(module._parameters)
        try:
            for key, value in meta_parameters.items():
                if value is not None:
                    # What does not train is stored, or computed by the class: never zero by itself.
                    start = 0.0 if value.requires_grad else float("nan")
                    module._parameters[key] = nn.Parameter(
                        torch.full(value.shape, start, device="cpu"), requires_grad=False
                    )
            # The state of the default generator is restored: a run's other draws do not change.
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
                torch.manual_seed(derive(seed, "init", name))
                _owner(model, path)._init_weights(module)
            drawn = module._parameters[leaf]
            assert drawn is not None
            if bool(drawn.isnan().any()):
                raise ConfigError(
                    f"{type(model).__name__} does not say how {name} begins. Start from weights: set init.from."
                )
            return drawn.detach()
        finally:
            module._parameters.update(meta_parameters)


@lru_cache(maxsize=2)
def _empty(key: str, trust_remote_code: bool) -> PreTrainedModel:
    return empty_model(json.loads(key), trust_remote_code=trust_remote_code)


def computed_values(model: PreTrainedModel) -> list[tuple[nn.Module, str]]:
    """Give every buffer its value as a plain attribute, on the CPU; a buffer that the class
    leaves open is a ConfigError."""
    computed: list[tuple[nn.Module, str]] = []
    for path, module in model.named_modules():
        buffers = {name: value for name, value in module._buffers.items() if value is not None}
        names = list(buffers)
        if not names:
            continue
        for parameter in module._parameters.values():
            # transformers leaves it alone then; it is on the meta device.
            parameter._is_hf_initialized = True  # type: ignore[union-attr]
        # From two starts: what the class computes is the same both times.
        results: list[dict[str, Tensor]] = []
        for start in STARTS:
            for name in names:
                module._buffers[name] = torch.full_like(buffers[name], start, device="cpu")
            with torch.no_grad(), torch.device("cpu"):
                _owner(model, path)._init_weights(module)
            values = {name: module.get_buffer(name) for name in names}
            results.append(values)
        for name in names:
            _detach(module, name, results[0][name], results[1][name])
            computed.append((module, name))
    return computed


def _owner(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The innermost model of transformers that holds a module: it knows how the module begins."""
    from transformers import PreTrainedModel

    owner = model
    module: Any = model
    for part in path.split(".") if path else ():
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner


def _detach(module: Any, name: str, value: Tensor, again: Tensor) -> None:
    """Make a buffer a plain attribute."""
    module._buffers.pop(name)
    module._non_persistent_buffers_set.discard(name)
    if not torch.equal(value, again):
        raise ConfigError(f"it does not say how {type(module).__name__}.{name} is computed.")
    object.__setattr__(module, name, value)
