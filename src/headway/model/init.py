"""Initial values: each parameter is drawn from (seed, its name), so neither the order nor the layout of a model changes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway.model.layout import DECIDED, GATES, ROUTER_BIAS
from headway.model.media_shape import PROJECTOR
from headway.runtime.seed import derive

if TYPE_CHECKING:
    from headway.model.config import ModelConfig
    from headway.model.transformer import Transformer

TO_THE_STREAM = ("o_proj.weight", "down_proj.weight")


def initialize(model: Transformer, seed: int) -> None:
    """Give every parameter its initial value, in place."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_value(name, parameter.shape, model.config, seed))


def initial_value(name: str, shape: Sequence[int], config: ModelConfig, seed: int) -> torch.Tensor:
    """fp32 on the CPU: norms 1 (or 0 where 1 is added to them), biases 0, gates nearly full, matrices normal.

    Matrices that add to the stream shrink with depth, so that it does not grow.
    """
    if config.aligner is not None:
        from headway.model.aligner import aligner_value

        return aligner_value(name, tuple(shape), config, seed)
    if config.hf_config is not None:
        from headway.model.stock.first_values import stock_value

        return stock_value(name, config, seed)
    if name.endswith("bias"):
        return torch.zeros(*shape, device="cpu")
    if name.endswith("norm.weight"):
        return torch.full(tuple(shape), 0.0 if config.norm == "rmsnorm1p" else 1.0, device="cpu")
    generator = torch.Generator(device="cpu").manual_seed(derive(seed, "init", name))
    if name == GATES:
        gates = config.head_gates
        assert gates is not None
        if gates.stripe:
            return torch.where(torch.arange(shape[0], device="cpu") % 2 == 0, DECIDED, -DECIDED)[
                :, None
            ].repeat(1, shape[1])
        return torch.empty(*shape, device="cpu").normal_(
            gates.init_mean, gates.init_std, generator=generator
        )
    if name.startswith(PROJECTOR) and name.endswith("weight"):
        bound = shape[1] ** -0.5  # as torch initializes a linear: features have any scale
        return torch.empty(*shape, device="cpu").uniform_(-bound, bound, generator=generator)
    if name.endswith(ROUTER_BIAS):
        return torch.zeros(*shape, device="cpu")
    std = (
        config.init_std / (2 * config.num_layers) ** 0.5
        if name.endswith(TO_THE_STREAM)
        else config.init_std
    )
    return torch.empty(*shape, device="cpu").normal_(0.0, std, generator=generator)
