"""Normalisation over the last dim, computed in fp32 whatever comes in, returned in the dtype that came in."""

import torch
import torch.nn.functional as F
from torch import nn

from headway.model.config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Written out: as fast as the fused operator forward, and several times faster backward on CPU; compiled, both are one kernel.
        x32 = x.float()
        scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return (x32 * scale * self.weight).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * weight + bias."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight.float(), self.bias.float(), self.eps).to(x.dtype)


def build_norm(config: ModelConfig) -> RMSNorm | LayerNorm:
    """The normalisation of the residual stream that a config asks for."""
    return (RMSNorm if config.norm == "rmsnorm" else LayerNorm)(config.hidden_size, config.norm_eps)
