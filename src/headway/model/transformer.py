"""The one Transformer: tokens and positions come in, the hidden stream after the final norm goes out. Single-device code.

Shapes: B rows, T tokens, D width, V vocabulary, H query heads, KV key and value heads, hd head width.

    tokens [B,T] -> embed -> x [B,T,D] -> block 0 .. block N-1 -> norm -> hidden [B,T,D]     (the LM head is applied by the caller)

    a block:  x -> before -> q, k, v -> core -> o -> after(x, o) -> x

`before` and `after` hold all the arithmetic and trace as one graph each; `core` is an attribute, called in plain Python between them, so
that another attention can be put there without compiling anything again. `enter` and `leave` are attributes too: what ranks that share
the layers exchange before and after the matrix products of each half, and nothing on one rank.
Names and shapes of parameters are Hugging Face Llama's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.kernels.attention import AttentionMask, ScoreRule, attend, causal_mask, mask_of
from headway.kernels.head_mix import mix_heads
from headway.model.adapter.lora import AdaptedLinear, compute_once
from headway.model.base import (
    AttentionCache,
    AttentionCore,
    CachedForward,
    Compiler,
    LayerSplit,
    LMHead,
    Model,
    ModelOut,
)
from headway.model.cached_halves import CachedHalves
from headway.model.head_gates import HeadGates
from headway.model.layers import FeedForward, build_attention, build_mlp, build_norm, dropout
from headway.model.layout import EMBEDDING, HEAD, ParamSpec, param_specs
from headway.model.projector import MediaEmbedder, MediaTensors, build_aligner
from headway.model.rope import Rotation
from headway.model.router import Routing, counted_tokens, stack_routings
from headway.model.score import ScoreHead

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from headway.data.batch import Batch
    from headway.kernels.vocab_loss import VocabShard
    from headway.model.config import ModelConfig
    from headway.model.head_gates import GateDraw


@dataclass(frozen=True)
class GatedCore:
    """Attention of a layer whose heads have gates; a mask that carries no mix means full attention for all of them."""

    layer: int
    backend: str = "auto"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, window: int | None = None
    ) -> Tensor:
        """o [B,T,H,hd]."""
        full = partial(attend, mask=mask, window=window, backend=self.backend)
        if mask.mix is None:
            return full(q, k, v)
        return mix_heads(
            q, k, v, mask, mask.mix, self.layer, full=full, backend=STREAMING[self.backend]
        )


STREAMING = {
    "auto": "auto",
    "reference": "reference",
    "sdpa": "blocks",
    "varlen": "pieces",
    "fa4": "pieces",
    "flex": "auto",
}
"""The backend of streaming attention that goes with one of full attention."""


def unchanged(x: Tensor) -> Tensor:
    """x."""
    return x


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    return x if norm is None else norm(x)


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normed stream and added to it."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        before, after = config.norm_placement != "after", config.norm_placement != "before"
        self.input_layernorm = build_norm(config) if before else None
        self.self_attn = build_attention(config, layer)
        self.post_self_attn_layernorm = build_norm(config) if after else None
        self.post_attention_layernorm = (
            build_norm(config) if before and not config.parallel_block else None
        )
        self.mlp = build_mlp(config, layer)
        self.post_mlp_layernorm = build_norm(config) if after else None
        self.is_parallel, self.residual_scale = config.parallel_block, config.residual_scale
        self.dropout = config.dropout
        self.window = config.window_of(layer)
        self.softcap = config.attention_softcap
        self.core: AttentionCore = (
            GatedCore(layer) if config.head_gates is not None else self._core("auto")
        )
        self.enter: Callable[[Tensor], Tensor] = unchanged
        self.leave: Callable[[Tensor], Tensor] = unchanged
        self.drop: Callable[[Tensor, float], Tensor] = dropout

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend in all cases."""
        self.core = (
            replace(self.core, backend=backend)
            if isinstance(self.core, GatedCore)
            else self._core(backend)
        )

    def _core(self, backend: str) -> AttentionCore:
        return partial(
            attend,
            backend=backend,
            **({} if self.softcap is None else {"rule": ScoreRule(self.softcap)}),
        )

    @property
    def rule(self) -> ScoreRule:
        """What happens to the layer's scores, now: its sinks train."""
        return ScoreRule(self.softcap, self.self_attn.sinks)

    def core_settings(self, mask: AttentionMask) -> dict[str, Any]:
        """What the core needs besides q, k and v."""
        rule = {} if self.self_attn.sinks is None else {"rule": self.rule}
        return {"mask": mask, "window": self.window, **rule}

    def before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Everything up to the attention core: q [B,T,H,hd], k and v [B,T,KV,hd]."""
        return self.self_attn.project(self.entered(x), cos, sin)

    def entered(self, x: Tensor) -> Tensor:
        """What attention's projections read."""
        return self.enter(_normed(x, self.input_layernorm))

    def after(
        self, x: Tensor, o: Tensor, counted: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Routing]:
        """Everything after the attention core, from the block's input and o [B,T,H,hd]. A mixture that is given the tokens that count,
        [B,T], also says what its router did with them."""
        if self.is_parallel:
            both = self.self_attn.output(o) + self.mlp(self.entered(x))
            return self._added(x, self.leave(both))
        x = self._added(
            x, _normed(self.leave(self.self_attn.output(o)), self.post_self_attn_layernorm)
        )
        normed = self.enter(_normed(x, self.post_attention_layernorm))
        if counted is None or isinstance(self.mlp, FeedForward):
            return self._added(x, _normed(self.leave(self.mlp(normed)), self.post_mlp_layernorm))
        out, routing = self.mlp.route(normed, counted)
        assert routing is not None
        return self._added(x, _normed(self.leave(out), self.post_mlp_layernorm)), routing

    def before_recompute(self) -> None:
        """Backward will run forward again. Nothing reads the sum at the end of the block then, so no product is needed for it."""
        if isinstance(self.mlp, FeedForward) and self.post_mlp_layernorm is None:
            compute_once(self.mlp.down_proj)

    def _added(self, x: Tensor, more: Tensor) -> Tensor:
        more = self._dropped(more)
        return x + (more if self.residual_scale == 1.0 else more * self.residual_scale)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: AttentionMask,
        counted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        q, k, v = self.before(x, cos, sin)
        o = self.core(q, k, v, **self.core_settings(mask))
        return (
            self.after(x, o)
            if counted is None or isinstance(self.mlp, FeedForward)
            else self.after(x, o, counted)
        )

    def _dropped(self, x: Tensor) -> Tensor:
        return self.drop(x, self.dropout) if self.dropout and self.training else x


class Trunk(nn.Module):
    """Embedding, blocks and final norm; holds them under the names that checkpoints use."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        weight = torch.empty(config.vocab, config.hidden_size)
        if not weight.is_meta:
            nn.init.normal_(
                weight
            )  # on the meta device it would draw nothing and load the compiler, which takes seconds
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden_size, _weight=weight)
        learned = config.positions == "learned"
        self.embed_positions = (
            nn.Embedding(config.max_seq_len, config.hidden_size) if learned else None
        )
        # Keyed by number, so that a part of the layers keeps its names.
        self.layers = nn.ModuleDict(
            {str(layer): Block(config, layer) for layer in range(config.num_layers)}
        )
        # Logits are linear in what it returns; scores are not scaled.
        self.norm = build_norm(config, gain=1.0 if config.score_head else config.logit_scale)


class Transformer(Model):
    """A decoder of the shape a config describes."""

    BLOCK_METHODS = ("before", "after")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # First: forward needs them before anything else, and their gradients are complete only when all others are.
        self.head_gates = HeadGates(config) if config.head_gates is not None else None
        self.aligner = None if config.media is None else build_aligner(config.media)
        self.projector = (
            None if config.media is None else MediaEmbedder(config.media, config.hidden_size)
        )
        self.model = Trunk(config)
        separate = not config.tie_embeddings and not config.score_head
        self.lm_head = nn.Linear(config.hidden_size, config.vocab, bias=False) if separate else None
        self.score = nn.Linear(config.hidden_size, 1, bias=False) if config.score_head else None
        self.rotation = Rotation(config)
        self.is_random = config.dropout > 0
        self._vocab: VocabShard | None = None
        self._counts = True
        """Whether gradients of what routers did and of scores count on this rank; ranks that share the layers compute the same."""
        self._own_tokens: Callable[[Tensor], Tensor] | None = None
        self._log_alpha: Tensor | None = None
        """The head gates on the host, as of the beginning of the step."""

    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        """Head gates are sampled with the noise of a seed; without one they are settled."""
        mask, draw = self._mask(batch, seed)
        media = MediaTensors.of(batch, self.config.media)
        counted = None if self.config.experts is None else counted_tokens(batch)
        found = self(batch.tokens, batch.position, mask, media=media, counted=counted)
        return (
            self._output(found, draw)
            if isinstance(found, Tensor)
            else self._output(found[0], draw, found[1])
        )

    def forward_stage(
        self, batch: Batch, stream: Tensor | None, layers: range, seed: int | None = None
    ) -> Tensor | ModelOut:
        """Every stage draws the gates of all layers, from the same seed."""
        mask, draw = self._mask(batch, seed)
        x = (
            self.embed(
                batch.tokens, MediaTensors.of(batch, self.config.media), position=batch.position
            )
            if stream is None
            else stream
        )
        cos, sin = self.rotation(batch.position)
        for layer in layers:
            x = self.model.layers[str(layer)](x, cos, sin, mask)
        return x if layers.stop < self.config.num_layers else self._output(self.model.norm(x), draw)

    def _mask(self, batch: Batch, seed: int | None) -> tuple[AttentionMask, GateDraw | None]:
        mask = mask_of(batch)
        if self.head_gates is None or self._log_alpha is None:
            return mask, None
        draw = self.head_gates.draw(self._log_alpha, seed)
        return replace(mask, mix=draw.mix), draw

    def _output(
        self, hidden: Tensor, draw: GateDraw | None, routing: Routing | None = None
    ) -> ModelOut:
        if routing is not None and not self._counts:
            routing = routing._replace(
                probability=routing.probability.detach(), z=routing.z.detach()
            )
        head = LMHead(
            hidden,
            self.head_weight,
            self.chunk_tokens,
            self.head_grad_buffer,
            self._vocab,
            self.config.logit_softcap,
        )
        score = (
            None
            if self.score is None
            else ScoreHead(hidden, self.score.weight, self._vocab, self._counts)
        )
        return ModelOut(head, draw, routing=routing, score=score)

    def keep_layers(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """The layers are keyed by their numbers, so those that stay keep their names."""
        for layer in range(self.config.num_layers):
            if layer not in layers:
                del self.model.layers[str(layer)]
        if not first and not (last and self.config.ties_head):
            del self.model.embed_tokens
        if not first:
            self.model.embed_positions = None
            self.aligner = self.projector = None
        if not last:
            del self.model.norm
            self.lm_head = self.score = None

    def begin_step(self) -> None:
        """Copy the head gates to the host. That waits for the last update, so it is done once per step."""
        self._log_alpha = None if self.head_gates is None else self.head_gates()

    def balance(self, load: Tensor, keep: Tensor) -> None:
        """Move the routers' biases against the load of each mixture."""
        mixtures = [
            block.mlp for block in self.blocks().values() if not isinstance(block.mlp, FeedForward)
        ]
        for mlp, of_layer in zip(mixtures, load, strict=True):
            mlp.balance(of_layer, keep)

    def blocks(self) -> Mapping[str, Block]:
        """The layers, by their parameters' prefix."""
        found: dict[str, Block] = {}
        for layer, block in self.model.layers.items():
            assert isinstance(block, Block)
            found[f"model.layers.{layer}"] = block
        return found

    def param_specs(self) -> list[ParamSpec]:
        """The layout of the config."""
        return param_specs(self.config)

    @property
    def head_parameter(self) -> str | None:
        """None with an adapter on the head, and for a reward model, whose head predicts no tokens."""
        if self.config.ties_head:
            return EMBEDDING
        return None if self.score is not None or isinstance(self.lm_head, AdaptedLinear) else HEAD

    @property
    def head_weight(self) -> Tensor:
        """[V,D]; the embedding's matrix where the two are tied; [1,D] of a reward model."""
        if self.score is not None:
            return self.score.weight
        if self.lm_head is None:
            return self.model.embed_tokens.weight
        return (
            self.lm_head.effective
            if isinstance(self.lm_head, AdaptedLinear)
            else self.lm_head.weight
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped where the config says so; of the whole vocabulary, also where ranks share it."""
        found, cap = super().logits(hidden), self.config.logit_softcap
        found = found if self._vocab is None else self._vocab.whole(found)
        return found if cap is None else torch.tanh(found / cap) * cap

    def embed(
        self, tokens: Tensor, media: MediaTensors | None = None, *, position: Tensor | None = None
    ) -> Tensor:
        """The stream at the bottom, [B,T,D]; media replace the embeddings of their positions."""
        x = self.model.embed_tokens(tokens)
        if self.config.embed_scale != 1.0:
            x = (
                x * torch.tensor(self.config.embed_scale, dtype=x.dtype).item()
            )  # rounded to the dtype, as published models were trained
        share = self.config.embed_grad_scale
        x = x if share == 1.0 else x * share + x.detach() * (1 - share)
        if self.model.embed_positions is not None:
            assert position is not None, "learned positions need them"
            own = position if self._own_tokens is None else self._own_tokens(position)
            x = x + self.model.embed_positions(
                own.clamp(min=0).long()
            )  # a row that takes no part stands at -1
        if media is None or self.projector is None:
            return x
        return self.projector(x, media, self.aligner)

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        mask: AttentionMask,
        media: MediaTensors | None = None,
        counted: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """Hidden [B,T,D] after the final norm.

        With `counted` tokens [B,T], also what the routers of all mixtures did with them: [layers,B,...]."""
        x = self.embed(tokens, media, position=position)
        cos, sin = self.rotation(position)
        routings: list[Routing] = []
        for block in self.blocks().values():
            if counted is None:
                x = block(x, cos, sin, mask)
            else:
                x = block(x, cos, sin, mask, counted)
            if not isinstance(x, Tensor):
                x, routing = x
                routings.append(routing)
        hidden = self.model.norm(x)
        return (hidden, stack_routings(routings)) if routings else hidden

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend in every layer."""
        for block in self.blocks().values():
            block.use_attention(backend)

    def shard_attention(self, wrap: Callable[[AttentionCore], AttentionCore], heads: slice) -> None:
        """Head gates are then drawn for these heads only."""
        if self.head_gates is not None:
            self.head_gates.heads = heads
        for block in self.blocks().values():
            block.core = wrap(block.core)

    def split_layers(self, split: LayerSplit) -> None:
        """The embedding's exchange is in its module."""
        self._vocab, self._own_tokens = split.vocab, split.own_tokens
        if self.projector is not None:
            self.projector.own_tokens = split.own_tokens
        self._counts = split.is_first
        if self.head_gates is not None:
            self.head_gates.heads, self.head_gates.counts = split.heads, split.is_first
        for block in self.blocks().values():
            block.enter, block.leave, block.drop = split.enter, split.leave, split.drop
            block.self_attn.mean_over_ranks = split.mean

    def hidden_states(
        self, tokens: Tensor, position: Tensor, media: MediaTensors | None = None
    ) -> Tensor:
        """Under a causal mask."""
        rows, length = tokens.shape
        return self(tokens, position, causal_mask(rows, length, tokens.device), media)

    def cached_forward(self, compiler: Compiler | None = None) -> CachedForward:
        """The blocks' halves are compiled, attention between them is the cache's."""
        halves = [CachedHalves(block, compiler) for block in self.blocks().values()]

        def forward(
            tokens: Tensor,
            position: Tensor,
            cache: AttentionCache,
            media: MediaTensors | None = None,
        ) -> Tensor:
            x = self.embed(tokens, media, position=position)
            cos, sin = self.rotation(position, cache.capacity)
            for layer, both in enumerate(halves):
                before, after, expand = both.of(tokens)
                q, k, v = before(x, cos, sin)
                x = after(x, cache.attend(layer, q, k, v, position, both.sinks, expand))
            return self.model.norm(x)

        return forward

    def fuse_projections(self) -> None:
        """One product for q, k and v and one for gate and up, in every layer; done once."""
        for block in self.blocks().values():
            block.self_attn.fuse()
            block.mlp.fuse()
