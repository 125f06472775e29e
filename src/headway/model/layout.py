"""How the parameters of a model may be cut, as data: a config comes in, one `ParamSpec` per parameter goes out, in forward order.

    cut          dim    which
    column        0     q, k, v, gate, up and their biases: each rank makes some of the outputs
    row           1     o, down: each rank sums over some of the inputs
    vocab         0     embedding and head: each rank holds some of the words
    replicated    -     norms, biases added after a sum

Imports without torch.
"""

from dataclasses import dataclass
from math import prod
from typing import Literal

from headway.model.config import ModelConfig

Cut = Literal["column", "row", "vocab", "replicated"]
Group = Literal["decay", "no_decay"]
Stage = int | Literal["first", "last"]

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
GATES = "head_gates.log_alpha"
"""Gates stay whole and fp32 on every rank, whatever the weights are."""
DECIDED = 10.0
"""log_alpha of a gate that is decided: +10 full, -10 streaming."""
CUT_DIM: dict[Cut, int | None] = {"column": 0, "row": 1, "vocab": 0, "replicated": None}


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    """Global shape, whatever is cut."""
    cut: Cut
    """How tensor parallelism may split it."""
    stage: Stage
    """The number of its layer; `first` goes with the embedding, `last` with the final norm and head."""
    group: Group
    """Matrices decay; norms and biases do not."""
    unit: int = 1
    """A piece along the cut dim is a multiple of this: heads stay whole."""
    tied_to: str | None = None
    """The name of the job this parameter also does: a tied embedding is the head too."""

    @property
    def cut_dim(self) -> int | None:
        """The dim that `cut` splits."""
        return CUT_DIM[self.cut]

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def param_specs(config: ModelConfig) -> list[ParamSpec]:
    """Every parameter of the model, in the order the forward meets them."""
    tied = HEAD if config.tie_embeddings else None
    specs = [ParamSpec(GATES, (config.num_layers, config.kv_heads), "replicated", "first", "no_decay")] if config.head_gates else []
    specs += [ParamSpec(EMBEDDING, (config.vocab, config.hidden_size), "vocab", "first", "decay", tied_to=tied)]
    for layer in range(config.num_layers):
        specs += _block(config, layer)
    specs += _norm(config, "model.norm", "last")
    if not config.tie_embeddings:
        specs.append(ParamSpec(HEAD, (config.vocab, config.hidden_size), "vocab", "last", "decay"))
    return specs


def _block(config: ModelConfig, layer: int) -> list[ParamSpec]:
    at, width, head, ffn = f"model.layers.{layer}.", config.hidden_size, config.head_size, config.ffn_size
    queries, keys = config.num_heads * head, config.kv_heads * head
    specs = _norm(config, at + "input_layernorm", layer)
    for name, outputs in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        specs += _linear(f"{at}self_attn.{name}", (outputs, width), "column", layer, bias=config.qkv_bias, unit=head)
    if config.qk_norm:
        for name in ("q_norm", "k_norm"):
            specs.append(ParamSpec(f"{at}self_attn.{name}.weight", (head,), "replicated", layer, "no_decay"))
    specs += _linear(at + "self_attn.o_proj", (width, queries), "row", layer, bias=config.output_bias, unit=head)
    specs += _norm(config, at + "post_attention_layernorm", layer)
    for name in ("gate_proj", "up_proj"):
        specs += _linear(f"{at}mlp.{name}", (ffn, width), "column", layer, bias=config.ffn_bias)
    return specs + _linear(at + "mlp.down_proj", (width, ffn), "row", layer, bias=config.ffn_bias)


def _norm(config: ModelConfig, name: str, stage: Stage) -> list[ParamSpec]:
    parts = ("weight", "bias") if config.norm == "layernorm" else ("weight",)
    return [ParamSpec(f"{name}.{part}", (config.hidden_size,), "replicated", stage, "no_decay") for part in parts]


def _linear(name: str, shape: tuple[int, int], cut: Cut, stage: Stage, *, bias: bool, unit: int = 1) -> list[ParamSpec]:
    specs = [ParamSpec(name + ".weight", shape, cut, stage, "decay", unit)]
    if bias:
        # The bias of a row-cut projection is added once, after the sum over ranks.
        column = cut == "column"
        specs.append(ParamSpec(name + ".bias", shape[:1], cut if column else "replicated", stage, "no_decay", unit if column else 1))
    return specs


def num_parameters(config: ModelConfig) -> int:
    """All parameters, a tied matrix counted once."""
    return sum(spec.size for spec in param_specs(config))
