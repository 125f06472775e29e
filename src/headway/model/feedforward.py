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
        """Weight and bias of gate and up in one tensor each, where inference has put them there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.joined is not None:
            gate, up = F.linear(x, *self.joined).chunk(2, dim=-1)
            return self.down_proj(F.silu(gate) * up)
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
