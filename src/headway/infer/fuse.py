"""One matrix product instead of several where they read the same input: q, k and v; gate and up. Weights are moved, not copied twice:
the projections keep their names and become parts of one tensor."""

from __future__ import annotations

import torch
from torch import nn

from headway.model.transformer import Block, Transformer


def fuse_projections(model: Transformer) -> None:
    """Join the projections of every block; done once, results stay the same."""
    for block in model.model.layers.values():
        assert isinstance(block, Block)
        attention, mlp = block.self_attn, block.mlp
        if attention.joined is None:
            attention.joined = _join([attention.q_proj, attention.k_proj, attention.v_proj])
        if mlp.joined is None:
            mlp.joined = _join([mlp.gate_proj, mlp.up_proj])


def _join(parts: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    if any(type(part) is not nn.Linear for part in parts):
        return None  # an adapter computes more than a product
    weight = torch.cat([part.weight.detach() for part in parts])
    bias = torch.cat([part.bias.detach() for part in parts]) if parts[0].bias is not None else None
    begin = 0
    for part in parts:
        end = begin + part.out_features
        part.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            part.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return weight, bias
