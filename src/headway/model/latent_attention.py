"""Multi-head latent attention: keys and values of all heads are made from one small vector per token, the latent.

    x [B,T,D] -> kv_a -> latent c [B,T,R] (normed), and R' channels that are rotated: the part of every key that heads share
      c -> kv_b -> k [B,T,H,nope], v [B,T,H,vd]              a key is k and the shared part, [B,T,H,hd]
    x -> q_a -> norm -> q_b -> q [B,T,H,hd]                  or from x itself, without a rank

Kernels take values as wide as keys: v has zeros behind its channels, and so has what comes back, which `output` drops.

A cache stores the latent and the shared keys of a token, W = R + rope channels for all heads. Two forms compute the same with it:

    many tokens   keys and values of heads are made of what is stored (`expand`), and attention is as in training
    one token     kv_b goes into the query and the result: q' = [q W_k, rotated q] meets the stored vectors themselves, as the query heads
                  of one KV head do, and `values` makes values of the mix of latents; nothing of the past is expanded

Shapes: B rows, T tokens, D width, H heads, hd = nope + rope channels of a query or key, vd of a value.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.model.adapter.lora import AdaptedLinear
from headway.model.layers import RMSNorm, join_linears
from headway.model.rope import rotate
from headway.model.rope_config import yarn_growth

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
            self.q_proj, self.q_a_proj, self.q_a_layernorm, self.q_b_proj = (
                nn.Linear(width, queries, bias=False),
                None,
                None,
                None,
            )
        else:
            self.q_proj, self.q_a_proj = None, nn.Linear(width, latent.q_rank, bias=bias)
            self.q_a_layernorm, self.q_b_proj = (
                _norm(config, latent.q_rank),
                nn.Linear(latent.q_rank, queries, bias=False),
            )
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.stored_size, bias=bias)
        self.kv_a_layernorm = _norm(config, latent.kv_rank)
        self.kv_b_proj = nn.Linear(
            latent.kv_rank, heads * (latent.nope_head_dim + latent.value_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * latent.value_head_dim, width, bias=config.output_bias)
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Of other kinds of attention; no norm here covers several heads."""
        self.sinks: nn.Parameter | None = None
        """Of other kinds of attention too."""
        self.rotates = layer not in config.no_rope_layers
        self.interleaved = config.rope_interleaved
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
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, self.head_size)
        return torch.cat((q_nope, q_rope), dim=-1), *self._heads(c, k_rope)

    def project_stored(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,hd], and what a cache stores, [B,T,1,W], in the place of k and of v."""
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, self.head_size)
        stored = torch.cat((c[:, :, None], k_rope), dim=-1)
        return torch.cat((q_nope, q_rope), dim=-1), stored, stored

    def project_absorbed(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q' [B,T,H,W], whose products with stored vectors are the scores, and these, [B,T,1,W], in the place of k and of v."""
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, self.latent.stored_size)
        stored = torch.cat((c[:, :, None], k_rope), dim=-1)
        to_keys = self._from_latent()[:, : self.latent.nope_head_dim]
        return (
            torch.cat((torch.einsum("bthn,hnr->bthr", q_nope, to_keys), q_rope), dim=-1),
            stored,
            stored,
        )

    def expand(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [...,H,hd] of what a cache stores, [...,1,W]."""
        c, k_rope = stored.split([self.latent.kv_rank, self.latent.rope_head_dim], dim=-1)
        return self._heads(c.squeeze(-2), k_rope)

    def values(self, o: Tensor) -> Tensor:
        """The mix of values [B,T,H,vd] that is a mix of stored vectors for each head, o [B,T,H,W]."""
        to_values = self._from_latent()[:, self.latent.nope_head_dim :]
        return torch.einsum("bthr,hvr->bthv", o[..., : self.latent.kv_rank], to_values)

    def _heads(self, c: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [...,H,hd] of latents [...,R] and rotated keys [...,1,rope]."""
        nope, value = self.latent.nope_head_dim, self.latent.value_head_dim
        k_nope, v = self.kv_b_proj(c).unflatten(-1, (-1, nope + value)).split([nope, value], dim=-1)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return k, F.pad(v, (0, self.head_size - value))

    def _from_latent(self) -> Tensor:
        """The weight of kv_b by head, [H,nope+vd,R]."""
        weight = (
            self.kv_b_proj.effective
            if isinstance(self.kv_b_proj, AdaptedLinear)
            else self.kv_b_proj.weight
        )
        return weight.unflatten(0, (-1, self.latent.nope_head_dim + self.latent.value_head_dim))

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,hd], or of as many channels as values have."""
        return self.o_proj(o[..., : self.latent.value_head_dim].flatten(-2))

    def _parts(
        self, x: Tensor, cos: Tensor, sin: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B,T,H,nope] and, rotated, [B,T,H,rope], scaled for heads of `width`; latents [B,T,R] and rotated keys [B,T,1,rope]."""
        scale = self.score_scale * width**0.5  # kernels divide scores by the root of the width
        q, stored = self._from_stream(x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.head_size)).split(
            [self.latent.nope_head_dim, self.latent.rope_head_dim], dim=-1
        )
        c, k_rope = stored.split([self.latent.kv_rank, self.latent.rope_head_dim], dim=-1)
        k_rope = k_rope[:, :, None]
        q_nope = q_nope if scale == 1.0 else (q_nope.float() * scale).to(q.dtype)
        if self.rotates:
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
            q, stored = F.linear(x, *self.joined).split(
                [first.out_features, self.latent.stored_size], dim=-1
            )
        else:
            q, stored = first(x), self.kv_a_proj_with_mqa(x)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        return q, stored


def score_scale(config: ModelConfig) -> float:
    """What q k is multiplied by. yarn makes it larger where it has `mscale_all_dim`."""
    scaling = config.rope_scaling
    grown = (
        1.0
        if scaling is None or not scaling.mscale_all_dim
        else yarn_growth(scaling.factor, scaling.mscale_all_dim)
    )
    return (
        config.head_size**-0.5 if config.attention_scale is None else config.attention_scale
    ) * grown**2


def _norm(config: ModelConfig, size: int) -> RMSNorm:
    return RMSNorm(size, LATENT_EPS, offset=1.0 if config.norm == "rmsnorm1p" else 0.0)
