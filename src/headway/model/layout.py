"""How the parameters of a Transformer may be sharded, as data: a config comes in, one `ParamSpec` per parameter goes out, in forward order.

    split        dim    parameters
    column        0     q, k, v, q_b, kv_b, gate, up and their biases, norms over all heads, sinks: each rank computes some of the outputs
    row           1     o, down: each rank sums over some of the inputs
    (of experts, [experts, out, in] and biases [experts, out], each dim is one higher: a rank has a part of every expert)
    vocab         0     embedding and head: each rank has some of the tokens
    replicated    -     norms, routers, q_a, kv_a, the score head, biases added after a sum, everything of media inputs

Imports without torch; only the class of a wrapped model (family transformers) is asked for its own.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from headway.model.config import ModelConfig

Split = Literal["column", "row", "vocab", "replicated"]
Stage = int | Literal["first", "last"]

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
"""Part of the name of every parameter that is stacked over experts, along dim 0."""
ROUTER_BIAS = "e_score_correction_bias"
"""Last part of the name of the bias by which a router balances experts without a loss; fp32 and whole on every rank, never trained."""
SPLIT_DIM: dict[Split, int | None] = {"column": 0, "row": 1, "vocab": 0, "replicated": None}


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Global shape, however it is sharded."""
    split: Split = "replicated"
    """How tensor parallelism may split it."""
    stage: Stage = "first"
    """Its layer, for pipeline stages; `first` goes with the embedding, `last` with the final norm and head."""
    unit: int = 1
    """A shard along the split dim is a multiple of this: heads stay whole."""
    tied_to: str | None = None
    """The parameter this one also serves as: a tied embedding is the head too."""

    @property
    def split_dim(self) -> int | None:
        """The dim along which it may be split."""
        dim = SPLIT_DIM[self.split]
        return dim + 1 if dim is not None and EXPERTS in self.name else dim

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def param_specs(config: ModelConfig) -> list[ParamSpec]:
    """Every parameter of the model, in the order the forward meets them."""
    if config.hf_config is not None:
        from headway.model.stock.facts import facts_of  # a class of transformers says it itself

        return list(facts_of(config).specs)
    tied = HEAD if config.ties_head else None
    specs = (
        [ParamSpec(GATES, (config.num_layers, config.kv_heads), "replicated", "first")]
        if config.head_gates
        else []
    )
    media = {} if config.media is None else config.media.parameters(config.hidden_size)
    specs += [ParamSpec(name, shape, "replicated", "first") for name, shape in media.items()]
    specs += [
        ParamSpec(EMBEDDING, (config.vocab, config.hidden_size), "vocab", "first", tied_to=tied)
    ]
    if config.positions == "learned":
        specs.append(
            ParamSpec(POSITIONS, (config.max_seq_len, config.hidden_size), "replicated", "first")
        )
    for layer in range(config.num_layers):
        specs += _block(config, layer)
    specs += _norm(config, "model.norm", "last")
    if config.score_head:
        specs.append(ParamSpec(SCORE, (1, config.hidden_size), "replicated", "last"))
    elif not config.tie_embeddings:
        specs.append(ParamSpec(HEAD, (config.vocab, config.hidden_size), "vocab", "last"))
    return specs


def _block(config: ModelConfig, layer: int) -> list[ParamSpec]:
    at, ffn = f"model.layers.{layer}.", config.ffn_size
    before, after = config.norm_placement != "after", config.norm_placement != "before"
    specs = _norm(config, at + "input_layernorm", layer) if before else []
    specs += attention_specs(config, at + "self_attn.", layer)
    specs += _norm(config, at + "post_self_attn_layernorm", layer) if after else []
    specs += (
        _norm(config, at + "post_attention_layernorm", layer)
        if before and not config.parallel_block
        else []
    )
    specs += (_mixture if config.is_mixture(layer) else _feed_forward)(
        config, at + "mlp.", layer, ffn
    )
    return specs + (_norm(config, at + "post_mlp_layernorm", layer) if after else [])


def attention_specs(config: ModelConfig, at: str = "", layer: int = 0) -> list[ParamSpec]:
    """The parameters of a layer's attention, with names behind `at`."""
    if config.latent_attention is not None:
        return _latent(config, at, layer)
    width, head, specs = config.hidden_size, config.head_size, list[ParamSpec]()
    queries, keys = config.num_heads * head, config.kv_heads * head
    for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        specs += _linear(
            at + name, (outputs, width), "column", layer, bias=config.qkv_bias, unit=head
        )
    if config.qk_norm:
        for name, size in (("q_norm", queries), ("k_norm", keys)):
            by_head = config.qk_norm_over == "head"
            shape, split, unit = (
                ((head,), "replicated", 1) if by_head else ((size,), "column", head)
            )
            specs.append(ParamSpec(f"{at}{name}.weight", shape, split, layer, unit))
    if config.attention_sinks:
        specs.append(ParamSpec(at + "sinks", (config.num_heads,), "column", layer))
    return specs + _linear(
        at + "o_proj", (width, queries), "row", layer, bias=config.output_bias, unit=head
    )


def attention_weights(config: ModelConfig) -> int:
    """Elements of the matrices of one layer's attention."""
    return sum(spec.size for spec in attention_specs(config) if len(spec.shape) > 1)


def _latent(config: ModelConfig, at: str, layer: int) -> list[ParamSpec]:
    latent, width, heads, bias = (
        config.latent_attention,
        config.hidden_size,
        config.num_heads,
        config.qkv_bias,
    )
    assert latent is not None
    head, value, specs = latent.head_size, latent.value_head_dim, list[ParamSpec]()
    if latent.q_rank is None:
        specs += _linear(
            at + "q_proj", (heads * head, width), "column", layer, bias=False, unit=head
        )
    else:
        specs += _linear(at + "q_a_proj", (latent.q_rank, width), "replicated", layer, bias=bias)
        specs.append(ParamSpec(at + "q_a_layernorm.weight", (latent.q_rank,), "replicated", layer))
        specs += _linear(
            at + "q_b_proj", (heads * head, latent.q_rank), "column", layer, bias=False, unit=head
        )
    specs += _linear(
        at + "kv_a_proj_with_mqa", (latent.stored_size, width), "replicated", layer, bias=bias
    )
    specs.append(ParamSpec(at + "kv_a_layernorm.weight", (latent.kv_rank,), "replicated", layer))
    each = latent.nope_head_dim + value
    specs += _linear(
        at + "kv_b_proj", (heads * each, latent.kv_rank), "column", layer, bias=False, unit=each
    )
    return specs + _linear(
        at + "o_proj", (width, heads * value), "row", layer, bias=config.output_bias, unit=value
    )


def _feed_forward(config: ModelConfig, at: str, layer: int, ffn: int) -> list[ParamSpec]:
    width, specs = config.hidden_size, list[ParamSpec]()
    for name in ("gate_proj", "up_proj") if config.ffn_gate else ("up_proj",):
        specs += _linear(at + name, (ffn, width), "column", layer, bias=config.ffn_bias)
    return specs + _linear(at + "down_proj", (width, ffn), "row", layer, bias=config.ffn_bias)


def _mixture(config: ModelConfig, at: str, layer: int, _ffn: int) -> list[ParamSpec]:
    assert config.experts is not None
    num, width, ffn = config.experts.num, config.hidden_size, config.expert_size
    specs = [ParamSpec(at + "gate.weight", (num, width), "replicated", layer)]
    if config.experts.router_bias:
        specs.append(ParamSpec(at + "gate.bias", (num,), "replicated", layer))
    if config.experts.bias_rate is not None:
        specs.append(ParamSpec(f"{at}gate.{ROUTER_BIAS}", (num,), "replicated", layer))
    bias = config.experts.bias
    for name in ("gate_proj", "up_proj"):
        specs += _linear(f"{at}experts.{name}", (num, ffn, width), "column", layer, bias=bias)
    specs += _linear(at + "experts.down_proj", (num, width, ffn), "row", layer, bias=bias)
    shared = config.experts.shared_ffn_size
    return specs + (_feed_forward(config, at + "shared_experts.", layer, shared) if shared else [])


def _norm(config: ModelConfig, name: str, stage: Stage) -> list[ParamSpec]:
    parts = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return [
        ParamSpec(f"{name}.{part}", (config.hidden_size,), "replicated", stage) for part in parts
    ]


def _linear(
    name: str, shape: tuple[int, ...], split: Split, stage: Stage, *, bias: bool, unit: int = 1
) -> list[ParamSpec]:
    specs = [ParamSpec(name + ".weight", shape, split, stage, unit)]
    if bias:
        # The bias of a row-split projection is added once, after the sum over ranks.
        column = split == "column"
        specs.append(
            ParamSpec(
                name + ".bias",
                shape[:-1],
                split if column else "replicated",
                stage,
                unit if column else 1,
            )
        )
    return specs


def num_parameters(config: ModelConfig) -> int:
    """All parameters, a tied matrix counted once."""
    return sum(spec.size for spec in param_specs(config))


def active_share(config: ModelConfig, name: str) -> float:
    """The part of a parameter that one token passes: a few of stacked experts, all of everything else."""
    return (
        1.0
        if config.experts is None or EXPERTS not in name
        else config.experts.per_token / config.experts.num
    )


def active_parameters(config: ModelConfig) -> int:
    """The parameters that one token passes, a tied matrix counted once."""
    return round(sum(spec.size * active_share(config, spec.name) for spec in param_specs(config)))
