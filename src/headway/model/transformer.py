"""The one Transformer, as single-device code: tokens and positions come in, the hidden stream after
the final norm goes out.

Shapes: B rows, T tokens, D width, V vocabulary, H query heads, KV key and value heads, hd head
width.

    tokens [B,T] -> embed -> x [B,T,D] -> block 0 .. block N-1 -> norm -> hidden [B,T,D]

    a block:  x -> pre_attention -> q, k, v -> core -> o -> post_attention(x, o) -> x

The caller applies the LM head, in chunks of tokens, so that logits of a whole row never exist.

`pre_attention` and `post_attention` hold all the arithmetic and trace as one graph each. `core` is
an attribute that is called in plain Python between them, so another attention can be put there
without compiling anything again. `gather_input` and `reduce_output` are attributes too: what ranks
that share the layers (tensor parallelism) exchange before and after the matrix products of each
half. On one rank they are the identity.

Names and shapes of parameters are those of Hugging Face's Llama: they are keys of checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from headway.data.batch import ROUTES
from headway.kernels.attention import AttentionMask, ScoreRule, attend, causal_mask, mask_of
from headway.kernels.row_blocks import row_logits
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
    ScoreHead,
)
from headway.model.layers import (
    Attention,
    FeedForward,
    build_attention,
    build_mlp,
    build_norm,
    dropout,
)
from headway.model.layout import EMBEDDING, GATES, HEAD, ParamSpec, param_specs
from headway.model.projector import MediaEmbedder, MediaTensors, build_aligner
from headway.model.rope import Rotation
from headway.model.router import Routing, counted_tokens, stack_routings

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from headway.data.batch import Batch
    from headway.kernels.vocab_loss import VocabShard
    from headway.model.config import ModelConfig
    from headway.model.head_gates import GateDraw
    from headway.model.latent_attention import LatentAttention
    from headway.model.state_mixer import StateMixer
    from headway.model.vision import PictureTensors, PlacedCells


@dataclass(frozen=True)
class GatedCore:
    """Attention of a layer whose heads have gates.

    The gates of a pass come with the mask. A mask without them means full attention in every head.
    """

    layer: int
    backend: str = "auto"

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, window: int | None = None
    ) -> Tensor:
        """o [B,T,H,hd]."""
        full = partial(attend, mask=mask, window=window, backend=self.backend)
        if mask.mix is None:
            return full(q, k, v)
        from headway.kernels.head_mix import mix_heads

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


def identity(x: Tensor) -> Tensor:
    """x: the exchange of a rank that has whole layers."""
    return x


def _normed(x: Tensor, norm: nn.Module | None) -> Tensor:
    if norm is None:
        return x
    return norm(x)


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normed stream and added to it.

        norm_placement    before (Llama)      after (OLMo 2)       both (Gemma)
        attention adds    attn(norm(x))       norm(attn(x))        norm(attn(norm(x)))
        mlp adds          mlp(norm(x))        norm(mlp(x))         norm(mlp(norm(x)))

    A parallel block has one norm: x + attn(norm(x)) + mlp(norm(x)).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()

        def norm_if(is_placed: bool) -> nn.Module | None:
            return build_norm(config) if is_placed else None

        before = config.norm_placement != "after"
        after = config.norm_placement != "before"

        # In the order of the forward. `post_attention_layernorm` is Llama's name for the norm
        # that the feed-forward reads; the norm of attention's output is `post_self_attn_layernorm`.
        self.input_layernorm = norm_if(before)
        # A layer has one of the four; `mixer` is that one.
        self.linear_attn = None
        self.short_conv = None
        self.mamba = None
        self.self_attn = None
        if config.has_state(layer) and config.linear_attention is not None:
            from headway.model.delta_net import GatedDeltaNet

            self.linear_attn = GatedDeltaNet(config)
        elif config.has_state(layer) and config.state_space is not None:
            from headway.model.mamba2 import Mamba2

            self.mamba = Mamba2(config)
        elif config.has_state(layer):
            from headway.model.gated_convolution import GatedConvolution

            self.short_conv = GatedConvolution(config)
        else:
            self.self_attn = build_attention(config, layer)
        self.post_self_attn_layernorm = norm_if(after)
        self.post_attention_layernorm = norm_if(before and not config.parallel_block)
        self.mlp = build_mlp(config, layer)
        self.post_mlp_layernorm = norm_if(after)

        self.is_parallel = config.parallel_block
        self.residual_scale = config.residual_scale
        self.dropout = config.dropout
        self.has_gate = config.attention_gate and self.self_attn is not None
        self.window = config.window_of(layer)
        self.softcap = config.attention_softcap

        # Replaced from outside: by another backend, or by what ranks that share tokens or layers
        # do.
        if config.head_gates is not None:
            self.core: AttentionCore = GatedCore(layer)
        else:
            self.core = self._core("auto")
        self.gather_input: Callable[[Tensor], Tensor] = identity
        self.reduce_output: Callable[[Tensor], Tensor] = identity
        self.drop: Callable[[Tensor, float], Tensor] = dropout

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend in all cases."""
        # Gates stay: only the kernels of the two branches change.
        if self.stateful is not None:
            return
        if isinstance(self.core, GatedCore):
            self.core = replace(self.core, backend=backend)
        else:
            self.core = self._core(backend)

    @property
    def stateful(self) -> StateMixer | None:
        """What has a state in place of softmax attention; None: the layer has softmax attention."""
        if self.linear_attn is not None:
            return self.linear_attn
        if self.mamba is not None:
            return self.mamba
        return self.short_conv

    @property
    def mixer(self) -> Attention | LatentAttention | StateMixer:
        """What brings tokens together: attention of one kind or the other, or a convolution."""
        if self.stateful is not None:
            return self.stateful
        assert self.self_attn is not None
        return self.self_attn

    def _core(self, backend: str) -> AttentionCore:
        if self.stateful is not None:
            return self.stateful.mix
        if self.softcap is None:
            return partial(attend, backend=backend)
        return partial(attend, backend=backend, rule=ScoreRule(self.softcap))

    @property
    def rule(self) -> ScoreRule:
        """Soft-capping and sinks of the layer's scores.

        Made for each pass: sinks are parameters, which an engine may replace.
        """
        return ScoreRule(self.softcap, self.mixer.sinks)

    def core_settings(self, mask: AttentionMask) -> dict[str, Any]:
        """The keyword arguments of the core besides q, k and v."""
        settings: dict[str, Any] = {"mask": mask, "window": self.window}
        # Only a core of a layer with trained sinks takes a rule; a soft cap is bound in `_core`.
        if self.mixer.sinks is not None:
            settings["rule"] = self.rule
        return settings

    def pre_attention(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Everything up to the attention core: q [B,T,H,hd], k and v [B,T,KV,hd]; with a state
        what its core takes in their place (state_mixer.py)."""
        return self.mixer.project(self.attention_input(x), cos, sin)

    def attention_input(self, x: Tensor) -> Tensor:
        """The normed stream of all tokens, which attention's projections read."""
        return self.gather_input(_normed(x, self.input_layernorm))

    def post_attention(
        self, x: Tensor, o: Tensor, counted: Tensor | None = None, given: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Routing]:
        """Everything after the attention core, from the block's input x [B,T,D] and o [B,T,H,hd].

        A mixture of experts with `counted` tokens [B,T] also returns what its router did with them;
        `given` [B,T,k] are experts that were chosen before (`Router.choose`).
        """
        if self.is_parallel:
            # One sum over ranks for attention and feed-forward together.
            both = self.mixer.output(o) + self.mlp(self.attention_input(x))
            return self._added(x, self.reduce_output(both))

        x, normed = self._before_mlp(x, o)
        if counted is None or isinstance(self.mlp, FeedForward):
            out = self.reduce_output(self.mlp(normed))
            return self._added(x, _normed(out, self.post_mlp_layernorm))

        out, routing = self.mlp.route(normed, counted, given)
        out = self.reduce_output(out)
        return self._added(x, _normed(out, self.post_mlp_layernorm)), routing

    def post_attention_chosen(self, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        """What `post_attention` gives in a layer with a mixture of experts, and the experts of
        every token [B,T,k]."""
        x, normed = self._before_mlp(x, o)
        assert not isinstance(self.mlp, FeedForward)
        out, chosen = self.mlp.chosen(normed)
        out = self.reduce_output(out)
        return self._added(x, _normed(out, self.post_mlp_layernorm)), chosen

    def _before_mlp(self, x: Tensor, o: Tensor) -> tuple[Tensor, Tensor]:
        """The stream after attention, and what the feed-forward reads of it."""
        if self.has_gate:
            # Normed a second time: gates need no place among what a core takes and gives.
            assert isinstance(self.self_attn, Attention)
            o = self.self_attn.gated(o, self.attention_input(x))
        attended = self.reduce_output(self.mixer.output(o))
        x = self._added(x, _normed(attended, self.post_self_attn_layernorm))
        return x, self.gather_input(_normed(x, self.post_attention_layernorm))

    def before_recompute(self) -> None:
        """Called once by an engine whose backward runs the block's forward again.

        Nothing reads the sum at the end of the block in that second run, so the product that is
        added there can be left out, unless a norm needs it.
        """
        if isinstance(self.mlp, FeedForward) and self.post_mlp_layernorm is None:
            compute_once(self.mlp.down_proj)

    def _added(self, x: Tensor, branch: Tensor) -> Tensor:
        """The stream with the output of attention or feed-forward."""
        branch = self._dropped(branch)
        if self.residual_scale != 1.0:
            branch = branch * self.residual_scale
        return x + branch

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: AttentionMask,
        counted: Tensor | None = None,
        given: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        q, k, v = self.pre_attention(x, cos, sin)
        o = self.core(q, k, v, **self.core_settings(mask))
        # A plain feed-forward gets the same arguments with and without `counted`: one graph serves
        # both.
        if counted is None or isinstance(self.mlp, FeedForward):
            return self.post_attention(x, o)
        if given is None:
            return self.post_attention(x, o, counted)
        return self.post_attention(x, o, counted, given)

    def _dropped(self, x: Tensor) -> Tensor:
        if self.dropout and self.training:
            return self.drop(x, self.dropout)
        return x


class Trunk(nn.Module):
    """Embedding, blocks and final norm; holds them under the names that checkpoints use."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        weight = torch.empty(config.vocab, config.hidden_size)
        if not weight.is_meta:
            # On the meta device this would draw nothing and load the compiler, which takes seconds.
            nn.init.normal_(weight)
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden_size, _weight=weight)

        self.embed_positions = None
        if config.positions == "learned":
            self.embed_positions = nn.Embedding(config.max_seq_len, config.hidden_size)

        # Keyed by number, so that the layers of a pipeline stage keep their names.
        self.layers = nn.ModuleDict(
            {str(layer): Block(config, layer) for layer in range(config.num_layers)}
        )

        # Logits are linear in what the norm returns, so `logit_scale` costs nothing here.
        # Scores of a reward model are not scaled.
        gain = 1.0 if config.score_head else config.logit_scale
        self.norm = build_norm(config, gain=gain)


class Transformer(Model):
    """A decoder of the shape a config describes."""

    BLOCK_METHODS = ("pre_attention", "post_attention")

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # Modules are registered in the order of the forward: engines lay out and reduce gradients
        # in the reverse. Gates come first: every layer uses them, so their gradients are complete
        # last.
        self.head_gates = None
        if config.head_gates is not None:
            from headway.model.head_gates import HeadGates

            self.head_gates = HeadGates(config)

        self.aligner = nn.ModuleDict()
        self.projector = None
        if config.media is not None:
            self.aligner = build_aligner(config.media)
            self.projector = MediaEmbedder(config.media, config.hidden_size)

        self.visual = None
        if config.vision is not None:
            from headway.model.vision import build_tower

            self.visual = build_tower(config.vision)

        self.model = Trunk(config)

        self.lm_head = None
        self.score = None
        if config.score_head:
            self.score = nn.Linear(config.hidden_size, 1, bias=False)
        elif not config.tie_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab, bias=False)

        self.rotation = Rotation(config)
        self.is_random = config.dropout > 0

        # Set by `split_layers`, on a rank that has a part of every layer.
        self._vocab: VocabShard | None = None
        """The rows of embedding and head that this rank has; None: all."""
        self._counts = True
        """Whether gradients of routing and scores count on this rank: ranks that share the
        layers compute the same ones."""
        self._own_tokens: Callable[[Tensor], Tensor] | None = None
        """[B,T] of all tokens -> this rank's; None: it has all."""

        self._log_alpha: Tensor | None = None
        """The head gates on the host, as of the beginning of the step."""

        self.is_exact = False
        """Tokens are computed in blocks of fixed size (`use_exact`)."""

    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        """Head gates are sampled with the noise of a seed.

        Without one each is 0 or 1 (`HeadGates.draw`).
        """
        mask, draw = self._mask(batch, seed)
        media = self._media(batch)
        counted = None
        if self.config.experts is not None:
            counted = counted_tokens(batch)

        # Through `__call__`, not `forward`: engines have hooks on the model.
        result = self(
            batch.tokens,
            batch.position,
            mask,
            media=media,
            counted=counted,
            routes=batch.extra.get(ROUTES),
        )
        if isinstance(result, Tensor):
            return self._output(result, draw)
        hidden, routing = result
        return self._output(hidden, draw, routing)

    def forward_stage(
        self, batch: Batch, stream: Tensor | None, layers: range, seed: int | None = None
    ) -> Tensor | ModelOut:
        """Every stage draws the gates of all layers, from the same seed."""
        mask, draw = self._mask(batch, seed)

        x = stream
        if x is None:
            media = self._media(batch)
            x = self.embed(batch.tokens, media, position=batch.position)

        cos, sin = self.rotation(batch.position)
        for layer in layers:
            x = self.model.layers[str(layer)](x, cos, sin, mask)

        if layers.stop < self.config.num_layers:
            return x
        return self._output(self.model.norm(x), draw)

    def _media(self, batch: Batch) -> MediaTensors | PictureTensors | None:
        """The pictures and sounds of a batch."""
        if self.config.vision is not None:
            from headway.model.vision import PictureTensors

            return PictureTensors.of(batch)
        return MediaTensors.of(batch, self.config.media)

    def _mask(self, batch: Batch, seed: int | None) -> tuple[AttentionMask, GateDraw | None]:
        """The mask of a pass, which carries the gates of its heads, and these gates for the
        loss."""
        mask = mask_of(batch)
        # Without `begin_step` the host knows no gates: every head is full.
        if self.head_gates is None or self._log_alpha is None:
            return mask, None
        draw = self.head_gates.draw(self._log_alpha, seed, is_held=self.holds_gates)
        return replace(mask, mix=draw.mix), draw

    def _output(
        self, hidden: Tensor, draw: GateDraw | None, routing: Routing | None = None
    ) -> ModelOut:
        if routing is not None and not self._counts:
            # Another rank computes the same balancing losses. Gradients are summed over ranks, so
            # only one of them may contribute.
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
            self.is_exact,
        )
        score = None
        if self.score is not None:
            score = ScoreHead(hidden, self.score.weight, self._vocab, self._counts)

        return ModelOut(head, draw, routing=routing, score=score)

    def keep_layers(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """The layers are keyed by their numbers, so those that stay keep their names."""
        for layer in range(self.config.num_layers):
            if layer not in layers:
                del self.model.layers[str(layer)]

        # The last stage keeps a tied embedding: it is its head.
        if not first and not (last and self.config.ties_head):
            del self.model.embed_tokens
        if not first:
            self.model.embed_positions = None
            self.aligner = nn.ModuleDict()
            self.projector = None

        if not last:
            del self.model.norm
            self.lm_head = None
            self.score = None

    def begin_step(self) -> None:
        """Copy the head gates to the host.

        That waits for the last update, so it is done once per step.
        """
        if self.head_gates is None:
            self._log_alpha = None
        else:
            self._log_alpha = self.head_gates()

    def held_gates(self, target: float) -> dict[str, Tensor]:
        """The gates shifted together (`head_gates.hold`)."""
        from headway.model.head_gates import hold

        if self.head_gates is None:
            return {}
        return {GATES: hold(self.head_gates(), target)}

    def balance(self, load: Tensor, keep: Tensor) -> None:
        """Move the routers' biases against the load of each mixture."""
        mixtures = [
            block.mlp for block in self.blocks().values() if not isinstance(block.mlp, FeedForward)
        ]
        for mixture, layer_load in zip(mixtures, load, strict=True):
            mixture.balance(layer_load, keep)

    def blocks(self) -> Mapping[str, Block]:
        """The layers, by their parameters' prefix."""
        blocks: dict[str, Block] = {}
        for layer, block in self.model.layers.items():
            assert isinstance(block, Block)
            blocks[f"model.layers.{layer}"] = block
        return blocks

    def param_specs(self) -> list[ParamSpec]:
        """The layout of the config."""
        return param_specs(self.config)

    @property
    def head_parameter(self) -> str | None:
        """None with an adapter on the head, and for a reward model, whose head predicts no
        tokens."""
        if self.config.ties_head:
            return EMBEDDING
        if self.score is not None or isinstance(self.lm_head, AdaptedLinear):
            return None
        return HEAD

    @property
    def head_weight(self) -> Tensor:
        """[V,D]; the embedding's matrix where the two are tied; [1,D] of a reward model."""
        if self.score is not None:
            return self.score.weight
        if self.lm_head is None:
            return self.model.embed_tokens.weight
        if isinstance(self.lm_head, AdaptedLinear):
            return self.lm_head.effective
        return self.lm_head.weight

    def logits(self, hidden: Tensor) -> Tensor:
        """Soft-capped where the config says so; of the whole vocabulary, also where ranks share
        it."""
        if self.is_exact:
            return row_logits(hidden.flatten(0, -2), self.head_weight).unflatten(
                0, hidden.shape[:-1]
            )
        logits = super().logits(hidden)
        if self._vocab is not None:
            logits = self._vocab.whole(logits)

        cap = self.config.logit_softcap
        if cap is None:
            return logits
        return torch.tanh(logits / cap) * cap

    def embed(
        self,
        tokens: Tensor,
        media: MediaTensors | PictureTensors | None = None,
        *,
        position: Tensor | None = None,
    ) -> Tensor:
        """The stream at the bottom, [B,T,D]; media replace the embeddings of their positions."""
        return self._embed(tokens, media, position)[0]

    def _embed(
        self,
        tokens: Tensor,
        media: MediaTensors | PictureTensors | None,
        position: Tensor | None,
    ) -> tuple[Tensor, PlacedCells | None]:
        """The same, and the cells of pictures, which some towers add to behind layers too."""
        x = self.model.embed_tokens(tokens)
        if self.config.embed_scale != 1.0:
            # Rounded to the dtype of the stream, as published models (Gemma) were trained.
            x = x * torch.tensor(self.config.embed_scale, dtype=x.dtype).item()

        grad_scale = self.config.embed_grad_scale
        if grad_scale != 1.0:
            # The value of x with `grad_scale` of its gradient.
            x = x * grad_scale + x.detach() * (1 - grad_scale)

        if self.model.embed_positions is not None:
            assert position is not None, "learned positions need them"
            # x is of this rank's tokens alone, the batch's positions are of all.
            positions = position
            if self._own_tokens is not None:
                positions = self._own_tokens(position)
            # Rows of a decoding batch that take no part stand at -1.
            x = x + self.model.embed_positions(positions.clamp(min=0).long())

        if self.visual is not None and self.config.vision is not None:
            if media is None or isinstance(media, MediaTensors):
                return x, None
            cells = media.placed(self.visual, self.config.vision, x.dtype)
            if cells is None:
                return x, None
            return cells.into(x), cells
        if self.projector is None or not isinstance(media, MediaTensors):
            return x, None
        return self.projector(x, media, self.aligner), None

    def forward(
        self,
        tokens: Tensor,
        position: Tensor,
        mask: AttentionMask,
        media: MediaTensors | PictureTensors | None = None,
        counted: Tensor | None = None,
        routes: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Routing]:
        """Hidden [B,T,D] after the final norm.

        With `counted` tokens [B,T], also what the routers of all mixtures did with them:
        [layers,B,...]. `routes` [B,T,layers,k]: experts that are taken instead of choosing."""
        x, cells = self._embed(tokens, media, position)
        cos, sin = self.rotation(position if media is None else media.rotary(position))

        routings: list[Routing] = []
        for layer, block in enumerate(self.blocks().values()):
            if counted is None:
                x = block(x, cos, sin, mask)
            elif routes is None or isinstance(block.mlp, FeedForward):
                x = block(x, cos, sin, mask, counted)
            else:
                x = block(x, cos, sin, mask, counted, routes[:, :, len(routings)])
            if not isinstance(x, Tensor):
                x, routing = x
                routings.append(routing)
            if cells is not None:
                x = cells.behind(layer, x)

        hidden = self.model.norm(x)
        if not routings:
            return hidden
        return hidden, stack_routings(routings)

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend in every layer."""
        for block in self.blocks().values():
            block.use_attention(backend)

    def use_exact(self) -> None:
        """See model/exact.py."""
        from headway.model.exact import make_exact

        if not self.is_exact:
            make_exact(self)

    def shard_attention(self, wrap: Callable[[AttentionCore], AttentionCore], heads: slice) -> None:
        """Head gates are then drawn for these KV heads only."""
        if self.head_gates is not None:
            self.head_gates.heads = heads
        for block in self.blocks().values():
            block.core = wrap(block.core)

    def split_layers(self, split: LayerSplit) -> None:
        """The embedding is not here: its module was replaced by one that does its own exchange."""
        self._vocab = split.vocab
        self._own_tokens = split.own_tokens
        self._counts = split.is_first
        if self.projector is not None:
            self.projector.own_tokens = split.own_tokens
        if self.head_gates is not None:
            self.head_gates.heads = split.heads
            self.head_gates.counts = split.is_first

        for block in self.blocks().values():
            block.gather_input = split.gather_input
            block.reduce_output = split.reduce_output
            block.drop = split.drop
            block.mixer.mean_over_ranks = split.mean

    def hidden_states(
        self,
        tokens: Tensor,
        position: Tensor,
        media: MediaTensors | PictureTensors | None = None,
    ) -> Tensor:
        """Under a causal mask."""
        rows, length = tokens.shape
        return self(tokens, position, causal_mask(rows, length, tokens.device), media)

    def cached_forward(
        self, compiler: Compiler | None = None, *, keeps_routes: bool = False
    ) -> CachedForward:
        """The blocks' halves are compiled; attention between them is the cache's and stays
        outside of graphs."""
        from headway.model.cached_halves import CachedHalves

        halves = [
            CachedHalves(block, compiler, keeps_routes=keeps_routes)
            for block in self.blocks().values()
        ]

        def forward(
            tokens: Tensor,
            position: Tensor,
            cache: AttentionCache,
            media: MediaTensors | PictureTensors | None = None,
        ) -> Tensor:
            x, cells = self._embed(tokens, media, position)
            rotary = position if media is None else media.rotary(position)
            cos, sin = self.rotation(rotary, cache.capacity)
            routes: list[Tensor] = []
            for layer, block_halves in enumerate(halves):
                pre_attention, post_attention, expand = block_halves.of(tokens)
                q, k, v = pre_attention(x, cos, sin)
                if block_halves.stateful is not None:
                    o = cache.mix(layer, block_halves.stateful, q, k, v)
                else:
                    o = cache.attend(layer, q, k, v, position, block_halves.sinks, expand)
                x = post_attention(x, o)
                if not isinstance(x, Tensor):
                    x, chosen = x
                    routes.append(chosen)
                if cells is not None:
                    x = cells.behind(layer, x)
            if routes:
                cache.store_routes(torch.stack(routes, dim=2), position)
            return self.model.norm(x)

        return forward

    def fuse_projections(self) -> None:
        """One product for q, k and v and one for gate and up, in every layer; done once."""
        for block in self.blocks().values():
            block.mixer.fuse()
            block.mlp.fuse()
