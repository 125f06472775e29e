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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
