"""Random weights of a class of transformers, drawn as the class draws them, each parameter from (seed, its name)."""

from __future__ import annotations

import json
from functools import lru_cache
from threading import Lock
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from headway.model.stock.classes import canonical, empty_model
from headway.runtime.seed import derive

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from headway.model.config import ModelConfig

_ONE_AT_A_TIME = Lock()
"""A class draws from the default generator, and threads ask for values."""


def stock_value(name: str, config: ModelConfig, seed: int) -> Tensor:
    """The first value of a parameter, fp32 on the CPU."""
    assert config.hf_config is not None
    owner, _, leaf = name.rpartition(".")
    with _ONE_AT_A_TIME:
        model = _empty(canonical(config.hf_config), config.trust_remote_code)
        module = model.get_submodule(owner)
        held = dict(module._parameters)
        try:
            for key, value in held.items():
                if value is not None:
                    module._parameters[key] = nn.Parameter(
                        torch.zeros(value.shape, device="cpu"), requires_grad=False
                    )
            with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
                torch.manual_seed(derive(seed, "init", name))
                model._init_weights(module)
            drawn = module._parameters[leaf]
            assert drawn is not None
            return drawn.detach()
        finally:
            module._parameters.update(held)


@lru_cache(maxsize=2)
def _empty(key: str, trust_remote_code: bool) -> PreTrainedModel:
    return empty_model(json.loads(key), trust_remote_code=trust_remote_code)
