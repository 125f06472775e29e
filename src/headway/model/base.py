"""The contract between a model and the rest of headway. Engines, tasks and inference use `Model`;
only this package knows the class behind it.

    training     batch -> forward_batch -> ModelOut: hidden states, the LM head bound to them, and
                 what tasks need of head gates and routers
    inference    tokens -> cached_forward over a cache: pieces of prompts, or one token per row
                 -> hidden states -> logits
    engines      blocks() are wrapped, gathered, recomputed, offloaded and compiled;
                 param_specs() say how parameters may be sharded;
                 split_layers() puts exchanges where a rank holds a part of every layer

Shapes: B rows, T tokens, D width, V vocabulary, H query heads, KV key and value heads, hd head
width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.kernels.cross_entropy import NLL, Shaping, WeightGradBuffer, linear_nll, linear_scores
from headway.kernels.distill_loss import Distilled, DistillShaping, TeacherHead, linear_distill
from headway.kernels.topk_distill_loss import TopLogProbs, linear_top_k, linear_topk_distill
from headway.kernels.vocab_loss import VocabShard
from headway.model.adapter.config import adapted_spec
from headway.model.families.base import STORED, family_of
from headway.model.layout import GATES, ParamSpec, in_groups, spec_by_name

if TYPE_CHECKING:
    from headway.data.batch import Batch
    from headway.kernels.attention import AttentionMask
    from headway.kernels.policy_scores import DrawnFrom, PolicyScores
    from headway.model.config import ModelConfig
    from headway.model.head_gates import GateDraw
    from headway.model.moe import ExpertCall
    from headway.model.projector import MediaTensors
    from headway.model.router import Routing
    from headway.model.state_mixer import StateMixer

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
"""torch's norms, in models of users and of transformers; headway's own say what they are in
their specs."""
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
"""A method of a block -> the same method compiled."""
CachedForward = Callable[..., Tensor]
"""(tokens [B,T], position [B,T], AttentionCache, MediaTensors or None) -> hidden [B,T,D] after
the final norm."""
Expander = Callable[[Tensor], tuple[Tensor, Tensor]]
"""What a cache stores of latent attention, [...,1,W] -> keys and values of all heads [...,H,hd]."""


class AttentionCache(Protocol):
    """What a model needs of a KV cache: attention of new tokens to those it holds."""

    capacity: int
    """Tokens of the longest sequence it has room for."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        position: Tensor,
        sinks: Tensor | None = None,
        expand: Expander | None = None,
    ) -> Tensor:
        """Store k and v [B,T,KV,hd], then o [B,T,H,hd] of q [B,T,H,hd] at positions [B,T] over all
        that is stored.

        `sinks` [H]: a trained logit of each head beside its keys, in models that have them.
        `expand`: with latent attention q attends to the keys and values that this makes of the
        stored vectors; None: to the stored vectors themselves.
        """
        ...

    def store_routes(self, routes: Tensor, position: Tensor) -> None:
        """Store the experts [B,T,layers,k] of tokens at positions [B,T]."""
        ...

    def mix(
        self, layer: int, mixer: StateMixer, mixed: Tensor, controls: Tensor, z: Tensor
    ) -> Tensor:
        """o [B,T,H,V] of a layer that has a state, whose `project` gave the tensors: new tokens
        behind the state that the cache holds, which becomes the state behind them."""
        ...


class AttentionCore(Protocol):
    """Attention of one layer: q [B,T,H,hd], k and v [B,T,KV,hd] -> o [B,T,H,hd]."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, *, window: int | None = None
    ) -> Tensor:
        """A model with trained sinks also passes `rule`, a `ScoreRule` with the sinks of this
        layer."""
        ...


@dataclass(frozen=True)
class LayerSplit:
    """What a model does differently on a tensor-parallel rank, which holds a part of every layer
    and some rows of embedding and head.

    Lower-case t counts this rank's tokens: T / ranks with parallel.sequence, T without it.
    """

    gather_input: Callable[[Tensor], Tensor]
    """Between a norm and the products split by outputs: [B,t,D] of this rank's tokens -> [B,T,D]
    of all tokens."""
    reduce_output: Callable[[Tensor], Tensor]
    """After the products split by inputs: [B,T,D] -> the sum over ranks, [B,t,D] of this rank's
    tokens."""
    drop: Callable[[Tensor, float], Tensor]
    """Dropout on [B,t,D]: the same elements as on one rank."""
    heads: slice
    """The KV heads of this rank."""
    own_tokens: Callable[[Tensor], Tensor]
    """[B,T] of all tokens -> [B,t] of this rank's tokens."""
    is_first: bool
    """All ranks compute the same loss. Gradients that it has of head gates, routers and scores
    count on the first rank alone."""
    vocab: VocabShard
    mean: Callable[[Tensor], Tensor] | None = None
    """The mean over ranks; its backward sums the gradients of all ranks' uses. For norms over
    channels that ranks share."""


@dataclass(frozen=True)
class LMHead:
    """The output projection bound to hidden states, applied to a chunk of tokens at a time:
    logits [B, T, V] never exist."""

    hidden: Tensor
    """[B, T, D]; of this rank's tokens, where ranks share the layers"""
    weight: Tensor
    """[V, D]; with `shard` its rows"""
    chunk_tokens: int
    grad_buffer: WeightGradBuffer | None = None
    """Where the weight's gradient may be written directly."""
    shard: VocabShard | None = None
    """The rows of the head that this rank has; None: all."""
    softcap: float | None = None
    """Logits x are softcap * tanh(x / softcap)."""
    is_exact: bool = False
    """Log-probabilities have the bits that the inference engine gives them (model/exact.py)."""

    def _tokens(self) -> Tensor:
        """Hidden states of all tokens of all rows, [B * T, D]."""
        if self.shard is None:
            return self.hidden.flatten(0, 1)
        return self.shard.gather_input(self.hidden).flatten(0, 1)

    def nll(self, targets: Tensor, coefficients: Tensor, shaping: Shaping = Shaping()) -> NLL:
        """Weighted negative log-likelihood of targets [B, T], and its gradients, in one pass;
        per-token results have shape [B, T]."""
        out = linear_nll(
            self._tokens(),
            self.weight,
            targets.flatten(),
            coefficients.flatten(),
            shaping,
            self.chunk_tokens,
            self.grad_buffer,
            self.shard,
            self.softcap,
        )
        return NLL(out.total, *(per_token.view(targets.shape) for per_token in out[1:]))

    def scores(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """(log-probability, lse) of targets, [B, T] each, for losses of any form: backward
        computes the logits again."""
        log_prob, lse = linear_scores(
            self._tokens(),
            self.weight,
            targets.flatten(),
            self.chunk_tokens,
            self.shard,
            self.softcap,
        )
        return log_prob.view(targets.shape), lse.view(targets.shape)

    def policy(
        self, targets: Tensor, drawn: DrawnFrom | None = None, kept: Tensor | None = None
    ) -> PolicyScores:
        """Log-probability and entropy of sampled targets, [B, T] each, in the distribution that
        they were drawn from (None: the model's own); differentiable in any way. `kept` [B, T, K]:
        the ids that it was cut to, -1 behind the last."""
        from headway.kernels.policy_scores import DrawnFrom, PolicyScores, linear_policy_scores

        scores = linear_policy_scores(
            self._tokens(),
            self.weight,
            targets.flatten(),
            drawn or DrawnFrom(),
            self.chunk_tokens,
            self.shard,
            self.softcap,
            None if kept is None else kept.flatten(0, 1),
            is_exact=self.is_exact,
        )
        return PolicyScores(*(per_token.view(targets.shape) for per_token in scores))

    def distill(
        self,
        targets: Tensor,
        coefficients: Tensor,
        taught: Tensor,
        teacher: TeacherHead,
        shaping: DistillShaping = DistillShaping(),
    ) -> Distilled:
        """Loss against a teacher with hidden states `taught` [B, T, D of the teacher] in one
        pass; per-token results are [B, T]."""
        self._require_whole_head()
        out = linear_distill(
            self._tokens(),
            self.weight,
            taught.flatten(0, 1),
            teacher,
            targets.flatten(),
            coefficients.flatten(),
            shaping,
            self.chunk_tokens,
            self.grad_buffer,
            self.softcap,
        )
        return Distilled(out.total, *(per_token.view(targets.shape) for per_token in out[1:]))

    def distill_top_k(
        self,
        targets: Tensor,
        coefficients: Tensor,
        taught: TopLogProbs,
        shaping: DistillShaping,
        drop_rest: bool = False,
    ) -> Distilled:
        """Loss against a teacher's stored likeliest tokens `taught` [B, T, k] in one pass;
        per-token results are [B, T]."""
        self._require_whole_head()
        taught_tokens = TopLogProbs(taught.ids.flatten(0, 1), taught.log_probs.flatten(0, 1))
        out = linear_topk_distill(
            self._tokens(),
            self.weight,
            taught_tokens,
            targets.flatten(),
            coefficients.flatten(),
            shaping,
            drop_rest,
            self.chunk_tokens,
            self.grad_buffer,
            self.softcap,
        )
        return Distilled(out.total, *(per_token.view(targets.shape) for per_token in out[1:]))

    def _require_whole_head(self) -> None:
        if self.shard is not None:
            raise ConfigError(
                "objective distill needs the whole head on every rank: parallel.tensor must be 1."
            )

    def top_k(self, k: int, temperature: float = 1.0) -> TopLogProbs:
        """The k likeliest next tokens [B * T, k] of all positions, without gradients."""
        return linear_top_k(
            self._tokens(), self.weight, k, temperature, self.chunk_tokens, self.softcap
        )


@dataclass(frozen=True)
class Embeddings:
    """One vector per row and modality, of a model that aligns modalities."""

    names: tuple[str, ...]
    """The modalities, in the order of dim 1."""
    values: Tensor
    """fp32 [B, modalities, D]: vectors of length 1, or 0 where a sample lacks the modality"""
    present: Tensor
    """bool [B, modalities]: whether a sample has the modality"""


@dataclass(frozen=True)
class ScoreHead:
    """The head of a reward model, applied to given hidden states: one fp32 score per document.

    The score of a document is that of its last token, which has seen all the others;
    transformers' ...ForSequenceClassification with one label computes the same.
    """

    hidden: Tensor
    """[B,T,D]; of this rank's tokens, where ranks share the layers"""
    weight: Tensor
    """[1,D]"""
    shard: VocabShard | None = None
    """How ranks that share the layers bring their tokens together."""
    counts: bool = True
    """Whether gradients count on this rank; ranks that share the layers compute the same scores."""

    def of_documents(self, bounds: Tensor) -> Tensor:
        """fp32 [B,n], n documents of a row that start at bounds [B,n + 1]. Empty documents have a
        score too, which means nothing."""
        hidden = self.hidden
        if self.shard is not None:
            hidden = self.shard.gather_input(hidden)

        # An empty document at the beginning of a row would end at -1.
        last = (bounds[:, 1:].long() - 1).clamp(min=0)
        last_hidden = hidden.gather(1, last[..., None].expand(-1, -1, hidden.shape[-1]))
        scores = F.linear(last_hidden.float(), self.weight.float()).squeeze(-1)
        if self.counts:
            return scores
        # The backward of `gather_input` is an exchange, so every rank must run it: here with a
        # gradient of zero.
        return scores.detach() + 0.0 * (scores - scores.detach())


@dataclass(frozen=True)
class ModelOut:
    """The result of one forward pass."""

    head: LMHead
    """Of a model without a vocabulary: hidden states and an empty weight."""
    gates: GateDraw | None = None
    """The head gates as this pass used them, where the model has any."""
    embeddings: Embeddings | None = None
    """The vectors of a model that aligns modalities."""
    routing: Routing | None = None
    """What the routers of all mixtures of experts did, [layers,B,...], where the model has any."""
    score: ScoreHead | None = None
    """The head of a reward model, bound to the same hidden states."""

    @property
    def hidden(self) -> Tensor:
        """[B, T, D] after the final norm; of this rank's tokens, where ranks share the layers."""
        return self.head.hidden


class Model(nn.Module, ABC):
    """A language model, or an aligner of modalities, which has no vocabulary and generates nothing.

    Parameters outside `blocks()` are used through a call of the module that owns them, or after the
    last block: engines gather or update parameters in forward hooks on these modules.
    """

    BLOCK_METHODS: ClassVar[tuple[str, ...]] = ("forward",)
    """Methods of a block that trace as one graph each. They are what is compiled and what
    selective recomputation wraps."""
    COMPILES: ClassVar[bool] = True
    """Whether `BLOCK_METHODS` can be compiled."""

    config: ModelConfig
    is_random: bool = True
    """Blocks draw random numbers in training mode, so recomputing one must restore the
    generator's state."""
    chunk_tokens: int = 2048
    """Tokens whose logits exist at one time."""
    holds_gates: bool = False
    """The engine holds head gates at a sparsity (`held_gates`), so their gradient must not change
    it."""
    head_grad_buffer: WeightGradBuffer | None = None
    """Where the gradient of the LM head's weight is written, if an engine has a buffer for it."""

    @abstractmethod
    def forward_batch(self, batch: Batch, seed: int | None = None) -> ModelOut:
        """One pass over a microbatch, through the module's hooks.

        `seed`: of what the model samples itself (head gates); None in evaluation, where nothing is
        sampled.
        """

    def begin_step(self) -> None:
        """Called once before the passes of a step: read from the device what the host must know
        during them."""

    def held_gates(self, target: float) -> dict[str, Tensor]:
        """The values, by name, at which head gates expect a share `target` of streaming heads;
        nothing of a model without gates. Waits for the device."""
        return {}

    def balance(self, load: Tensor, keep: Tensor) -> None:
        """Called after each update; a model that balances experts without a loss changes its
        routers' biases.

        `load` [layers,E]: tokens of each expert of all mixtures, over the whole step and all ranks.
        `keep`: 0 if the update was skipped, else 1.
        """

    @abstractmethod
    def blocks(self) -> Mapping[str, nn.Module]:
        """The repeated layers in forward order, by the prefix of their parameters' names.

        The first input of a block is the hidden stream; its other inputs are shared by all blocks.
        """

    def param_specs(self) -> list[ParamSpec]:
        """Every parameter of the whole model without adapters.

        The default derives them from names and modules: parameters are whole on all ranks, norms
        begin with 1 and biases with 0.
        """
        return module_specs(self)

    @property
    @abstractmethod
    def head_weight(self) -> Tensor:
        """[V,D]: the matrix that turns hidden states into logits."""

    @property
    @abstractmethod
    def head_parameter(self) -> str | None:
        """The name of the parameter that is `head_weight`; None where that is computed from
        several."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [...,V] of hidden states [...,D]."""
        return F.linear(hidden, self.head_weight)

    def use_attention(self, backend: str) -> None:
        """Compute attention with one backend in every case."""
        raise ConfigError(
            f"kernels.attention is {backend!r}; {type(self).__name__} has no choice of attention "
            "backends. Use auto."
        )

    def use_exact(self) -> None:
        """Compute every token in the same bits, whatever is computed with it (model/exact.py)."""
        raise ConfigError(
            f"rollout.exact is true; {type(self).__name__} has no exact form. Set it to false."
        )

    def shard_attention(self, wrap: Callable[[AttentionCore], AttentionCore], heads: slice) -> None:
        """Put `wrap(core)` in the place of every attention core, which then computes only these
        KV heads."""
        raise ConfigError(
            f"parallel.context is above 1; {type(self).__name__} cannot share the tokens of a row. "
            "Use context 1."
        )

    def split_layers(self, split: LayerSplit) -> None:
        """Put the exchanges of tensor parallelism into the layers, whose parameters are already
        this rank's parts."""
        raise ConfigError(
            f"parallel.tensor is above 1; {type(self).__name__} cannot be split. Use tensor 1."
        )

    def share_experts(self, wrap: Callable[[nn.Module], ExpertCall]) -> None:
        """Call `wrap(experts)` in the place of every mixture's experts, of which this rank holds
        some (expert parallelism)."""
        from headway.model.moe import MixtureOfExperts

        # By class, so that a user's model with headway's mixtures has expert parallelism too.
        mixtures = [module for module in self.modules() if isinstance(module, MixtureOfExperts)]
        if not mixtures:
            raise ConfigError(
                f"parallel.expert is above 1; {type(self).__name__} has no experts to split. Use "
                "expert 1."
            )
        for mixture in mixtures:
            mixture.exchange = wrap(mixture.experts)

    def keep_layers(self, layers: Collection[int], *, first: bool, last: bool) -> None:
        """Keep one pipeline stage: remove all other layers, the embedding unless `first`, final
        norm and head unless `last`.

        Names stay those of the whole model. Gates stay, and so does a tied embedding where the head
        is.
        """
        raise ConfigError(
            f"parallel.pipeline is above 1; {type(self).__name__} cannot be divided into stages. "
            "Use pipeline 1."
        )

    def forward_stage(
        self, batch: Batch, stream: Tensor | None, layers: range, seed: int | None = None
    ) -> Tensor | ModelOut:
        """Consecutive layers of `forward_batch`, for one pipeline stage.

        `stream` [B,T,D] enters the first of them (None: the tokens are embedded). The stream after
        the last of them comes out, or the model's output if that is the last layer of all.
        """
        raise ConfigError(
            f"parallel.pipeline is above 1; {type(self).__name__} cannot be divided into stages. "
            "Use pipeline 1."
        )

    def hidden_states(
        self, tokens: Tensor, position: Tensor, media: MediaTensors | None = None
    ) -> Tensor:
        """Hidden states [B,T,D] of tokens [B,T], each row one document, without a cache.

        `media` replaces the embeddings of its positions, for a model with media inputs."""
        raise ConfigError(f"{type(self).__name__} cannot generate text.")

    def cached_forward(
        self, compiler: Compiler | None = None, *, keeps_routes: bool = False
    ) -> CachedForward:
        """A forward over any cache, for prompts and for decoding; the caller keeps track of
        lengths.

        `compiler` is applied to what traces as one graph; the model itself stays eager.
        `keeps_routes`: the experts of every token are stored in the cache, too.
        """
        raise ConfigError(f"{type(self).__name__} cannot generate text.")

    def fuse_projections(self) -> None:
        """Merge matrix products that read the same input, for inference; results stay the same."""


def build_model(config: ModelConfig) -> Model:
    """The model of a config, its parameters uninitialized.

    A family module may bring its own with `build(config) -> Model`.
    """
    # Imported here: these modules import this one.
    from headway.model.transformer import Transformer

    if config.head == "vectors":
        from headway.model.aligner import Aligner

        return Aligner(config)

    # A dotted name is a user's module. A family that was stored with a model has tables alone.
    is_user_module = "." in config.family and not config.family.startswith(STORED)
    if config.hf_config is not None or is_user_module:
        build = vars(family_of(config.family)).get("build")
        if build is not None:
            return build(config)
    return Transformer(config)


def module_specs(module: nn.Module) -> list[ParamSpec]:
    """The specs that follow from names and classes of submodules, for any module, in the order
    of its parameters."""
    specs: list[ParamSpec] = []
    for name, parameter in module.named_parameters():
        spec = spec_by_name(name, tuple(parameter.shape))
        path, _, leaf = name.rpartition(".")
        # A norm that is not called one (`ln_1`) is known by its class.
        if isinstance(module.get_submodule(path), NORMS):
            spec = replace(spec, groups=spec.groups | in_groups("norm"))
            if leaf == "weight":
                spec = replace(spec, start="norm")
        specs.append(spec)
    return specs


def model_specs(model: Model) -> dict[str, ParamSpec]:
    """The spec of every parameter that a whole model has, in its order: the model's own and
    those derived for its adapters."""
    known = {spec.name: spec for spec in model.param_specs()}
    return {
        name: adapted_spec(name, tuple(parameter.shape), known)
        for name, parameter in model.named_parameters()
    }


def keep_float32(model: Model) -> None:
    """Give the balancing biases of routers back the fp32 that `model.to(dtype)` took: they move
    by less than bf16 can tell apart."""
    # `Module.to` casts every parameter; there is no way to leave some out.
    wide = {spec.name for spec in model.param_specs() if spec.keeps_float32}
    for name, parameter in model.named_parameters():
        if name in wide:
            parameter.data = parameter.data.float()


def build_frozen_model(
    config: ModelConfig,
    weights: Iterable[tuple[str, Tensor]],
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """A model with given weights, in evaluation mode and without gradients.

    It has no head gates: every head attends in full until masks say otherwise.
    """
    config = config.with_(head_gates=None)
    # Built without memory and cast before it is allocated: no fp32 copy of the model exists.
    with torch.device("meta"):
        model = build_model(config)
    model = model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
    keep_float32(model)

    parameters = dict(model.named_parameters())
    for name, value in weights:
        if name != GATES:
            parameters[name].copy_(value)
    return model


MAX_VARIANTS = 64
"""Least recompilation limit. All blocks share their code, so the compiler counts the variants of
all of them together: with gradients and without, trained or frozen, a reference model, every
stage of a run. Its default limit of 8 would end such a run."""


def compile_method(method: Callable[..., Any], *, fullgraph: bool = True) -> Callable[..., Any]:
    """A method of a block as one graph per shape; anything that would break the graph is an
    error unless `fullgraph` is false."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    # Shapes are the same throughout a run, so a graph for exactly these shapes is the fastest.
    return torch.compile(method, fullgraph=fullgraph, dynamic=False)


def compile_any_length(method: Callable[..., Any], dim: int = 1) -> Callable[..., Any]:
    """A method of a block as one graph for every number of tokens (dimension 1 of its tensors),
    or of rows (dimension 0)."""
    config: Any = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MAX_VARIANTS)
    compiled = torch.compile(method, fullgraph=True)

    # Marked at every call: prompts have any length, and the first call would otherwise make a graph
    # for its own length, the second one another.
    def call(*tensors: Tensor) -> Any:
        for tensor in tensors:
            torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return compiled(*tensors)

    return call
