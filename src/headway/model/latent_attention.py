"""Multi-head latent attention: keys and values of all heads are made from one small vector per token, the latent.

    x [B,T,D] -> kv_a -> latent c [B,T,R] (normed), and R' channels that are rotated: the part of every key that heads share
      c -> kv_b -> k [B,T,H,nope], v [B,T,H,vd]              a key is k and the shared part, [B,T,H,hd]
    x -> q_a -> norm -> q_b -> q [B,T,H,hd]                  or from x itself, without a rank

Kernels take values as wide as keys: v has zeros behind its channels, and so has what comes back, which `output` drops.

Shapes: B rows, T tokens, D width, H heads, hd = nope + rope channels of a query or key, vd of a value.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.config import yarn_growth
from headway.model.layers import RMSNorm, join_linears
from headway.model.rope import rotate

if TYPE_CHECKING:
    from collections.abc import Callable

    from headway.model.config import ModelConfig

LATENT_EPS = 1e-6
"""Of the norms of latents, in every published model."""


class LatentAttention(nn.Module):
    """The projections of one layer, with the norms of latents and the rotation."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent = config.latent_attention
        assert latent is not None
        width, heads, bias = config.hidden_size, config.num_heads, config.qkv_bias
        self.latent, self.head_size = latent, latent.head_size
        queries = heads * latent.head_size
        if latent.q_rank is None:
            self.q_proj, self.q_a_proj, self.q_a_layernorm, self.q_b_proj = nn.Linear(width, queries, bias=False), None, None, None
        else:
            self.q_proj, self.q_a_proj = None, nn.Linear(width, latent.q_rank, bias=bias)
            self.q_a_layernorm, self.q_b_proj = _norm(config, latent.q_rank), nn.Linear(latent.q_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.stored_size, bias=bias)
        self.kv_a_layernorm = _norm(config, latent.kv_rank)
        self.kv_b_proj = nn.Linear(latent.kv_rank, heads * (latent.nope_head_dim + latent.value_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * latent.value_head_dim, width, bias=config.output_bias)
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Of other kinds of attention; no norm here covers several heads."""
        self.sinks: nn.Parameter | None = None
        """Of other kinds of attention too."""
        self.rotates = layer not in config.no_rope_layers
        self.interleaved = config.rope_interleaved
        self.angles = None if config.rope_local_theta is None else int(config.window_of(layer) is not None)
        """Which of several rotary frequencies are this layer's."""
        self.score_scale = score_scale(config)
        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of both projections of the stream in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute what both projections of the stream give in one product; for inference."""
        first = self.q_proj if self.q_a_proj is None else self.q_a_proj
        assert first is not None
        if self.joined is None and (first.bias is None) == (self.kv_a_proj_with_mqa.bias is None):
            self.joined = join_linears([first, self.kv_a_proj_with_mqa])

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B,T,H,hd] of x [B,T,D]; head counts follow the weights, which may be a slice of the whole."""
        nope, value = self.latent.nope_head_dim, self.latent.value_head_dim
        scale = self.score_scale * self.head_size**0.5  # kernels divide scores by sqrt(hd)
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, scale)
        k_nope, v = self.kv_b_proj(c).unflatten(-1, (-1, nope + value)).split([nope, value], dim=-1)
        q = torch.cat((q_nope, q_rope), dim=-1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return q, k, F.pad(v, (0, self.head_size - value))

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,hd]."""
        return self.o_proj(o[..., : self.latent.value_head_dim].flatten(-2))

    def _parts(self, x: Tensor, cos: Tensor, sin: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B,T,H,nope] and, rotated, [B,T,H,rope], both times `scale`; the latent [B,T,R] and rotated keys [B,T,1,rope]."""
        q, stored = self._from_stream(x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.head_size)).split([self.latent.nope_head_dim, self.latent.rope_head_dim], dim=-1)
        c, k_rope = stored.split([self.latent.kv_rank, self.latent.rope_head_dim], dim=-1)
        k_rope = k_rope[:, :, None]
        q_nope = q_nope if scale == 1.0 else (q_nope.float() * scale).to(q.dtype)
        if self.rotates:
            cos, sin = (cos, sin) if self.angles is None else (cos[self.angles], sin[self.angles])
            turn = partial(rotate, cos=cos, sin=sin, interleaved=self.interleaved)
            q_rope, k_rope = turn(q_rope, scale=scale), turn(k_rope)
        elif scale != 1.0:
            q_rope = (q_rope.float() * scale).to(q.dtype)
        return q_nope, q_rope, self.kv_a_layernorm(c), k_rope

    def _from_stream(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All queries, and the latent with the shared keys, before norm and rotation."""
        first = self.q_proj if self.q_a_proj is None else self.q_a_proj
        assert first is not None
        if self.joined is not None:
            q, stored = F.linear(x, *self.joined).split([first.out_features, self.latent.stored_size], dim=-1)
        else:
            q, stored = first(x), self.kv_a_proj_with_mqa(x)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        return q, stored


def score_scale(config: ModelConfig) -> float:
    """What q k is multiplied by. yarn makes it larger where it has `mscale_all_dim`."""
    scaling = config.rope_scaling
    grown = 1.0 if scaling is None or not scaling.mscale_all_dim else yarn_growth(scaling.factor, scaling.mscale_all_dim)
    return (config.head_size**-0.5 if config.attention_scale is None else config.attention_scale) * grown**2


def _norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, LATENT_EPS, offset=1.0 if config.norm == "rmsnorm1p" else 0.0)
