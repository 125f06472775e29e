"""Multi-head latent attention (DeepSeek-V2): keys and values of all heads are made from one small
vector per token, the latent.

    x [B,T,D] -> kv_a -> latent c [B,T,R] (normed), and `rope` rotated channels: the part of every
                         key that all heads share
      c -> kv_b -> k [B,T,H,nope], v [B,T,H,vd]        a key is k and the shared part, [B,T,H,hd]
    x -> q_a -> norm -> q_b -> q [B,T,H,hd]            without q_rank: from x itself

Kernels take values as wide as keys: v has zeros behind its channels, and so has what comes back,
which `output` drops.

A cache stores the latent and the shared keys of a token, W = R + rope channels for all heads. Two
forms compute the same with it:

    many tokens   keys and values of heads are made of what is stored (`expand`), and attention is as
                  in training
    one token     kv_b = [W_k; W_v] goes into query and result: q . (W_k c) = (q W_k) . c, so
                  q' = [q W_k, rotated q] attends to the stored vectors themselves, as query heads
                  of one KV head do, and `values` applies W_v to the mix of latents; nothing of the
                  past is expanded

Shapes: B rows, T tokens, D width, H heads, R = kv_rank, hd = nope + rope channels of a query or
key, vd channels of a value.
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
"""Epsilon of the norms of latents in every published model, whatever their other norms use."""


class LatentAttention(nn.Module):
    """The projections of one layer, with the norms of latents and the rotation."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        latent = config.latent_attention
        assert latent is not None
        width = config.hidden_size
        heads = config.num_heads
        bias = config.qkv_bias
        self.latent = latent
        self.head_size = latent.head_size

        queries = heads * latent.head_size
        self.q_proj = None
        self.q_a_proj = None
        self.q_a_layernorm = None
        self.q_b_proj = None
        if latent.q_rank is None:
            self.q_proj = nn.Linear(width, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, latent.q_rank, bias=bias)
            self.q_a_layernorm = _norm(config, latent.q_rank)
            self.q_b_proj = nn.Linear(latent.q_rank, queries, bias=False)

        self.kv_a_proj_with_mqa = nn.Linear(width, latent.stored_size, bias=bias)
        self.kv_a_layernorm = _norm(config, latent.kv_rank)
        self.kv_b_proj = nn.Linear(
            latent.kv_rank, heads * (latent.nope_head_dim + latent.value_head_dim), bias=False
        )
        self.o_proj = nn.Linear(heads * latent.value_head_dim, width, bias=config.output_bias)

        # A block reads and sets these on any attention; this kind uses neither.
        self.mean_over_ranks: Callable[[Tensor], Tensor] | None = None
        self.sinks: nn.Parameter | None = None

        self.rotates = layer not in config.no_rope_layers
        self.interleaved = config.rope_interleaved
        self.score_scale = score_scale(config)
        self.joined: tuple[Tensor, Tensor | None] | None = None
        """Weight and bias of both projections of the stream in one tensor each, after `fuse`."""

    def fuse(self) -> None:
        """Compute both projections of the stream in one product; for inference."""
        # Joined linears have one bias or none together.
        queries = self._query_projection
        same_bias = (queries.bias is None) == (self.kv_a_proj_with_mqa.bias is None)
        if self.joined is None and same_bias:
            self.joined = join_linears([queries, self.kv_a_proj_with_mqa])

    @property
    def _query_projection(self) -> nn.Linear:
        """The one that reads the stream."""
        projection = self.q_proj if self.q_a_proj is None else self.q_a_proj
        assert projection is not None
        return projection

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [B,T,H,hd] of x [B,T,D]; head counts follow the weights, which may be a
        slice of the whole."""
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, self.head_size)
        return torch.cat((q_nope, q_rope), dim=-1), *self._heads(c, k_rope)

    def project_stored(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B,T,H,hd], and what a cache stores, [B,T,1,W], in the place of k and of v: the form
        for many tokens."""
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, self.head_size)
        stored = torch.cat((c[:, :, None], k_rope), dim=-1)
        return torch.cat((q_nope, q_rope), dim=-1), stored, stored

    def project_absorbed(
        self, x: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q' [B,T,H,W], whose products with stored vectors are the scores, and these vectors,
        [B,T,1,W], in the place of k and of v.

        The form for one token.
        """
        q_nope, q_rope, c, k_rope = self._parts(x, cos, sin, self.latent.stored_size)
        stored = torch.cat((c[:, :, None], k_rope), dim=-1)
        to_keys = self._from_latent()[:, : self.latent.nope_head_dim]
        absorbed = torch.einsum("bthn,hnr->bthr", q_nope, to_keys)
        return torch.cat((absorbed, q_rope), dim=-1), stored, stored

    def expand(self, stored: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [...,H,hd] of what a cache stores, [...,1,W]."""
        c, k_rope = stored.split([self.latent.kv_rank, self.latent.rope_head_dim], dim=-1)
        return self._heads(c.squeeze(-2), k_rope)

    def values(self, o: Tensor) -> Tensor:
        """The attention output [B,T,H,vd] of each head from its mix of stored vectors, o
        [B,T,H,W]."""
        to_values = self._from_latent()[:, self.latent.nope_head_dim :]
        return torch.einsum("bthr,hvr->bthv", o[..., : self.latent.kv_rank], to_values)

    def _heads(self, c: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """k and v [...,H,hd] of latents [...,R] and rotated keys [...,1,rope]."""
        nope = self.latent.nope_head_dim
        value = self.latent.value_head_dim
        k_nope, v = self.kv_b_proj(c).unflatten(-1, (-1, nope + value)).split([nope, value], dim=-1)
        # The rotated part is the same for all heads.
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        # Kernels take values as wide as keys; `output` drops the zeros.
        return k, F.pad(v, (0, self.head_size - value))

    def _from_latent(self) -> Tensor:
        """The weight of kv_b by head, [H,nope+vd,R]."""
        if isinstance(self.kv_b_proj, AdaptedLinear):
            weight = self.kv_b_proj.effective
        else:
            weight = self.kv_b_proj.weight
        return weight.unflatten(0, (-1, self.latent.nope_head_dim + self.latent.value_head_dim))

    def output(self, o: Tensor) -> Tensor:
        """[B,T,D] of o [B,T,H,hd], or of as many channels as values have."""
        return self.o_proj(o[..., : self.latent.value_head_dim].flatten(-2))

    def _parts(
        self, x: Tensor, cos: Tensor, sin: Tensor, width: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries [B,T,H,nope] and, rotated, [B,T,H,rope]; latents [B,T,R] and rotated keys
        [B,T,1,rope].

        `width`: channels of the queries that a kernel will see. It divides scores by the root of
        it, so queries are scaled by the root of it and the score scale of the model.
        """
        scale = self.score_scale * width**0.5
        q, stored = self._from_stream(x)
        q_nope, q_rope = q.unflatten(-1, (-1, self.head_size)).split(
            [self.latent.nope_head_dim, self.latent.rope_head_dim], dim=-1
        )
        c, k_rope = stored.split([self.latent.kv_rank, self.latent.rope_head_dim], dim=-1)
        k_rope = k_rope[:, :, None]

        # Both parts of a query are scaled, the rotated one inside of `rotate`.
        if scale != 1.0:
            q_nope = (q_nope.float() * scale).to(q.dtype)
        if self.rotates:
            turn = partial(rotate, cos=cos, sin=sin, interleaved=self.interleaved)
            q_rope = turn(q_rope, scale=scale)
            k_rope = turn(k_rope)
        elif scale != 1.0:
            q_rope = (q_rope.float() * scale).to(q.dtype)
        return q_nope, q_rope, self.kv_a_layernorm(c), k_rope

    def _from_stream(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All queries, and the latent with the shared keys, before norm and rotation."""
        queries = self._query_projection
        if self.joined is not None:
            q, stored = F.linear(x, *self.joined).split(
                [queries.out_features, self.latent.stored_size], dim=-1
            )
        else:
            q = queries(x)
            stored = self.kv_a_proj_with_mqa(x)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            q = self.q_b_proj(self.q_a_layernorm(q))
        return q, stored


def score_scale(config: ModelConfig) -> float:
    """What q k is multiplied by. yarn makes it larger where it has `mscale_all_dim`."""
    scale = config.attention_scale
    if scale is None:
        scale = config.head_size**-0.5

    scaling = config.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return scale
    # As published code does: both q and k grow, channels that are not rotated too.
    return scale * yarn_growth(scaling.factor, scaling.mscale_all_dim) ** 2


def _norm(config: ModelConfig, size: int) -> RMSNorm:
    offset = 1.0 if config.norm == "rmsnorm1p" else 0.0
    return RMSNorm(size, LATENT_EPS, offset=offset)
