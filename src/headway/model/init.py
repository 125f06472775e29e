"""Initial values: each parameter is drawn from (seed, its name), so neither the order of parameters
nor the layout of ranks changes them.

A rank draws the whole parameter on the CPU and keeps its part: the same run on any number of ranks
begins with the same weights.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

import torch

from headway.model.layout import DECIDED, ParamSpec
from headway.runtime.seed import derive

if TYPE_CHECKING:
    from headway.model.config import ModelConfig


DECAYS = (0.01, 16.0)
"""Range of exp(A_log) of linear attention; away from 0, whose logarithm is infinite."""


def initial_value(spec: ParamSpec, config: ModelConfig, seed: int) -> torch.Tensor:
    """fp32 on the CPU: norms 1 (or 0 where 1 is added to them), biases 0, gates nearly full,
    matrices normal.

    Matrices that add to the stream begin smaller, by sqrt(2 layers): so many terms are added to it,
    and its variance stays that of one (GPT-2).
    """
    # Only a wrapped class itself knows how its weights are drawn.
    if config.hf_config is not None:
        from headway.model.stock.values import stock_value

        return stock_value(spec.name, config, seed)
    if spec.start == "zero":
        return torch.zeros(spec.shape, device="cpu")
    if spec.start == "one":
        return torch.ones(spec.shape, device="cpu")
    if spec.start == "norm":
        factor = 0.0 if config.norm == "rmsnorm1p" else 1.0
        return torch.full(spec.shape, factor, device="cpu")

    generator = torch.Generator(device="cpu").manual_seed(derive(seed, "init", spec.name))
    value = torch.empty(spec.shape, device="cpu")
    if spec.start == "gates":
        gates = config.head_gates
        assert gates is not None
        if gates.stripe:
            # Every second layer full, the others streaming: [layers, KV].
            is_even = torch.arange(spec.shape[0], device="cpu") % 2 == 0
            return torch.where(is_even, DECIDED, -DECIDED)[:, None].repeat(1, spec.shape[1])
        return value.normal_(gates.init_mean, gates.init_std, generator=generator)
    if spec.start == "decay":
        # As published models begin: some heads keep nearly everything, some nearly nothing.
        return value.uniform_(*DECAYS, generator=generator).log_()
    if spec.start == "uniform":
        # As torch initializes a linear or a convolution: its inputs are of any scale, no normed
        # stream.
        bound = prod(spec.shape[1:]) ** -0.5
        return value.uniform_(-bound, bound, generator=generator)
    if spec.std is not None:
        return value.normal_(0.0, spec.std, generator=generator)

    assert spec.start in ("normal", "residual"), f"{spec.name} begins with what is given"
    std = config.init_std
    if spec.start == "residual":
        std /= (2 * config.num_layers) ** 0.5
    return value.normal_(0.0, std, generator=generator)
