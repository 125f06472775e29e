"""What llama.cpp calls our models: a family has an architecture, a parameter has a tensor name, and
tensors of some architectures have another order of rows, are joined, or are shifted by one.

    permuted   llama.cpp rotates neighbouring rows of a head where headway (as Hugging Face) rotates
               the two halves. q and k are stored in that order: `permuted`, `unpermuted`
    joins      one tensor holds the rows of several of ours, in this order
    shifted    norms multiply by 1 + weight here and by the stored weight there

An architecture of llama.cpp is code with few switches. `form` has what that code always does,
`free` the settings that it reads from metadata; any other setting must have the value that changes
nothing. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headway.model.config import ModelConfig
from headway.model.families._config_json import NEUTRAL
from headway.model.layout import EMBEDDING, HEAD, POSITIONS, ParamSpec, param_specs

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
BOTH_NORMS: Mapping[str, str] = {
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
"""Names of norms behind attention and feed-forward."""
NORM_BEFORE_FFN: Mapping[str, str] = {"post_attention_layernorm": "post_attention_norm"}
"""The name of the norm before the feed-forward, in architectures that call it after its place."""
GEMMA: Mapping[str, Any] = {
    "norm": "rmsnorm1p",
    "norm_placement": "both",
    "activation": "gelu_tanh",
}
OF_EXPERTS = {"softmax": 1, "sigmoid": 2}
"""Values of expert_gating_func."""


@dataclass(frozen=True)
class GgufExperts:
    """How an architecture computes mixtures; settings of ExpertsConfig that it fixes."""

    form: Mapping[str, Any]
    """Settings that its code always has; ... = any."""
    free: frozenset[str] = frozenset()
    """Settings that its metadata has."""
    own_length: bool = True
    """The width of an expert has a key of its own; else it is feed_forward_length."""


@dataclass(frozen=True)
class GgufArchitecture:
    """One value of `general.architecture` that headway writes and reads."""

    name: str
    family: str
    """The family that a file of this architecture is read as."""
    permuted: bool = False
    """Rows of q and k are stored in pairs."""
    output_bias: bool = False
    """It knows biases on the attention output and in the feed-forward layer."""
    any_head_size: bool = True
    """The heads together may be wider than the model."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that differ from PARTS."""
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Name of a joined tensor -> our modules whose rows it holds."""
    form: Mapping[str, Any] = field(default_factory=dict)
    """Settings that its code always has."""
    free: Mapping[str, str] = field(default_factory=dict)
    """Settings that its metadata has -> their keys, as floats."""
    inverse: frozenset[str] = frozenset()
    """Of those, the ones stored as 1 / value."""
    windows: bool = False
    """It has sliding windows, in the layers that its metadata lists."""
    period: int = 0
    """Where its metadata lists none: every `period`-th layer is full."""
    partial: bool = False
    """It may rotate a part of a head."""
    ties: bool | None = None
    """Whether the head is always, or never, the embedding; None: either."""
    scalings: frozenset[str] = frozenset(("linear", "yarn"))
    """Kinds of rotary scaling that it computes."""
    experts: GgufExperts | None = None

    @property
    def shifted(self) -> bool:
        """Norms are stored as 1 + weight."""
        return self.form.get("norm") == "rmsnorm1p"


NO_GROUPS: dict[str, Any] = {
    "num_groups": 1,
    "router_bias": False,
    "bias": False,
    "swiglu_limit": None,
    "shared_gate": False,
}
PLAIN_EXPERTS: dict[str, Any] = {
    **NO_GROUPS,
    "router": "softmax",
    "shared_ffn_size": 0,
    "bias_rate": None,
    "routed_scale": 1.0,
    "first_dense": 0,
    "every": 1,
}
ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        GgufArchitecture(
            "llama",
            "llama",
            permuted=True,
            output_bias=True,
            scalings=frozenset(("linear", "yarn", "llama3")),
            experts=GgufExperts({**PLAIN_EXPERTS, "normalize": True}, own_length=False),
        ),
        GgufArchitecture("qwen2", "qwen2", any_head_size=False),
        GgufArchitecture("qwen3", "qwen3", form={"qk_norm": True}),
        GgufArchitecture("smollm3", "smollm3", permuted=True),
        GgufArchitecture(
            "qwen2moe",
            "qwen2_moe",
            any_head_size=False,
            ties=False,
            experts=GgufExperts(
                {**PLAIN_EXPERTS, "normalize": False, "shared_gate": True, "shared_ffn_size": ...},
                frozenset(("shared_ffn_size",)),
            ),
        ),
        GgufArchitecture(
            "qwen3moe",
            "qwen3_moe",
            form={"qk_norm": True},
            experts=GgufExperts({**PLAIN_EXPERTS, "normalize": True}),
        ),
        GgufArchitecture(
            "olmoe",
            "olmoe",
            any_head_size=False,
            form={"qk_norm": True, "qk_norm_over": "projection"},
            experts=GgufExperts({**PLAIN_EXPERTS, "normalize": False}, own_length=False),
        ),
        GgufArchitecture(
            "gemma2",
            "gemma2",
            names=BOTH_NORMS,
            form=GEMMA,
            free={
                "attention_softcap": "attn_logit_softcapping",
                "logit_softcap": "final_logit_softcapping",
            },
            windows=True,
            period=2,
            ties=True,
        ),
        GgufArchitecture(
            "gemma3",
            "gemma3",
            names=BOTH_NORMS,
            form={**GEMMA, "qk_norm": True},
            free={"rope_local_theta": "rope.freq_base_swa"},
            windows=True,
            period=6,
        ),
        GgufArchitecture(
            "olmo2",
            "olmo3",
            any_head_size=False,
            names=BOTH_NORMS,
            form={"norm_placement": "after", "qk_norm": True, "qk_norm_over": "projection"},
            windows=True,
            period=4,
            ties=False,
        ),
        GgufArchitecture(
            "granite",
            "granite",
            permuted=True,
            output_bias=True,
            any_head_size=False,
            free={
                "embed_scale": "embedding_scale",
                "residual_scale": "residual_scale",
                "attention_scale": "attention.scale",
                "logit_scale": "logit_scale",
            },
            inverse=frozenset(("logit_scale",)),
        ),
        GgufArchitecture(
            "glm4",
            "glm4",
            names=BOTH_NORMS,
            joins={"ffn_up": GATE_UP},
            form={"norm_placement": "both", "rope_interleaved": True},
            partial=True,
        ),
        GgufArchitecture(
            "phi3",
            "phi3",
            any_head_size=False,
            joins={"attn_qkv": QKV, "ffn_up": GATE_UP},
            partial=True,
        ),
        GgufArchitecture(
            "cohere2",
            "cohere2",
            any_head_size=False,
            form={"norm": "layernorm_no_bias", "parallel_block": True, "rope_interleaved": True},
            free={"logit_scale": "logit_scale"},
            windows=True,
            period=4,
            ties=True,
        ),
        GgufArchitecture(
            "gpt2",
            "gpt2",
            output_bias=True,
            any_head_size=False,
            joins={"attn_qkv": QKV},
            form={
                "norm": "layernorm",
                "positions": "learned",
                "ffn_gate": False,
                "activation": "gelu_tanh",
                "qkv_bias": True,
                "output_bias": True,
                "ffn_bias": True,
            },
        ),
        GgufArchitecture("seed_oss", "seed_oss", names=NORM_BEFORE_FFN),
        GgufArchitecture("ernie4_5", "ernie4_5", form={"rope_interleaved": True}),
        GgufArchitecture(
            "ernie4_5-moe",
            "ernie4_5_moe",
            form={"rope_interleaved": True},
            experts=GgufExperts(
                {**NO_GROUPS, "router": "softmax", "normalize": True, "routed_scale": 1.0,
                 "every": 1, "bias_rate": 0.0},
                frozenset(("shared_ffn_size", "first_dense")),
            ),
        ),
        GgufArchitecture(
            "mistral3",
            "ministral3",
            permuted=True,
            scalings=frozenset(("yarn",)),
        ),
        GgufArchitecture(
            "glm4moe",
            "glm4_moe",
            names=NORM_BEFORE_FFN,
            partial=True,
            form={"qk_norm": ...},
            experts=GgufExperts(
                {**NO_GROUPS, "router": "sigmoid", "every": 1, "bias_rate": 0.0},
                frozenset(("shared_ffn_size", "first_dense", "routed_scale", "normalize")),
            ),
        ),
        GgufArchitecture(
            "minimax-m2",
            "minimax_m2",
            partial=True,
            ties=False,
            form={"qk_norm": True, "qk_norm_over": "projection"},
            experts=GgufExperts(
                {**PLAIN_EXPERTS, "router": "sigmoid", "normalize": True, "bias_rate": 0.0},
                own_length=False,
            ),
        ),
    )
}  # fmt: skip
ARCHITECTURE_OF = {architecture.family: name for name, architecture in ARCHITECTURES.items()}
ARCHITECTURE_OF |= {"mistral": "llama", "mixtral": "llama", "olmo2": "olmo2"}
"""Family of a Hugging Face export -> its architecture."""
SMOLLM3_STEP = 4
"""llama.cpp leaves every fourth layer of a smollm3 without rotation, whatever the file says."""
LARGEST_GEMMAS = {"gemma2": 46, "gemma3": 62}
"""Layers of the models whose scores llama.cpp divides by the root of hidden_size / num_heads."""
ROPE_FACTORS = "rope_freqs.weight"
"""What each frequency is divided by, for the scaling of Llama 3."""
OUTSIDE_BLOCKS = {
    EMBEDDING: "token_embd.weight",
    POSITIONS: "position_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    HEAD: "output.weight",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_gate": "ffn_gate_inp_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
WHOLE_NAMES = {"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"}
"""Tensors whose name has no `weight` or `bias` at its end here."""
IN_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
ROTATED = re.compile(r"\.self_attn\.([qk])_proj\.(weight|bias)$")


@dataclass(frozen=True)
class GgufPart:
    """A tensor of a file, and our parameters whose rows it holds."""

    name: str
    specs: tuple[ParamSpec, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape as torch has it: the rows first."""
        rows = sum(spec.shape[0] for spec in self.specs)
        return (rows, *self.specs[0].shape[1:])


def gguf_parts(config: ModelConfig, architecture: GgufArchitecture) -> list[GgufPart]:
    """Every tensor of a file, in the order of the last of our parameters that it holds."""
    joined: dict[str, list[ParamSpec]] = {}
    parts: list[GgufPart] = []
    for spec in param_specs(config):
        name = gguf_name(spec.name, architecture)
        specs = joined.setdefault(name, [])
        specs.append(spec)
        if len(specs) == num_joined(name, architecture):
            parts.append(GgufPart(name, tuple(specs)))
    return parts


def num_joined(name: str, architecture: GgufArchitecture) -> int:
    """How many of our parameters a tensor holds."""
    pieces = name.split(".")
    if len(pieces) < 3:
        return 1
    return len(architecture.joins.get(pieces[2], ("itself",)))


def gguf_name(name: str, architecture: GgufArchitecture = ARCHITECTURES["llama"]) -> str:
    """llama.cpp's name of the tensor that holds one of our parameters."""
    if name in OUTSIDE_BLOCKS:
        return OUTSIDE_BLOCKS[name]
    match = IN_LAYER.fullmatch(name)
    if match is not None and match.group(2) in WHOLE_NAMES:
        return f"blk.{match.group(1)}.{WHOLE_NAMES[match.group(2)]}"

    match = IN_BLOCK.fullmatch(name)
    assert match is not None, f"{name} has no name in GGUF"
    layer, part, leaf = match.groups()
    for joined, modules in architecture.joins.items():
        if part in modules:
            return f"blk.{layer}.{joined}.{leaf}"
    theirs = architecture.names.get(part, PARTS.get(part))
    assert theirs is not None, f"{name} has no name in GGUF"
    return f"blk.{layer}.{theirs}.{leaf}"


def stored_value(architecture: GgufArchitecture, config: ModelConfig, name: str, value: Any) -> Any:
    """One of our parameters as a file holds it."""
    if architecture.permuted:
        value = permuted(name, value, config.num_heads, config.kv_heads)
    if architecture.shifted and name.endswith("norm.weight"):
        value = value.float() + 1.0
    return value


def read_value(architecture: GgufArchitecture, config: ModelConfig, name: str, value: Any) -> Any:
    """One of our parameters, of what a file holds: the inverse of `stored_value`."""
    if architecture.permuted:
        value = unpermuted(name, value, config.num_heads, config.kv_heads)
    if architecture.shifted and name.endswith("norm.weight"):
        value = value.float() - 1.0
    return value


def assumed(config: ModelConfig, architecture: GgufArchitecture) -> dict[str, Any]:
    """Settings that a model must have so that the architecture computes it."""
    layers = range(config.num_layers)
    unrotated: tuple[int, ...] = ()
    if architecture.name == "smollm3":
        unrotated = tuple(range(SMOLLM3_STEP - 1, config.num_layers, SMOLLM3_STEP))
    if architecture.name == "cohere2":
        # Layers without a window do not rotate.
        unrotated = tuple(layer for layer in layers if config.window_of(layer) is None)
    needed: dict[str, Any] = {**NEUTRAL, "qk_norm": False, "no_rope_layers": unrotated}
    if not architecture.output_bias:
        needed |= {"output_bias": False, "ffn_bias": False}
    needed |= architecture.form
    if architecture.form.get("norm") == "rmsnorm1p":
        needed["embed_scale"] = config.hidden_size**0.5
        if LARGEST_GEMMAS[architecture.name] == config.num_layers:
            needed["attention_scale"] = (config.hidden_size / config.num_heads) ** -0.5
    if architecture.name == "olmo2" and config.rope_local_theta == config.rope_theta:
        # Windowed layers are not scaled there either.
        del needed["rope_local_theta"]
    for key in (*architecture.free, *(("rotary_fraction",) if architecture.partial else ())):
        needed.pop(key, None)
    needed.pop("experts")
    return {key: value for key, value in needed.items() if value is not ...}


def permuted(name: str, value: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A q or k projection with its rows in pairs; any other tensor unchanged."""
    return _reordered(name, value, num_heads, num_kv_heads, halves_first=True)


def unpermuted(name: str, value: Any, num_heads: int, num_kv_heads: int) -> Any:
    """A q or k projection with its rows in halves again; any other tensor unchanged."""
    return _reordered(name, value, num_heads, num_kv_heads, halves_first=False)


def _reordered(
    name: str, value: Any, num_heads: int, num_kv_heads: int, *, halves_first: bool
) -> Any:
    """Rows [heads, 2, half] swapped to [heads, half, 2], or back."""
    match = ROTATED.search(name)
    if match is None:
        return value
    # Biases have rows too, and are reordered with them.
    heads = num_heads if match.group(1) == "q" else num_kv_heads
    half = value.shape[0] // heads // 2
    if halves_first:
        shape = (heads, 2, half)
    else:
        shape = (heads, half, 2)
    return value.reshape(*shape, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
