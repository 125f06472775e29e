"""The projections of attention: a normed stream comes in, q, k, v go out; o comes in, the stream's increment goes out.

The core between the two halves is not here: a block calls it (see transformer.py), so that it can be swapped without touching these.
"""

import torch
import torch.nn.functional as F
from torch import nn

from headway.model.config import ModelConfig
from headway.model.feedforward import join_linears
from headway.model.norm import RMSNorm
from headway.model.rope import rotate


class Attention(nn.Module):
    """q, k, v and output projections of one layer, with the norm and rotation of q and k."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        width, head = config.hidden_size, config.head_size
        self.q_proj = nn.Linear(width, config.num_heads * head, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, config.kv_heads * head, bias=config.qkv_bias)
        self.q_norm = RMSNorm(head, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head, config.norm_eps) if config.qk_norm else None
        self.o_proj = nn.Linear(config.num_heads * head, width, bias=config.output_bias)
        self.head_size = head
        self.rotates = layer not in config.no_rope_layers
        self.joined: tuple[torch.Tensor, torch.Tensor | None] | None = None
        """Weight and bias of all three projections in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute q, k and v in one product; for inference."""
        if self.joined is None:
            self.joined = join_linears([self.q_proj, self.k_proj, self.v_proj])

    def project(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [B,T,H,hd], k and v [B,T,KV,hd] of x [B,T,D]; head counts follow the weights, which may be a slice of the whole."""
        heads = (*x.shape[:-1], -1, self.head_size)
        if self.joined is not None:
            sizes = [self.q_proj.out_features, self.k_proj.out_features, self.v_proj.out_features]
            q, k, v = (part.unflatten(-1, heads[-2:]) for part in F.linear(x, *self.joined).split(sizes, dim=-1))
        else:
            q, k, v = self.q_proj(x).view(heads), self.k_proj(x).view(heads), self.v_proj(x).view(heads)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotates:
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        return q, k, v

    def output(self, o: torch.Tensor) -> torch.Tensor:
        """[B,T,D] of o [B,T,H,hd]."""
        return self.o_proj(o.flatten(-2))
