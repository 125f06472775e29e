"""Every parameter of a Transformer, as data: a config comes in, one `ParamSpec` per parameter goes
out, in forward order.

A spec says all that others must know of a parameter: engines, optimizers, adapters and `plan`
decide by its fields, never by its name. So a model may call its parameters as it likes.

    split        dim    parameters
    column        0     q, k, v, q_b, kv_b, gate, up and their biases, norms over all heads, sinks:
                        each rank computes some of the outputs
    row           1     o, down: each rank sums over some of the inputs
    vocab         0     embedding and head: each rank has some of the tokens
    replicated    -     norms, routers, q_a, kv_a, the score head, biases added after a sum,
                        everything of media inputs

Stacked experts, [experts, out, in] and biases [experts, out], have each dim one higher: a rank has
a part of every expert.

Imports without torch; only the specs of a wrapped model (family transformers) come from its class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from math import prod
from typing import Literal

from headway.model.config import ModelConfig
from headway.model.media_shape import ALIGNER, PROJECTOR, SHARED, MediaShape

Split = Literal["column", "row", "vocab", "replicated"]
Stage = int | Literal["first", "last"]
Coverage = Literal["tokens", "part", "all"]
"""What a rank's gradient of a parameter covers, where several ranks of the tensor axis hold the
same elements:

    tokens    the contribution of this rank's tokens. With parallel.sequence these are some of the row's, and ranks add their
              gradients up; without it every rank has all tokens and the same gradient.
    part      the contribution of its heads, inputs or outputs: ranks always add up.
    all       everything, on every rank: never added up.
"""
Start = Literal[
    "normal", "residual", "table", "norm", "zero", "one", "decay", "uniform", "gates", "given"
]
"""How a parameter begins (init.py):

    normal      normal with the config's spread          residual   the same, smaller with depth: a matrix that adds to the stream
    norm        the factor that changes nothing          zero, one  0 and 1
    decay       ln of a uniform draw from 0.01 to 16: how fast a state with a decay forgets
    uniform     as torch initializes a layer             gates      as the config's head gates say
    table       of vectors that are looked up and added to a stream, in the towers of an aligner
    given       by the code that adds the parameter: an adapter, or the task
"""
Group = Literal[
    "embedding",
    "norm",
    "bias",
    "linear",
    "taps",
    "expert",
    "adapter",
    "projector",
    "aligner",
    "tower",
    "gates",
    "score",
    "router_bias",
    "fixed",
    "objective",
]
"""What a parameter belongs to; it may be in several.

    linear        the matrix of a linear that an adapter may change
    taps          of a short convolution: a few numbers for each channel
    expert        stacked over experts along dim 0
    router_bias   by which a router balances experts without a loss
    fixed         numbers that a class of transformers stores with its weights and never trains
    tower         the vision tower of a published model; it trains where a recipe names it
    aligner       a head that aligns media with text, trained by the contrastive task
"""


def in_groups(*groups: Group) -> frozenset[Group]:
    """A frozenset whose members the type checker knows to be groups."""
    return frozenset(groups)


EMBEDDING = "model.embed_tokens.weight"
POSITIONS = "model.embed_positions.weight"
HEAD = "lm_head.weight"
SCORE = "score.weight"
"""The head of a reward model, under transformers' name: [1, D]."""
GATES = "head_gates.log_alpha"
"""Gates stay whole and fp32 on every rank, for any dtype of the weights."""
DECIDED = 10.0
"""log_alpha of a gate that is decided: +10 full, -10 streaming."""
STACKED = 3
"""Dims of a matrix that is stacked over experts."""
EXPERTS = ".mlp.experts."
"""Between the path of a layer and the names of its experts' parameters."""
ROUTER_BIAS = "e_score_correction_bias"
"""Last part of the name of the bias by which a router balances experts without a loss; fp32 and
whole on every rank, never trained."""
NORM = in_groups("norm")
WIDE = in_groups("gates", "router_bias", "objective")
"""Groups whose parameters are always fp32."""
SPLIT_DIM: dict[Split, int | None] = {"column": 0, "row": 1, "vocab": 0, "replicated": None}
"""The dim of a plain matrix or bias; of stacked experts it is one higher
(`ParamSpec.split_dim`)."""


class Depth(IntEnum):
    """Where in its layer the forward meets a parameter. Parameters with the same one need no
    gradient of each other's output."""

    ENTRY = 0
    """The norm before attention."""
    PROJECTION = 1
    """Products of the layer's input: queries, keys, values, latents."""
    INNER_NORM = 2
    """What changes these channel by channel."""
    EXPANSION = 3
    """From latents to heads."""
    CORE = 4
    """Attention itself, a convolution, a state; the norm of its result."""
    OUTPUT = 5
    ATTENTION_END = 6
    """The norm behind attention."""
    FFN_ENTRY = 7
    """The norm before the feed-forward."""
    FFN_INPUT = 8
    """Products of its input, routers too."""
    FFN_OUTPUT = 9
    FFN_END = 10
    """The norm behind it."""


NAMES_BY_DEPTH = {
    Depth.PROJECTION: (
        "q_proj k_proj v_proj q_a_proj kv_a_proj_with_mqa z_proj b_proj a_proj c_proj x_proj dt_proj"
    ),
    Depth.INNER_NORM: "q_norm k_norm q_a_layernorm kv_a_layernorm A_log dt_bias",
    Depth.EXPANSION: "q_b_proj kv_b_proj",
    Depth.CORE: "sinks q_conv k_conv v_conv conv x_conv b_conv c_conv D",
    Depth.OUTPUT: "o_gate out_proj o_proj",
    Depth.ATTENTION_END: "post_self_attn_layernorm",
    Depth.FFN_ENTRY: "post_attention_layernorm",
    Depth.FFN_INPUT: "gate shared_gate gate_proj up_proj",
    Depth.FFN_OUTPUT: "down_proj",
    Depth.FFN_END: "post_mlp_layernorm",
}
"""Names that published models share, for those without specs of their own."""
DEPTH_BY_NAME = {name: depth for depth, names in NAMES_BY_DEPTH.items() for name in names.split()}


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Global shape, however it is sharded."""
    split: Split = "replicated"
    """How tensor parallelism may split it."""
    stage: Stage = "first"
    """Its layer, for pipeline stages; `first` goes with the embedding, `last` with the final
    norm and head."""
    unit: int = 1
    """A shard along the split dim is a multiple of this: heads stay whole."""
    tied_to: str | None = None
    """The parameter this one also serves as: a tied embedding is the head too."""
    covers: Coverage = "tokens"
    """What a tensor rank's gradient covers, where ranks hold the same elements; `part` for
    parameters that are used between `LayerSplit.gather_input` and `reduce_output`, where a rank
    computes a part of the layer for all tokens."""
    of_kv_heads: bool = False
    """The split dim counts KV heads: where they are fewer than ranks, neighbouring ranks hold
    the same head."""
    start: Start = "normal"
    """Its initial value."""
    std: float | None = None
    """Standard deviation of an initial value that is drawn from a normal distribution; None: the
    config's."""
    groups: frozenset[Group] = frozenset()
    """What it belongs to: patterns of a recipe choose by it."""
    depth: Depth = Depth.ENTRY
    """Where in its layer the forward meets it: backward ends at the first parameter that trains."""

    @property
    def split_dim(self) -> int | None:
        """The dim along which tensor parallelism may split it; None: never."""
        # Dim 0 of stacked experts counts experts.
        dim = SPLIT_DIM[self.split]
        if dim is None or "expert" not in self.groups:
            return dim
        return dim + 1

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def is_matrix(self) -> bool:
        """A matrix or a stack of them; the biases of stacked experts and the taps of convolutions
        have several dims and are none."""
        return len(self.shape) >= 2 and self.groups.isdisjoint(("bias", "taps"))

    @property
    def keeps_float32(self) -> bool:
        """Always fp32 and, with fsdp, whole on every rank."""
        # A number alone cannot be sharded, and its type changes no other.
        return not self.shape or not self.groups.isdisjoint(WIDE)


Specs = Mapping[str, ParamSpec]
"""Every parameter of a model by its name, in forward order."""


def spec_by_name(name: str, shape: tuple[int, ...], stage: Stage = "first") -> ParamSpec:
    """The spec that follows from a parameter's name, for models without specs of their own: a
    user's, a class of transformers, an aligner."""
    path, _, leaf = name.rpartition(".")
    module = path.rpartition(".")[2]

    groups: set[Group] = set()
    # What is not recognised belongs to no group: patterns of a recipe then see a plain parameter.
    if leaf == "bias":
        groups.add("bias")
    if "norm" in module:
        groups.add("norm")
    if "embed_tokens" in name or name.startswith("lm_head"):
        groups.add("embedding")
    # Modules of headway that another model may reuse: their parameters have headway's names there.
    if EXPERTS in name:
        groups.add("expert")
    if leaf == ROUTER_BIAS:
        groups.add("router_bias")
    if name == SCORE:
        groups.add("score")
    if name.startswith(PROJECTOR):
        groups.add("projector")
    if name.startswith(ALIGNER):
        groups.add("aligner")
    if name == GATES:
        return ParamSpec(name, shape, covers="part", start="gates", groups=in_groups("gates"))

    start: Start = "normal"
    if leaf.endswith("bias"):
        start = "zero"
    elif leaf == "weight" and module.endswith("norm"):
        start = "norm"
    elif leaf == "weight" and "projector" in groups:
        start = "uniform"
    elif leaf == "weight" and module.endswith(("o_proj", "down_proj")):
        start = "residual"
    known_parts = (DEPTH_BY_NAME[part] for part in name.split(".") if part in DEPTH_BY_NAME)
    return ParamSpec(
        name,
        shape,
        stage=stage,
        start=start,
        groups=frozenset(groups),
        depth=next(known_parts, Depth.ENTRY),
    )


def param_specs(config: ModelConfig) -> list[ParamSpec]:
    """Every parameter of the model, in the order the forward meets them."""
    if config.hf_config is not None:
        # Both of these need torch, so they are imported only where they are needed.
        from headway.model.stock.facts import facts_of

        return list(facts_of(config).specs)
    if config.head == "vectors":
        from headway.model.aligner import aligner_specs

        return aligner_specs(config)

    # In the order in which the forward uses them: engines reduce gradients in the reverse order,
    # and gates and media, which are used first, are complete last.
    specs: list[ParamSpec] = []
    if config.head_gates:
        shape = (config.num_layers, config.kv_heads)
        specs.append(
            ParamSpec(GATES, shape, covers="part", start="gates", groups=in_groups("gates"))
        )
    if config.media is not None:
        specs += media_specs(config.media, config.hidden_size)
    if config.vision is not None:
        # Needs torch: the class of transformers says what it has.
        from headway.model.vision import tower_specs

        specs += tower_specs(config.vision)

    table = (config.vocab, config.hidden_size)
    tied = HEAD if config.ties_head else None
    words = in_groups("embedding")
    specs.append(ParamSpec(EMBEDDING, table, "vocab", "first", tied_to=tied, groups=words))
    if config.positions == "learned":
        specs.append(ParamSpec(POSITIONS, (config.max_seq_len, config.hidden_size)))

    for layer in range(config.num_layers):
        specs += _block(config, layer)

    specs += _norm(config, "model.norm", "last")
    if config.score_head:
        score = in_groups("score")
        specs.append(
            ParamSpec(SCORE, (1, config.hidden_size), stage="last", covers="part", groups=score)
        )
    elif not config.tie_embeddings:
        specs.append(ParamSpec(HEAD, table, "vocab", "last", groups=words | in_groups("linear")))
    return specs


def media_specs(media: MediaShape, hidden_size: int) -> list[ParamSpec]:
    """The parameters of media inputs, in the order of the forward; `hidden_size` is the language
    model's."""
    specs: list[ParamSpec] = []
    if media.aligned is not None:
        head = partial(ParamSpec, groups=in_groups("aligner"))
        norm = in_groups("aligner", "norm")
        for media_input in media.inputs:
            prefix = f"{ALIGNER}{media_input.modality}."
            width = media_input.width
            specs += [
                ParamSpec(prefix + "norm.weight", (width,), start="norm", groups=norm),
                ParamSpec(
                    prefix + "norm.bias", (width,), start="zero", groups=norm | in_groups("bias")
                ),
                head(prefix + "fc.weight", (media.aligned, width)),
            ]

    projector = in_groups("projector")
    matrix = partial(ParamSpec, start="uniform", groups=projector)
    bias = partial(ParamSpec, start="zero", groups=projector | in_groups("bias"))
    # A shared projector has the shape that each of the inputs would give it.
    projected = media.inputs[:1] if media.shared else media.inputs
    for media_input in projected:
        name = SHARED if media.shared else media_input.modality
        prefix = f"{PROJECTOR}{name}."
        # One vector per item becomes all its tokens at once; otherwise each vector becomes a token.
        tokens = media_input.tokens if media_input.is_pooled else 1
        outputs = hidden_size * tokens
        specs += [
            ParamSpec(prefix + "missing", (tokens, hidden_size), groups=projector),
            matrix(prefix + "up.weight", (media.hidden, media.aligned or media_input.width)),
            bias(prefix + "up.bias", (media.hidden,)),
            matrix(prefix + "down.weight", (outputs, media.hidden)),
            bias(prefix + "down.bias", (outputs,)),
        ]
    return specs


def _block(config: ModelConfig, layer: int) -> list[ParamSpec]:
    """Of one layer, as `transformer.Block` builds it."""
    prefix = f"model.layers.{layer}."
    before = config.norm_placement != "after"
    after = config.norm_placement != "before"

    specs: list[ParamSpec] = []
    if before:
        specs += _norm(config, prefix + "input_layernorm", layer, Depth.ENTRY)
    specs += mixer_specs(config, prefix, layer)
    if after:
        specs += _norm(config, prefix + "post_self_attn_layernorm", layer, Depth.ATTENTION_END)
    if before and not config.parallel_block:
        specs += _norm(config, prefix + "post_attention_layernorm", layer, Depth.FFN_ENTRY)
    if config.is_mixture(layer):
        specs += _mixture(config, prefix + "mlp.", layer)
    else:
        specs += _feed_forward(config, prefix + "mlp.", layer, config.ffn_size)
    if after:
        specs += _norm(config, prefix + "post_mlp_layernorm", layer, Depth.FFN_END)
    return specs


def mixer_specs(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """The parameters of a layer's attention of any kind, or of its convolution; `prefix` is that of
    the layer."""
    if not config.has_state(layer):
        return attention_specs(config, prefix + "self_attn.", layer)
    if config.linear_attention is not None:
        return linear_attention_specs(config, prefix + "linear_attn.", layer)
    if config.state_space is not None:
        return state_space_specs(config, prefix + "mamba.", layer)
    return short_convolution_specs(config, prefix + "short_conv.", layer)


def short_convolution_specs(
    config: ModelConfig, prefix: str = "", layer: int = 0
) -> list[ParamSpec]:
    """The parameters of a layer's short convolution (gated_convolution.py); a rank has some of its
    channels."""
    short = config.short_convolution
    assert short is not None
    shape = (config.convolved, config.hidden_size)
    linear = _Linear(layer, bias=short.bias)
    taps = ParamSpec(
        prefix + "conv.weight",
        (config.convolved, 1, short.taps),
        "column",
        layer,
        start="uniform",
        groups=in_groups("taps"),
        depth=Depth.CORE,
    )
    specs = [
        *linear.of(prefix + "b_proj", shape, "column", Depth.PROJECTION),
        *linear.of(prefix + "c_proj", shape, "column", Depth.PROJECTION),
        *linear.of(prefix + "x_proj", shape, "column", Depth.PROJECTION),
        taps,
    ]
    if short.bias:
        bias = in_groups("bias")
        specs.append(
            replace(taps, name=prefix + "conv.bias", shape=shape[:1], start="zero", groups=bias)
        )
    return specs + linear.of(prefix + "out_proj", (shape[1], shape[0]), "row", Depth.OUTPUT)


def state_space_specs(config: ModelConfig, prefix: str = "", layer: int = 0) -> list[ParamSpec]:
    """The parameters of a layer's state space (mamba2.py); a rank has some of its heads."""
    space = config.state_space
    assert space is not None
    width = config.hidden_size

    # What one group alone writes and reads serves all heads, so every rank has it whole and uses it
    # for its heads.
    group_split: Split = "replicated" if space.groups == 1 else "column"
    heads = _Linear(layer, unit=space.head_dim, bias=space.bias)
    groups = _Linear(layer, unit=space.state_size, bias=space.bias)
    single = _Linear(layer, bias=space.bias)
    inner = (space.width, width)
    written = (space.group_width, width)
    specs = [
        *heads.of(prefix + "z_proj", inner, "column", Depth.PROJECTION),
        *heads.of(prefix + "x_proj", inner, "column", Depth.PROJECTION),
        *groups.of(prefix + "b_proj", written, group_split, Depth.PROJECTION),
        *groups.of(prefix + "c_proj", written, group_split, Depth.PROJECTION),
        *single.of(prefix + "dt_proj", (space.heads, width), "column", Depth.PROJECTION),
    ]
    of_heads = partial(ParamSpec, shape=(space.heads,), split="column", stage=layer)
    specs += [
        of_heads(prefix + "A_log", start="decay", depth=Depth.INNER_NORM),
        of_heads(prefix + "dt_bias", start="one", depth=Depth.INNER_NORM),
        of_heads(prefix + "D", start="one", depth=Depth.CORE),
    ]

    convolved: tuple[tuple[str, int, Split, int], ...] = (
        ("x_conv", space.width, "column", space.head_dim),
        ("b_conv", space.group_width, group_split, space.state_size),
        ("c_conv", space.group_width, group_split, space.state_size),
    )
    for name, channels, split, unit in convolved:
        taps = ParamSpec(
            f"{prefix}{name}.weight",
            (channels, 1, space.taps),
            split,
            layer,
            unit,
            covers="part",
            start="uniform",
            groups=in_groups("taps"),
            depth=Depth.CORE,
        )
        specs.append(taps)
        if space.conv_bias:
            specs.append(
                replace(
                    taps,
                    name=f"{prefix}{name}.bias",
                    shape=(channels,),
                    start="zero",
                    groups=in_groups("bias"),
                )
            )
    specs.append(
        # Not stored around 0, whatever the other norms of the model do.
        ParamSpec(
            prefix + "norm.weight",
            (space.width,),
            "column",
            layer,
            space.head_dim,
            start="one",
            groups=NORM,
            depth=Depth.CORE,
        )
    )
    return specs + heads.of(prefix + "out_proj", (width, space.width), "row", Depth.OUTPUT)


def linear_attention_specs(
    config: ModelConfig, prefix: str = "", layer: int = 0
) -> list[ParamSpec]:
    """The parameters of a layer's linear attention (delta_net.py); a rank has some of its heads."""
    linear = config.linear_attention
    assert linear is not None
    width = config.hidden_size
    heads = linear.value_heads
    key = linear.key_head_dim
    value = linear.value_head_dim

    keys = _Linear(layer, unit=key)
    values = _Linear(layer, unit=value)
    single = _Linear(layer)
    specs = [
        *keys.of(prefix + "q_proj", (linear.key_width, width), "column", Depth.PROJECTION),
        *keys.of(prefix + "k_proj", (linear.key_width, width), "column", Depth.PROJECTION),
        *values.of(prefix + "v_proj", (linear.value_width, width), "column", Depth.PROJECTION),
        *values.of(prefix + "z_proj", (linear.value_width, width), "column", Depth.PROJECTION),
        *single.of(prefix + "b_proj", (heads, width), "column", Depth.PROJECTION),
        *single.of(prefix + "a_proj", (heads, width), "column", Depth.PROJECTION),
        ParamSpec(
            prefix + "A_log", (heads,), "column", layer, start="decay", depth=Depth.INNER_NORM
        ),
        ParamSpec(
            prefix + "dt_bias", (heads,), "column", layer, start="one", depth=Depth.INNER_NORM
        ),
    ]
    taps = partial(
        ParamSpec,
        split="column",
        stage=layer,
        start="uniform",
        groups=in_groups("taps"),
        depth=Depth.CORE,
    )
    specs += [
        taps(prefix + "q_conv.weight", (linear.key_width, 1, linear.taps), unit=key),
        taps(prefix + "k_conv.weight", (linear.key_width, 1, linear.taps), unit=key),
        taps(prefix + "v_conv.weight", (linear.value_width, 1, linear.taps), unit=value),
        # Not stored around 0, whatever the other norms of the model do.
        replace(_inner_norm(prefix + "norm", value, layer), start="one", depth=Depth.CORE),
    ]
    return specs + values.of(prefix + "out_proj", (width, linear.value_width), "row", Depth.OUTPUT)


def attention_specs(config: ModelConfig, prefix: str = "", layer: int = 0) -> list[ParamSpec]:
    """The parameters of a layer's attention; their names begin with `prefix`."""
    if config.latent_attention is not None:
        return _latent(config, prefix, layer)

    width = config.hidden_size
    head = config.head_size
    queries = config.num_heads * head
    keys = config.kv_heads * head

    specs = list[ParamSpec]()
    inner = _Linear(layer, unit=head, bias=config.qkv_bias)
    specs += inner.of(prefix + "q_proj", (queries, width), "column", Depth.PROJECTION)
    by_keys = partial(inner.of, split="column", depth=Depth.PROJECTION, of_kv_heads=True)
    specs += by_keys(prefix + "k_proj", (keys, width))
    specs += by_keys(prefix + "v_proj", (keys, width))

    if config.qk_norm and config.qk_norm_over == "head":
        # One weight for all heads: every rank has it whole.
        specs.append(_inner_norm(prefix + "q_norm", head, layer))
        specs.append(_inner_norm(prefix + "k_norm", head, layer))
    elif config.qk_norm:
        # A weight per channel of all heads, split with the heads.
        norm = partial(
            ParamSpec,
            split="column",
            stage=layer,
            unit=head,
            start="norm",
            groups=NORM,
            depth=Depth.INNER_NORM,
        )
        specs.append(norm(prefix + "q_norm.weight", (queries,)))
        specs.append(norm(prefix + "k_norm.weight", (keys,), of_kv_heads=True))

    if config.attention_sinks:
        specs.append(
            ParamSpec(prefix + "sinks", (config.num_heads,), "column", layer, depth=Depth.CORE)
        )

    if config.attention_gate:
        specs += inner.of(prefix + "o_gate", (queries, width), "column", Depth.OUTPUT)
    outer = _Linear(layer, unit=head, bias=config.output_bias)
    return specs + outer.of(prefix + "o_proj", (width, queries), "row", Depth.OUTPUT)


def attention_weights(config: ModelConfig, layer: int) -> int:
    """Elements of the matrices of one layer's attention."""
    return sum(spec.size for spec in mixer_specs(config, "", layer) if spec.is_matrix)


def _latent(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """Of multi-head latent attention (latent_attention.py)."""
    latent = config.latent_attention
    assert latent is not None
    width = config.hidden_size
    heads = config.num_heads
    head = latent.head_size
    value = latent.value_head_dim

    specs = list[ParamSpec]()
    # Latents have no heads to split: these are whole on every rank, and each uses them for its
    # heads.
    shared = _Linear(layer, bias=config.qkv_bias)
    by_head = _Linear(layer, unit=head)
    if latent.q_rank is None:
        specs += by_head.of(prefix + "q_proj", (heads * head, width), "column", Depth.PROJECTION)
    else:
        specs += shared.of(
            prefix + "q_a_proj", (latent.q_rank, width), "replicated", Depth.PROJECTION
        )
        specs.append(_inner_norm(prefix + "q_a_layernorm", latent.q_rank, layer))
        specs += by_head.of(
            prefix + "q_b_proj", (heads * head, latent.q_rank), "column", Depth.EXPANSION
        )

    specs += shared.of(
        prefix + "kv_a_proj_with_mqa", (latent.stored_size, width), "replicated", Depth.PROJECTION
    )
    specs.append(_inner_norm(prefix + "kv_a_layernorm", latent.kv_rank, layer))
    key_and_value = latent.nope_head_dim + value
    expanded = _Linear(layer, unit=key_and_value)
    specs += expanded.of(
        prefix + "kv_b_proj", (heads * key_and_value, latent.kv_rank), "column", Depth.EXPANSION
    )

    outer = _Linear(layer, unit=value, bias=config.output_bias)
    return specs + outer.of(prefix + "o_proj", (width, heads * value), "row", Depth.OUTPUT)


def _feed_forward(config: ModelConfig, prefix: str, layer: int, ffn: int) -> list[ParamSpec]:
    """`ffn`: its inner width."""
    width = config.hidden_size
    inputs = ("gate_proj", "up_proj") if config.ffn_gate else ("up_proj",)

    specs = list[ParamSpec]()
    linear = _Linear(layer, bias=config.ffn_bias)
    for name in inputs:
        specs += linear.of(prefix + name, (ffn, width), "column", Depth.FFN_INPUT)
    return specs + linear.of(prefix + "down_proj", (width, ffn), "row", Depth.FFN_OUTPUT)


def _mixture(config: ModelConfig, prefix: str, layer: int) -> list[ParamSpec]:
    """Router, stacked experts and the shared expert of a mixture."""
    assert config.experts is not None
    num = config.experts.num
    width = config.hidden_size
    ffn = config.expert_size

    # A rank has a part of every expert, so the gradient of its router is that of these parts.
    router = partial(ParamSpec, stage=layer, covers="part", depth=Depth.FFN_INPUT)
    specs = [router(prefix + "gate.weight", (num, width))]
    if config.experts.router_bias:
        specs.append(router(prefix + "gate.bias", (num,), start="zero", groups=in_groups("bias")))
    if config.experts.bias_rate is not None:
        balancing = in_groups("router_bias")
        specs.append(router(f"{prefix}gate.{ROUTER_BIAS}", (num,), start="zero", groups=balancing))

    linear = _Linear(layer, bias=config.experts.bias, groups=in_groups("expert"))
    for name in ("gate_proj", "up_proj"):
        specs += linear.of(f"{prefix}experts.{name}", (num, ffn, width), "column", Depth.FFN_INPUT)
    specs += linear.of(prefix + "experts.down_proj", (num, width, ffn), "row", Depth.FFN_OUTPUT)

    shared = config.experts.shared_ffn_size
    if shared:
        specs += _feed_forward(config, prefix + "shared_experts.", layer, shared)
    if config.experts.shared_gate:
        specs.append(router(prefix + "shared_gate.weight", (1, width)))
    return specs


def _norm(
    config: ModelConfig, name: str, stage: Stage, depth: Depth = Depth.ENTRY
) -> list[ParamSpec]:
    """A norm of the stream."""
    # The stream has all channels on every rank, so its norms are whole; with parallel.sequence a
    # rank's gradient covers its tokens (the default of `covers`).
    shape = (config.hidden_size,)
    norm = partial(ParamSpec, shape=shape, stage=stage, depth=depth)
    specs = [norm(name + ".weight", start="norm", groups=NORM)]
    if config.norm == "layernorm":
        specs.append(norm(name + ".bias", start="zero", groups=NORM | in_groups("bias")))
    return specs


def _inner_norm(name: str, size: int, layer: int) -> ParamSpec:
    """A norm inside of attention that all ranks have whole.

    Each uses it for its heads, so its gradient covers a part.
    """
    return ParamSpec(
        name + ".weight",
        (size,),
        stage=layer,
        covers="part",
        start="norm",
        groups=NORM,
        depth=Depth.INNER_NORM,
    )


@dataclass(frozen=True)
class _Linear:
    """What several linears of a layer have in common."""

    stage: Stage
    unit: int = 1
    bias: bool = False
    groups: frozenset[Group] = frozenset()

    def of(
        self,
        name: str,
        shape: tuple[int, ...],
        split: Split,
        depth: Depth,
        *,
        of_kv_heads: bool = False,
    ) -> list[ParamSpec]:
        """The weight of a linear, and its bias."""
        weight = ParamSpec(
            name + ".weight",
            shape,
            split,
            self.stage,
            self.unit,
            covers="part",
            of_kv_heads=of_kv_heads,
            # Row-split matrices are those whose output is added to the stream.
            start="residual" if split == "row" else "normal",
            groups=self.groups | in_groups("linear"),
            depth=depth,
        )
        if not self.bias:
            return [weight]
        bias = replace(
            weight,
            name=name + ".bias",
            shape=shape[:-1],
            start="zero",
            groups=self.groups | in_groups("bias"),
        )
        if split != "column":
            # The bias of a row-split projection is added once, after the sum over ranks.
            bias = replace(bias, split="replicated", unit=1)
        return [weight, bias]


def num_parameters(config: ModelConfig) -> int:
    """All parameters, a tied matrix counted once."""
    return sum(spec.size for spec in param_specs(config))


def active_share(config: ModelConfig, spec: ParamSpec) -> float:
    """The part of a parameter that one token passes: a few of stacked experts, all of everything
    else."""
    if "expert" not in spec.groups:
        return 1.0
    if config.hf_config is not None:
        from headway.model.stock.facts import facts_of

        per_token = facts_of(config).experts_per_token
        is_stacked = len(spec.shape) >= STACKED
        if per_token is None or not is_stacked:
            return 1.0
        return min(1.0, per_token / spec.shape[0])
    if config.experts is None:
        return 1.0
    return config.experts.per_token / config.experts.num


def active_parameters(config: ModelConfig) -> int:
    """The parameters that one token passes, a tied matrix counted once."""
    return round(sum(spec.size * active_share(config, spec) for spec in param_specs(config)))
