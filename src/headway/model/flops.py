"""How much arithmetic a token of training needs: the specs of all parameters and the names of those
that train come in, FLOPs go out.

forward               2 per weight of every matrix the token passes; of stacked experts, those it is
                      routed to
gradient of inputs    2 per weight, for the matrices behind the first parameter that trains; nothing
                      before it needs one
gradient of weights   2 per weight, for the matrices that train

So full training is the usual 6 per weight, and LoRA about 4.

Attention itself (scores and their mix of values) has no weights: 2 per visible token and channel of
a query, 2 per channel of a value, and twice that in backward. In rows of T tokens a token meets, on
the average,

                          all keys of the row, or of the window      those it may see
    full layer            T                                          T / 2
    window of W < T       W                                          W - W^2 / (2 T): the first W tokens of a row see less
    streaming head        as a window of window + sinks

A layer of linear attention meets a state instead, whatever the length: read under the key, changed,
read under the query, 2 each per number of the state, and the taps of its convolution, 2 each. A
state-space layer does not read under the key. A layer of a short convolution has the taps alone.

A vision tower is counted by its pictures (`picture_flops`), not by the tokens of rows.

Packed documents are not known here: a document that begins inside of a row sees less than that.
Recomputation to save memory does not count, nor do norms, activations and the loss. Imports without
torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from headway.kernels.packed_layout import form_of, plain_name
from headway.model.adapter.config import PARTS, split_name
from headway.model.config import ModelConfig
from headway.model.layout import HEAD, Depth, ParamSpec, Specs, active_share, in_groups, param_specs
from headway.model.vision_shape import POSITION_TABLE, TOWER

LORA_A, LORA_B, _ = PARTS
OUTSIDE = in_groups("objective", "projector", "aligner", "tower")
"""What is no part of the language model."""
INTERNLM_MULTIPLE = 256
"""InternLM rounds the width of its feed-forward layers up to a multiple of this."""
INTERNLM_MLP_RATIO = 8 / 3
"""Of that width, before it is rounded, to the hidden size."""
Position = tuple[int, int]
"""Layer, and the `Depth` inside it."""


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token, forward and backward."""

    matrices: float
    attention: float
    """Every token meets all keys of the row, or of its layer's window."""
    causal_attention: float
    """Every token meets the keys that it may see: it looks back only."""
    streaming: float = 0.0
    """As `attention`, if every head of a model with gates streams."""
    causal_streaming: float = 0.0

    @property
    def full(self) -> float:
        """Attention counted in full."""
        return self.matrices + self.attention

    @property
    def causal(self) -> float:
        """Attention counted for what a token may see."""
        return self.matrices + self.causal_attention

    def with_heads(self, full: float, streaming: float) -> TokenFlops:
        """The same model where these shares of its heads run full attention and stream; an
        undecided head does both."""
        return TokenFlops(
            self.matrices,
            full * self.attention + streaming * self.streaming,
            full * self.causal_attention + streaming * self.causal_streaming,
        )


def visible_tokens(seq_len: int, window: int | None) -> tuple[float, float]:
    """Keys per token, on average over a row of `seq_len`: all of its window, and those of them
    that it may see."""
    # The first `width` tokens of a row see 1, 2, ... width keys, the others `width`.
    width = seq_len
    if window is not None:
        width = min(window, seq_len)
    return float(width), width - width * width / (2 * seq_len)


def token_flops(
    config: ModelConfig,
    seq_len: int,
    *,
    specs: Specs | None = None,
    training: Collection[str] | None = None,
) -> TokenFlops:
    """FLOPs of one token in rows of `seq_len` tokens.

    `specs`: every parameter, adapters too; None: those of the config. `training`: None: all.
    """
    config_specs = {spec.name: spec for spec in param_specs(config)}
    counted: dict[str, ParamSpec] = {}
    for name, spec in (config_specs if specs is None else specs).items():
        if form_of(name) is not None:
            # What is stored quantised is multiplied as the matrix that it stands for.
            spec = config_specs[plain_name(name)]
        if spec.groups.isdisjoint(OUTSIDE):
            counted[spec.name] = spec

    trained = set(counted)
    if training is not None:
        trained &= set(training)
    positions = {name: _position(spec, config) for name, spec in counted.items()}
    # Backward stops at the first parameter that trains; without one it stops behind all layers.
    first = min((positions[name] for name in trained), default=(config.num_layers, Depth.CORE))

    matrices = 0.0
    for name, spec in counted.items():
        is_head = name == HEAD or spec.tied_to is not None
        # A token looks up one row of a table before the layers; a score is one product a document.
        if not spec.is_matrix or "score" in spec.groups or (spec.stage == "first" and not is_head):
            continue
        # A tied embedding is multiplied where the head is.
        position = positions[name]
        if is_head:
            position = (config.num_layers, 1)
        path, part = split_name(name)
        # The input of B is the output of A, which trains.
        needs_inputs = first < position or (part == LORA_B and f"{path}.{LORA_A}" in trained)
        flops_per_weight = 2 + 2 * needs_inputs + 2 * (name in trained)
        matrices += active_share(config, spec) * spec.size * flops_per_weight

    channels = config.num_heads * (config.head_size + config.value_size)
    reach = None
    if config.head_gates is not None:
        reach = config.head_gates.window + config.head_gates.sinks

    attention = 0.0
    causal = 0.0
    streaming = 0.0
    causal_streaming = 0.0
    for layer in range(config.num_layers):
        # Backward has two products of the same size for each of the forward's.
        passes = 3 if first < (layer, Depth.CORE) else 1
        if config.has_state(layer):
            attention += passes * state_flops(config)
            causal += passes * state_flops(config)
            continue
        flops_per_key = 2 * passes * channels
        all_keys, visible_keys = visible_tokens(seq_len, config.window_of(layer))
        attention += flops_per_key * all_keys
        causal += flops_per_key * visible_keys
        if reach is not None:
            near_keys, visible_near_keys = visible_tokens(seq_len, reach)
            streaming += flops_per_key * near_keys
            causal_streaming += flops_per_key * visible_near_keys
    return TokenFlops(matrices, attention, causal, streaming, causal_streaming)


@dataclass(frozen=True)
class PictureFlops:
    """FLOPs of a picture in a vision tower, forward and backward."""

    per_cell: float
    """Matrices, and attention within windows."""
    per_square: float
    """Attention of every patch to all patches of its picture, for each cell and cell."""

    def of(self, cells: float, squares: float) -> float:
        """FLOPs of pictures with `cells` cells in all; `squares`: the sum of their squares."""
        return self.per_cell * cells + self.per_square * squares


def picture_flops(
    config: ModelConfig,
    *,
    specs: Specs | None = None,
    training: Collection[str] | None = None,
) -> PictureFlops | None:
    """FLOPs of pictures in the model's vision tower; None: it has none.

    `specs` and `training` as in `token_flops`. A patch passes the layers, a cell of m m patches the
    projections behind them. A patch meets all P patches of its picture, or those of its window: 4 P
    per channel forward. A tower that does not train has no backward.
    """
    shape = config.vision
    if shape is None:
        return None
    config_specs = {spec.name: spec for spec in param_specs(config)}
    tower: list[ParamSpec] = []
    for name, spec in (config_specs if specs is None else specs).items():
        if form_of(name) is not None:
            spec = config_specs[plain_name(name)]
        if "tower" in spec.groups or spec.name.startswith(TOWER):
            tower.append(spec)
    trained = {spec.name for spec in tower}
    if training is not None:
        trained &= set(training)
    # Layers of the tower; projections stand behind all of them.
    depth = shape.tower["depth"]
    first = min(
        (_tower_depth(spec.name, depth) for spec in tower if spec.name in trained),
        default=depth + 1,
    )

    patches = shape.spec.merge**2
    per_cell = 0.0
    for spec in tower:
        if not spec.is_matrix or spec.name.startswith(TOWER + POSITION_TABLE):
            continue
        here = _tower_depth(spec.name, depth)
        path, part = split_name(spec.name)
        needs_inputs = first < here or (part == LORA_B and f"{path}.{LORA_A}" in trained)
        flops_per_weight = 2 + 2 * needs_inputs + 2 * (spec.name in trained)
        times = 1 if here == depth else patches
        per_cell += times * spec.size * flops_per_weight

    width = shape.tower["hidden_size"]
    per_square = 0.0
    for layer in range(depth):
        passes = 3 if first <= layer else 1
        window = shape.window_patches(layer)
        if window is None:
            per_square += passes * 4 * width * patches**2
        else:
            per_cell += passes * 4 * width * patches * window
    return PictureFlops(per_cell, per_square)


def _tower_depth(name: str, depth: int) -> int:
    """Where the forward meets a parameter of a tower: -1 before its layers, `depth` behind them."""
    parts = name.removeprefix(TOWER).split(".")
    if parts[0] == "blocks":
        return int(parts[1])
    if "merger" in parts[0]:
        return depth
    return -1


def state_flops(config: ModelConfig) -> float:
    """FLOPs of one token in the core of a layer that has a state, forward alone."""
    shape = config.state_shape
    kept, channels = shape.inputs
    # The delta rule also reads the state under the key, before it changes it.
    accesses = 3 if config.linear_attention is not None else 2
    return accesses * 2.0 * shape.memory_size + 2.0 * (kept + 1) * channels


def _position(spec: ParamSpec, config: ModelConfig) -> Position:
    """Where the forward first meets a parameter: its layer, and where in it."""
    if isinstance(spec.stage, int):
        return spec.stage, spec.depth
    # Gates act in the attention of the first layer on; their gradient needs all of backward.
    if "gates" in spec.groups:
        return 0, Depth.CORE
    # The final norm comes before the head.
    if spec.stage == "last":
        return config.num_layers, int(not spec.groups.isdisjoint({"embedding", "score"}))
    return -1, 0


def internlm_flops(config: ModelConfig, seq_len: int, *, recomputed: bool = False) -> float:
    """FLOPs of one token by InternLM's formula, whose TFLOPS its logs and tables print: attention
    in full, and all layers run forward a second time if anything is recomputed.

        f [(8 + 4 m) h^2 + 4 s h] L + 6 h V,   m = 1.5 mlp_ratio,   f = 3, recomputed 4

    h: hidden size, s: sequence length, L: layers, V: vocabulary.
    """
    h = config.hidden_size
    # The formula takes the configured ratio, not that of the rounded width.
    ratio = config.mean_ffn / h
    nominal_ffn = -(-int(h * INTERNLM_MLP_RATIO) // INTERNLM_MULTIPLE) * INTERNLM_MULTIPLE
    if config.mean_ffn == nominal_ffn:
        ratio = INTERNLM_MLP_RATIO
    factor = 4 if recomputed else 3
    layer = (8 + 4 * 1.5 * ratio) * h**2 + 4 * seq_len * h
    return factor * layer * config.num_layers + 6 * h * config.vocab
