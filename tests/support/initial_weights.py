"""The weights that a run begins with, in a model that no engine holds."""

import torch

from headway.model.base import Model
from headway.model.init import initial_value


def initialize(model: Model, seed: int) -> None:
    """Give every parameter its initial value, in place."""
    specs = {spec.name: spec for spec in model.param_specs()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(specs[name], model.config, seed))
