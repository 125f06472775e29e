"""The feed-forward of a block: down(silu(gate(x)) * up(x))."""

import torch
import torch.nn.functional as F
from torch import nn

from headway.model.config import ModelConfig


class FeedForward(nn.Module):
    """SwiGLU with separate gate and up projections."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=config.ffn_bias)
        self.up_proj = nn.Linear(config.hidden_size, config.ffn_size, bias=config.ffn_bias)
        self.down_proj = nn.Linear(config.ffn_size, config.hidden_size, bias=config.ffn_bias)
        self.joined: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """Weight and bias of gate and up in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute gate and up in one product; for inference."""
        if self.joined is None:
            self.joined = join_linears([self.gate_proj, self.up_proj])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.joined is not None:
            gate, up = F.linear(x, *self.joined).chunk(2, dim=-1)
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def join_linears(linears: list[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Weights and biases of several linears in one tensor each; the linears become views of them. None where one has an adapter."""
    if any(type(linear) is not nn.Linear for linear in linears):
        return None
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = torch.cat([linear.bias.detach() for linear in linears]) if linears[0].bias is not None else None
    begin = 0
    for linear in linears:
        end = begin + linear.out_features
        linear.weight = nn.Parameter(weight[begin:end], requires_grad=False)
        if bias is not None:
            linear.bias = nn.Parameter(bias[begin:end], requires_grad=False)
        begin = end
    return weight, bias
