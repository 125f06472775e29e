"""The `model` section of a recipe: the shape of a Transformer, which covers every family.

Keys of a family's config.json become these settings (model/families), and every other part of
headway reads them: layers are built from them, parameters laid out, FLOPs and bytes counted.
Defaults are neutral: a setting that a family does not have changes nothing. Imports without torch.
"""

from math import prod
from typing import Any, Literal, NamedTuple

from pydantic import field_validator, model_validator

from headway.config.section import Section, setting
from headway.model.aligner_config import AlignerConfig
from headway.model.experts_config import ExpertsConfig
from headway.model.media_shape import MediaShape
from headway.model.presets import EMBED_SCALE_BY_WIDTH, FORMS, PRESETS
from headway.model.rope_config import RopeScaling
from headway.model.vision_shape import VisionShape

DEFAULT_HIDDEN_SIZE = 256
MAX_ELEMENTS = 1 << 40
"""Of one matrix. More is a typing error, and overflows where torch counts bytes."""
MAX_HEAD_DIM = 65_536
"""Of one head, many times what any kernel takes."""
FULL_EVERY = 4
"""Every n-th layer of a model with linear attention has softmax attention, where no list says it."""
MAX_LAYERS = 10_000
"""More is a typing error too: `plan` and the check of this section go through all layers."""

Head = Literal["tokens", "scores", "vectors"]
"""What a model puts out:

    tokens      the next token of every position
    scores      one score of every document
    vectors     a vector of each modality of a sample
"""


class HeadGatesConfig(Section):
    """One gate per KV head: how much of the full context the head needs. 1 = all of it, 0 =
    sinks and a window (streaming)."""

    window: int = setting(
        1024, "Tokens a streaming head sees up to and including the query itself.", gt=0
    )
    sinks: int = setting(
        128,
        "First tokens of the document that a streaming head also sees; 0 = local attention.",
        ge=0,
    )
    init_mean: float = setting(4.0, "Initial mean of log_alpha; at 4 nearly every head is full.")
    init_std: float = setting(0.01, "Initial standard deviation of log_alpha.", ge=0)
    stripe: bool = setting(
        False,
        "Instead, start with every second layer full and the others streaming (log_alpha +10 and "
        "-10).",
    )


class LatentAttentionConfig(Section):
    """Multi-head latent attention (MLA): a token's keys and values of all heads are projections
    of `kv_rank` channels.

    Keys also share `rope_head_dim` rotated channels. The cache stores these two, whatever the
    number of heads."""

    kv_rank: int = setting(
        512, "Channels from which the keys and values of all heads are made (kv_lora_rank).", gt=0
    )
    q_rank: int | None = setting(
        None,
        "Channels from which the queries are made (q_lora_rank); null = from the stream itself.",
        gt=0,
    )
    nope_head_dim: int = setting(
        128,
        "Channels of a query or key head that are not rotated (qk_nope_head_dim).",
        gt=0,
        le=MAX_HEAD_DIM,
    )
    rope_head_dim: int = setting(
        64,
        "Channels of a query or key head that are rotated; heads share those of keys.",
        gt=0,
        le=MAX_HEAD_DIM,
        multiple_of=2,
    )
    value_head_dim: int = setting(
        128,
        "Channels of a value head (v_head_dim); at most nope_head_dim + rope_head_dim.",
        gt=0,
        le=MAX_HEAD_DIM,
    )

    @property
    def head_size(self) -> int:
        """Channels of a query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    @property
    def stored_size(self) -> int:
        """Channels of a token that decoding needs, for all heads together."""
        return self.kv_rank + self.rope_head_dim


class StateShape(NamedTuple):
    """What a layer that has a state keeps of one sequence, in place of keys and values."""

    inputs: tuple[int, int]
    """(taps - 1, channels) of its convolution, in the model's dtype"""
    memory: tuple[int, int, int]
    """(heads, key channels, value channels) of its recurrence, in fp32; zeros without one"""

    @property
    def input_size(self) -> int:
        """Numbers of `inputs`."""
        return prod(self.inputs)

    @property
    def memory_size(self) -> int:
        """Numbers of `memory`."""
        return prod(self.memory)


class StateLayersConfig(Section):
    """Layers with a state of fixed size in place of softmax attention: which ones."""

    layers: tuple[int, ...] | None = setting(
        None, "Layers (from 0) of this kind; null = all but every fourth one."
    )

    @model_validator(mode="before")
    @classmethod
    def _list_as_tuple(cls, data: Any) -> Any:
        # Values of a config.json are validated as Python values, where a strict tuple accepts no
        # list.
        if isinstance(data, dict) and isinstance(data.get("layers"), list):
            return {**data, "layers": tuple(data["layers"])}
        return data

    @model_validator(mode="after")
    def _layers_differ(self) -> "StateLayersConfig":
        layers = self.layers
        if layers is not None and (len(set(layers)) != len(layers) or any(i < 0 for i in layers)):
            raise ValueError(
                f"layers is {list(layers)}; it must list different layers, counted from 0"
            )
        return self

    def has(self, layer: int) -> bool:
        """Whether a layer, counted from 0, is of this kind."""
        if self.layers is None:
            return (layer + 1) % FULL_EVERY != 0
        return layer in self.layers


class ShortConvolutionConfig(StateLayersConfig):
    """Gated short convolutions in some layers, in place of softmax attention: a token sees itself
    and a few before it, each channel by itself."""

    taps: int = setting(
        3, "Tokens that the convolution sees, with its own (conv_L_cache).", ge=2, le=64
    )
    channels: int | None = setting(
        None, "Channels of the convolution and its gates; null = hidden_size.", gt=0
    )
    bias: bool = setting(
        False, "Biases on the convolution and on the projections around it (conv_bias)."
    )


class LinearAttentionConfig(StateLayersConfig):
    """Linear attention in some layers, in place of softmax attention (Gated DeltaNet): a state of
    fixed size for each value head, whatever the length of the text.

    Queries, keys and values first pass a short causal convolution."""

    key_heads: int = setting(16, "Heads of queries and keys (linear_num_key_heads).", gt=0)
    value_heads: int = setting(
        32,
        "Heads of values, a multiple of key_heads; each has a state (linear_num_value_heads).",
        gt=0,
    )
    key_head_dim: int = setting(
        128, "Channels of a query or key head (linear_key_head_dim).", gt=0, le=MAX_HEAD_DIM
    )
    value_head_dim: int = setting(
        128, "Channels of a value head (linear_value_head_dim).", gt=0, le=MAX_HEAD_DIM
    )
    taps: int = setting(
        4, "Tokens that the convolution sees, with its own (linear_conv_kernel_dim).", ge=2, le=64
    )

    @model_validator(mode="after")
    def _fits(self) -> "LinearAttentionConfig":
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads is {self.value_heads}; it must be a multiple of "
                f"key_heads={self.key_heads}"
            )
        return self

    @property
    def key_width(self) -> int:
        """Channels of the keys of all heads."""
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        """Channels of the values of all heads."""
        return self.value_heads * self.value_head_dim

    @property
    def mixed_width(self) -> int:
        """Channels of queries, keys and values together: what the convolution reads."""
        return 2 * self.key_width + self.value_width


class StateSpaceConfig(StateLayersConfig):
    """State-space layers (Mamba-2) in place of softmax attention in some layers: a state of fixed size
    for each head, which decays by a number of each token."""

    heads: int = setting(48, "Heads; each has a state (mamba_n_heads).", gt=0)
    head_dim: int = setting(64, "Channels of a head (mamba_d_head).", gt=0, le=MAX_HEAD_DIM)
    state_size: int = setting(
        128, "Numbers that the state has for each channel (mamba_d_state).", gt=0, le=MAX_HEAD_DIM
    )
    groups: int = setting(
        1,
        "Groups of heads; those of a group share what is written and read (mamba_n_groups).",
        gt=0,
    )
    taps: int = setting(
        4, "Tokens that the convolution sees, with its own (mamba_d_conv).", ge=2, le=64
    )
    conv_bias: bool = setting(True, "Biases on the convolution (mamba_conv_bias).")
    bias: bool = setting(False, "Biases on the projections (mamba_proj_bias).")

    @model_validator(mode="after")
    def _fits(self) -> "StateSpaceConfig":
        if self.heads % self.groups:
            raise ValueError(
                f"heads is {self.heads}; it must be a multiple of groups={self.groups}"
            )
        return self

    @property
    def width(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim

    @property
    def group_width(self) -> int:
        """Channels of what all groups write, and of what they read."""
        return self.groups * self.state_size

    @property
    def mixed_width(self) -> int:
        """Channels of the inputs of heads and of what groups write and read: what the convolution
        reads."""
        return self.width + 2 * self.group_width


def with_form(data: dict[str, Any]) -> dict[str, Any]:
    """Settings of a model as a recipe gives them, completed by what its family always has."""
    family = data.get("family")
    if not isinstance(family, str) or family not in FORMS:
        return data

    form = dict(FORMS[family])
    width = data.get("hidden_size", DEFAULT_HIDDEN_SIZE)
    if family in EMBED_SCALE_BY_WIDTH and isinstance(width, int) and width > 0:
        form["embed_scale"] = width**0.5
    # Keys of experts are merged one by one: a recipe that sets their number keeps the family's
    # router.
    if isinstance(form.get("experts"), dict) and isinstance(data.get("experts"), dict):
        data = {**data, "experts": {**form["experts"], **data["experts"]}}
    return {**form, **data}


class ModelConfig(Section):
    """The shape of a Transformer.

    Give a preset, the other keys, or both (the other keys override the preset).
    """

    family: str = setting(
        "llama",
        "The names and config.json to read and write: a file of model/families (transformers: any "
        "class of it), or your own module.",
    )
    preset: str | None = setting(None, "A known shape to start from; `headway list` prints them.")
    # Sizes.
    hidden_size: int = setting(DEFAULT_HIDDEN_SIZE, "Width of the residual stream.", gt=0)
    num_layers: int = setting(4, "Number of layers.", gt=0)
    num_heads: int = setting(4, "Query heads.", gt=0)
    num_kv_heads: int | None = setting(None, "Key and value heads; null = num_heads.", gt=0)
    head_dim: int | None = setting(
        None, "Width of one head; null = hidden_size / num_heads.", gt=0, le=MAX_HEAD_DIM
    )
    ffn_size: int = setting(688, "Inner width of the feed-forward layer.", gt=0)
    vocab_size: int | None = setting(
        None,
        "Rows of the embedding; null = the tokenizer's vocabulary, padded to a multiple of 64.",
        gt=0,
    )
    max_seq_len: int = setting(512, "Longest sequence the model supports.", gt=0)
    # How positions enter: rotation of queries and keys, or learned vectors.
    rope_theta: float = setting(10000.0, "Base of the rotary frequencies.", gt=0)
    rope_scaling: RopeScaling | None = setting(None, "Scaling of the rotary frequencies.")
    rope_local_theta: float | None = setting(
        None,
        "Base of the rotary frequencies, unscaled, in layers with a sliding window; null = the "
        "same as in the others.",
        gt=0,
    )
    rope_interleaved: bool = setting(
        False,
        "Rotate neighbouring channels (0 with 1, 2 with 3) instead of the two halves of a head.",
    )
    rotary_fraction: float = setting(
        1.0, "Share of a head's channels that is rotated, from the first one on.", gt=0, le=1
    )
    no_rope_layers: tuple[int, ...] = setting(
        (), "Layers (from 0) whose queries and keys are not rotated."
    )
    positions: Literal["rotary", "learned"] = setting(
        "rotary",
        "learned = a trained vector per position, up to max_seq_len, is added to the embedding, "
        "and nothing is rotated.",
    )
    # Norms, biases and the feed-forward.
    norm: Literal["rmsnorm", "rmsnorm1p", "layernorm", "layernorm_no_bias"] = setting(
        "rmsnorm", "Normalisation of the residual stream; rmsnorm1p multiplies by 1 + weight."
    )
    norm_placement: Literal["before", "after", "both"] = setting(
        "before",
        "Norms stand before attention and feed-forward, after them (on what is added to the "
        "stream), or both.",
    )
    parallel_block: bool = setting(
        False, "Attention and feed-forward read the same normed stream, and both are added to it."
    )
    norm_eps: float = setting(1e-5, "Added to the variance in the normalisation.", gt=0, le=1)
    qkv_bias: bool = setting(False, "Bias on the query, key and value projections.")
    output_bias: bool = setting(False, "Bias on the attention output projection.")
    ffn_bias: bool = setting(False, "Bias on the feed-forward projections.")
    qk_norm: bool = setting(False, "RMSNorm of queries and keys, before rotation.")
    qk_norm_over: Literal["head", "projection"] = setting(
        "head", "What one such norm covers: each head, or all heads of a token together."
    )
    activation: Literal["silu", "gelu", "gelu_tanh"] = setting(
        "silu", "Activation of the feed-forward layer."
    )
    ffn_gate: bool = setting(
        True,
        "The feed-forward multiplies by the activation of a gate; false = it activates its inner "
        "layer itself.",
    )
    tie_embeddings: bool = setting(
        True, "Share one matrix between input embedding and output head."
    )
    # Attention: what a token sees, and what happens to scores.
    sliding_window: int | None = setting(
        None, "Tokens a query sees, including itself; null = all.", gt=0
    )
    window_layers: tuple[int, ...] | None = setting(
        None, "Layers the sliding window applies to; null = all."
    )
    attention_scale: float | None = setting(
        None, "Scores are q k times this; null = 1 / sqrt(head_dim).", gt=0
    )
    attention_softcap: float | None = setting(
        None, "Attention scores s become softcap * tanh(s / softcap); null = unchanged.", gt=0
    )
    attention_sinks: bool = setting(
        False,
        "A trained logit per query head takes part in the softmax over scores, with a value of 0: "
        "a head may attend to nothing.",
    )
    latent_attention: LatentAttentionConfig | None = setting(
        None,
        "Multi-head latent attention in every layer; null = keys and values of their own for each "
        "KV head.",
    )
    linear_attention: LinearAttentionConfig | None = setting(
        None, "Linear attention with a state (Gated DeltaNet) in some layers; null = in none."
    )
    short_convolution: ShortConvolutionConfig | None = setting(
        None, "Gated short convolutions in place of attention in some layers; null = in none."
    )
    state_space: StateSpaceConfig | None = setting(
        None, "State-space layers (Mamba-2) in place of attention in some layers; null = in none."
    )
    attention_gate: bool = setting(
        False,
        "What softmax attention gives is multiplied by the sigmoid of a gate, one per channel.",
    )
    experts: ExpertsConfig | None = setting(
        None, "Mixtures of experts in place of feed-forward layers; null = none."
    )
    # Multipliers and caps along the stream.
    embed_scale: float = setting(1.0, "The embedding of a token is multiplied by this.", gt=0)
    residual_scale: float = setting(
        1.0, "What attention and feed-forward add to the stream is multiplied by this.", gt=0
    )
    logit_scale: float = setting(1.0, "Logits are multiplied by this.", gt=0)
    logit_softcap: float | None = setting(
        None, "Logits x become softcap * tanh(x / softcap); null = unchanged.", gt=0
    )
    # How the model trains.
    dropout: float = setting(
        0.0, "Dropout on the output of attention and feed-forward.", ge=0, lt=1
    )
    embed_grad_scale: float = setting(1.0, "The embedding's gradient is multiplied by this.", ge=0)
    # Parts that a task or another section adds, and models that are no Transformer of headway's.
    head_gates: HeadGatesConfig | None = setting(
        None,
        "Gates that let KV heads stream; objective head_sparsity and init.masks add them. null "
        "with init.from drops them.",
    )
    score_head: bool = setting(
        False,
        "A head that gives a document one number, its reward, in place of the one that predicts "
        "tokens; objective reward adds it.",
    )
    hf_config: dict[str, Any] | None = setting(
        None,
        "family transformers: config.json of the class, as a mapping. With init.from its keys "
        "override those of the folder; without, the "
        "weights are random.",
    )
    trust_remote_code: bool = setting(
        False, "family transformers: run the model code that lies in the folder of init.from."
    )
    media: MediaShape | None = setting(
        None, "Media inputs of the model, written by the run: set `multimodal` instead."
    )
    vision: VisionShape | None = setting(
        None,
        "The vision tower of the model, written by the run: set `multimodal.native` instead.",
    )
    aligner: AlignerConfig | None = setting(
        None,
        "Align encoders of text, image and audio instead of training a language model; objective "
        "contrastive needs it.",
    )
    init_std: float = setting(
        0.02,
        "Standard deviation of initial weights; divided by sqrt(2 * num_layers) for output "
        "projections.",
        gt=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("preset"), str):
            name = data["preset"]
            if name not in PRESETS:
                raise ValueError(f"preset is {name!r}; it must be one of {', '.join(PRESETS)}")
            data = {**PRESETS[name], **data}
        # After the preset, which may name the family.
        if isinstance(data, dict):
            return with_form(data)
        return data

    @field_validator("media", mode="before")
    @classmethod
    def _media_from_values(cls, media: Any) -> Any:
        if not isinstance(media, dict):
            return media
        try:
            return MediaShape.parse(media)
        except (TypeError, KeyError) as problem:
            raise ValueError(f"does not describe media inputs: {problem}") from None

    @field_validator("media")
    @classmethod
    def _media_fits(cls, media: MediaShape | None) -> MediaShape | None:
        if media is not None and (problem := media.problem()):
            raise ValueError(problem)
        return media

    @field_validator("vision", mode="before")
    @classmethod
    def _vision_from_values(cls, vision: Any) -> Any:
        if not isinstance(vision, dict):
            return vision
        try:
            return VisionShape.parse(vision)
        except (TypeError, KeyError) as problem:
            raise ValueError(f"does not describe a vision tower: {problem}") from None

    @field_validator("no_rope_layers", "window_layers", mode="before")
    @classmethod
    def _list_as_tuple(cls, layers: Any) -> Any:
        # After `_apply_preset`, a recipe's JSON is validated as Python values too, and a strict
        # tuple accepts no list.
        if isinstance(layers, list):
            return tuple(layers)
        return layers

    @field_validator("no_rope_layers", "window_layers")
    @classmethod
    def _unique(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None and (len(set(layers)) != len(layers) or any(i < 0 for i in layers)):
            raise ValueError(f"is {list(layers)}; it must list different layers, counted from 0")
        return layers

    @model_validator(mode="after")
    def _fits(self) -> "ModelConfig":
        # The order decides which message a recipe with several mistakes gets. Properties such as
        # head_size are only meaningful behind the first check.
        derives_head_size = self.head_dim is None and self.latent_attention is None
        if derives_head_size and self.hidden_size % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}; it must divide hidden_size={self.hidden_size}, or "
                "give head_dim"
            )

        ffn = self.ffn_size
        if self.experts is not None:
            stacked = self.expert_size * self.experts.num
            ffn = max(ffn, stacked, self.experts.shared_ffn_size)
        widest = max(self.hidden_size, ffn, self.vocab_size or 0, self.num_heads * self.head_size)
        if self.linear_attention is not None:
            widest = max(widest, self.linear_attention.mixed_width)
        if self.short_convolution is not None:
            widest = max(widest, self.convolved)
        if self.state_space is not None:
            widest = max(widest, self.state_space.mixed_width)
        if self.hidden_size * widest > MAX_ELEMENTS or self.num_layers > MAX_LAYERS:
            raise ValueError(
                f"hidden_size is {self.hidden_size}, its widest matrix {widest}, num_layers "
                f"{self.num_layers}; "
                f"a matrix may have at most {MAX_ELEMENTS} elements and a model {MAX_LAYERS} "
                "layers. Use smaller values"
            )

        self._latent_fits()
        self._states_fit()
        self._positions_fit()

        if self.parallel_block and self.norm_placement != "before":
            raise ValueError(
                f"parallel_block is given with norm_placement={self.norm_placement}; its one norm "
                "stands before. Use before"
            )
        if self.experts is not None and (
            self.parallel_block or not self.ffn_gate or self.activation != "silu"
        ):
            if self.parallel_block:
                key = "parallel_block"
            elif self.ffn_gate:
                key = "activation"
            else:
                key = "ffn_gate"
            raise ValueError(
                f"experts is given with {key}={getattr(self, key)}; experts are gated, with silu, "
                "behind attention"
            )
        if self.qk_norm_over != "head" and not self.qk_norm:
            raise ValueError(
                f"qk_norm_over is {self.qk_norm_over} without qk_norm; set qk_norm: true"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads is {self.kv_heads}; it must divide num_heads={self.num_heads}"
            )

        # Without num_layers in the recipe, the layers may come from pretrained weights. Then this
        # is checked again with them.
        knows_layers = "num_layers" in self.model_fields_set
        for key in ("no_rope_layers", "window_layers"):
            too_high = [layer for layer in getattr(self, key) or () if layer >= self.num_layers]
            if too_high and knows_layers:
                raise ValueError(
                    f"{key} holds {too_high[0]}; layers go from 0 to {self.num_layers - 1}"
                )
        if self.window_layers is not None and self.sliding_window is None:
            raise ValueError(
                "window_layers is given without sliding_window; give sliding_window too"
            )
        has_mixture = self.experts is None or any(map(self.is_mixture, range(self.num_layers)))
        if knows_layers and not has_mixture:
            raise ValueError(
                f"experts leaves none of the num_layers={self.num_layers} layers a mixture; lower "
                "first_dense or every"
            )
        if self.experts is not None and self.ffn_bias:
            raise ValueError(
                "experts is given with ffn_bias=true; the biases of experts are experts.bias. Use "
                "ffn_bias false"
            )

        # Gated attention has kernels of its own (kernels/head_mix.py), for plain scores.
        if self.head_gates is not None and self.sliding_window is not None:
            raise ValueError(
                f"head_gates is given with sliding_window={self.sliding_window}; gates need heads "
                "that see the full context"
            )
        if self.head_gates is not None and self.attention_softcap is not None:
            raise ValueError(
                f"head_gates is given with attention_softcap={self.attention_softcap}; gated heads "
                "have no soft-capping"
            )
        if self.head_gates is not None and self.attention_sinks:
            raise ValueError(
                "head_gates is given with attention_sinks=true; gated heads have no trained sinks"
            )
        return self

    def _latent_fits(self) -> None:
        """The settings agree with latent attention, or with its absence."""
        latent = self.latent_attention
        if latent is None:
            if self.rope_scaling is not None and self.rope_scaling.mscale_all_dim:
                raise ValueError(
                    "rope_scaling has mscale_all_dim, which is for latent_attention. Use "
                    "attention_factor"
                )
            return
        if self.head_dim not in (None, latent.head_size):
            raise ValueError(
                f"head_dim is {self.head_dim}; with latent_attention it is {latent.head_size}. "
                "Leave it out"
            )
        if self.kv_heads != self.num_heads:
            raise ValueError(
                f"num_kv_heads is {self.kv_heads}; with latent_attention it is "
                f"num_heads={self.num_heads}. Leave it out"
            )
        # Values are padded to the width of keys (latent_attention.py).
        if latent.value_head_dim > latent.head_size:
            raise ValueError(
                f"latent_attention.value_head_dim is {latent.value_head_dim}; it must not exceed "
                f"nope_head_dim + rope_head_dim={latent.head_size}"
            )
        if self.head_gates is not None:
            raise ValueError(
                "head_gates is given with latent_attention, whose heads store one vector together: "
                "none can stream alone"
            )

        # Settings of other kinds of attention must be what they are without them.
        neutral = {
            "qk_norm": False,
            "rotary_fraction": 1.0,
            "positions": "rotary",
            "attention_sinks": False,
            "attention_gate": False,
            "sliding_window": None,
        }
        for key, value in neutral.items():
            if getattr(self, key) != value:
                shown = "null" if value is None else str(value).lower()
                raise ValueError(
                    f"latent_attention is given with {key}={getattr(self, key)}; it must be {shown}"
                )

    def _states_fit(self) -> None:
        """The settings agree with layers that have a state, and with gates on softmax
        attention."""
        if self.attention_gate and self.parallel_block:
            raise ValueError(
                "attention_gate is given with parallel_block, whose attention has no gate. Remove "
                "one of them"
            )
        given = self.state_section
        if given is None:
            return
        others = ["latent_attention", "head_gates", "parallel_block", "attention_sinks"]
        section, state_layers = given
        # A model has one kind of layers with a state; the first that is given speaks.
        kinds_of_state = ("linear_attention", "short_convolution", "state_space")
        others += [kind for kind in kinds_of_state if kind != section]
        for key in others:
            if getattr(self, key):
                raise ValueError(
                    f"{section} is given with {key}, which is for models whose other layers all "
                    "have softmax attention. Remove one of them"
                )
        if "num_layers" not in self.model_fields_set:
            return
        kinds = {state_layers.has(layer) for layer in range(self.num_layers)}
        too_high = [layer for layer in state_layers.layers or () if layer >= self.num_layers]
        if too_high or True not in kinds:
            raise ValueError(
                f"{section} has layers {list(state_layers.layers or ())}; it must name layers from "
                f"0 to {self.num_layers - 1}"
            )

    def _positions_fit(self) -> None:
        if self.positions == "learned":
            for key in ("rope_scaling", "rope_local_theta", "no_rope_layers"):
                if getattr(self, key):
                    raise ValueError(
                        f"positions is learned and {key} is given, which is for rotary positions. "
                        "Remove one of them"
                    )
            return

        if self.rotary_size % 2 or not self.rotary_size:
            part = ""
            if self.rotary_fraction != 1:
                part = f", of which rotary_fraction={self.rotary_fraction} is {self.rotary_size} channels"
            raise ValueError(
                f"head_dim is {self.head_size}{part}; it must be even for rotary positions"
            )

        scaling = self.rope_scaling
        if scaling is not None and scaling.query_growth:
            # Queries are made longer by their rotation, so all of their channels must be rotated,
            # in every layer.
            neutral = {
                "rotary_fraction": 1.0,
                "rope_local_theta": None,
                "no_rope_layers": (),
                "latent_attention": None,
            }
            for key, value in neutral.items():
                if getattr(self, key) != value:
                    raise ValueError(
                        f"rope_scaling.query_growth is given with {key}={getattr(self, key)}; "
                        "remove one of them"
                    )
        if scaling is not None and scaling.kind == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta is {self.rope_theta}; with yarn scaling it must be above 1"
            )
        planes = self.rotary_size // 2
        if scaling is not None and scaling.kind == "longrope":
            count = len(scaling.short_factor)
            if count != planes:
                raise ValueError(
                    f"rope_scaling.short_factor has {count} numbers; {self.rotary_size} rotated "
                    f"channels need {planes}"
                )
        if self.rope_local_theta is not None and self.sliding_window is None:
            raise ValueError(
                "rope_local_theta is given without sliding_window; it is for layers with a window"
            )

    @model_validator(mode="after")
    def _wrapped_alone(self) -> "ModelConfig":
        # A family that was stored with a model (`stored:`) may be one that wraps a class.
        if self.family != "transformers" and not self.family.startswith("stored:"):
            for key in ("hf_config", "trust_remote_code"):
                if getattr(self, key):
                    raise ValueError(
                        f"{key} is given with family {self.family}; it is for family transformers. "
                        "Use that, or remove it"
                    )
        if self.hf_config is not None and (self.head_gates is not None or self.media is not None):
            raise ValueError(
                "has head_gates or media with family transformers, which has neither. Remove them"
            )
        return self

    @model_validator(mode="after")
    def _tower_fits(self) -> "ModelConfig":
        if self.vision is None:
            return self
        others = (
            "media",
            "head_gates",
            "latent_attention",
            "linear_attention",
            "short_convolution",
            "state_space",
            "rope_local_theta",
            "hf_config",
        )
        for key in others:
            if getattr(self, key) is not None:
                raise ValueError(f"has vision and {key}; a model has one of them. Remove one")
        if self.rope_scaling is not None and self.rope_scaling.query_growth:
            raise ValueError("has vision and rope_scaling.query_growth, which needs one position")
        problem = self.vision.problem(
            self.rotary_size // 2, self.hidden_size, self.vocab_size, self.num_layers
        )
        if problem is not None:
            raise ValueError(f"vision: {problem}")
        return self

    @model_validator(mode="after")
    def _aligner_alone(self) -> "ModelConfig":
        if self.head != "vectors":
            return self
        fields = type(self).model_fields
        for name in sorted(set(fields) - {"aligner", "vocab_size"}):
            if getattr(self, name) != fields[name].default:
                raise ValueError(
                    f"has aligner and {name}, which is for language models. Remove one of them"
                )
        return self

    @property
    def title(self) -> str:
        """What the model is, in one word."""
        if self.head == "vectors":
            return "aligner"
        return self.family

    @property
    def head(self) -> Head:
        """What the model puts out. A task says in the same words what it needs."""
        if self.aligner is not None:
            return "vectors"
        if self.score_head:
            return "scores"
        return "tokens"

    @property
    def aligner_settings(self) -> AlignerConfig:
        """The encoders and heads of a model that puts out vectors; others have none."""
        assert self.aligner is not None, f"a model that puts out {self.head} has no aligner"
        return self.aligner

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        if self.num_kv_heads is None:
            return self.num_heads
        return self.num_kv_heads

    @property
    def head_size(self) -> int:
        """Width of one query or key head."""
        if self.latent_attention is not None:
            return self.latent_attention.head_size
        if self.head_dim is not None:
            return self.head_dim
        return self.hidden_size // self.num_heads

    @property
    def value_size(self) -> int:
        """Width of one value head."""
        if self.latent_attention is not None:
            return self.latent_attention.value_head_dim
        return self.head_size

    @property
    def cached_heads(self) -> int:
        """Heads whose keys and values a cache stores."""
        return self.kv_heads if self.latent_attention is None else 1

    @property
    def cached_size(self) -> int:
        """Width of a key, and of a value, in a cache.

        With latent attention the two are one vector, from which heads are made.
        """
        if self.latent_attention is not None:
            return self.latent_attention.stored_size
        return self.head_size

    @property
    def rotary_size(self) -> int:
        """Channels of a head that are rotated."""
        if self.latent_attention is not None:
            return self.latent_attention.rope_head_dim
        return int(self.head_size * self.rotary_fraction)

    @property
    def ties_head(self) -> bool:
        """Whether the embedding is the output head too; a model that scores has no such head."""
        return self.tie_embeddings and not self.score_head

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward layer."""
        return 3 if self.ffn_gate else 2

    @property
    def vocab(self) -> int:
        """Rows of the embedding; known once the tokenizer is."""
        assert self.vocab_size is not None, "vocab_size is resolved before a model is built"
        return self.vocab_size

    @property
    def head_rows(self) -> int:
        """Rows of the output head: one per token of the vocabulary, or the one that scores."""
        return 1 if self.score_head else self.vocab

    def is_mixture(self, layer: int) -> bool:
        """Whether a layer's feed-forward is a mixture of experts."""
        return self.experts is not None and self.experts.is_mixture(layer)

    @property
    def expert_size(self) -> int:
        """Inner width of one expert."""
        assert self.experts is not None, "only a mixture has experts"
        if self.experts.ffn_size is None:
            return self.ffn_size
        return self.experts.ffn_size

    def active_ffn(self, layer: int) -> int:
        """Inner width of the feed-forward that one token passes in a layer: of its experts and
        the shared one, in a mixture."""
        if self.experts is None or not self.is_mixture(layer):
            return self.ffn_size
        return self.experts.per_token * self.expert_size + self.experts.shared_ffn_size

    @property
    def mean_ffn(self) -> float:
        """`active_ffn` of an average layer."""
        return sum(map(self.active_ffn, range(self.num_layers))) / self.num_layers

    @property
    def state_section(self) -> tuple[str, StateLayersConfig] | None:
        """The section that gives some layers a state in place of softmax attention, with its name;
        None: no layer has one."""
        if self.linear_attention is not None:
            return "linear_attention", self.linear_attention
        if self.short_convolution is not None:
            return "short_convolution", self.short_convolution
        if self.state_space is not None:
            return "state_space", self.state_space
        return None

    @property
    def has_states(self) -> bool:
        """Whether some layers have a state in place of softmax attention."""
        return self.state_section is not None

    @property
    def state_shape(self) -> StateShape:
        """The state of one sequence in one of these layers."""
        linear = self.linear_attention
        if linear is not None:
            heads = (linear.value_heads, linear.key_head_dim, linear.value_head_dim)
            return StateShape((linear.taps - 1, linear.mixed_width), heads)
        space = self.state_space
        if space is not None:
            heads = (space.heads, space.state_size, space.head_dim)
            return StateShape((space.taps - 1, space.mixed_width), heads)
        assert self.short_convolution is not None, "no layer of this model has a state"
        return StateShape((self.short_convolution.taps - 1, self.convolved), (0, 0, 0))

    @property
    def convolved(self) -> int:
        """Channels of a short convolution."""
        assert self.short_convolution is not None, "only layers with one have its channels"
        return self.short_convolution.channels or self.hidden_size

    def has_state(self, layer: int) -> bool:
        """Whether a layer has a state, no keys that a cache would store."""
        return self.state_section is not None and self.state_section[1].has(layer)

    @property
    def state_share(self) -> float:
        """The share of layers with a state."""
        return sum(map(self.has_state, range(self.num_layers))) / self.num_layers

    def window_of(self, layer: int) -> int | None:
        """The sliding window of one layer, or None for full causal attention."""
        if self.window_layers is None or layer in self.window_layers:
            return self.sliding_window
        return None

    def with_(self, **changes: Any) -> "ModelConfig":
        """The config with some fields changed, validated again."""
        # `model_copy` would not validate, and properties rely on what the validators ensure.
        return ModelConfig.model_validate({**self.model_dump(), **changes})
