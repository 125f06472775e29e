"""A config.json of any size comes in; that of a small model with the same form goes out, and a random
model of transformers' class for it.

    hidden_size 4096, 64 layers, 64 heads on 8        hidden_size 56, 4 layers, 6 heads on 2
    layer_types, biases, windows, rotary scaling  ->  the same kinds, at lengths a test reaches

What decides how a model computes stays: kinds of layers, biases, norms, shares of heads that are
rotated, multipliers, routing. Only sizes, lengths and token ids change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from headway.errors import ConfigError
from headway.model.stock.classes import foreign, make_config, quiet

VOCAB = 97
"""Rows of the embedding: no multiple of anything."""
LONGEST = 64
"""Longest sequence."""
FIRST_LENGTH = 16
"""The length that rotary scaling starts from; documents of a comparison are longer."""
WINDOW = 5
MAX_LAYERS = 8
"""Layers at most; a kind of layers that comes later in a model is not compared."""
MAX_PARAMETERS = 20_000_000
SPREAD = 0.15
"""Standard deviation of what is added to a random matrix: untrained norms and biases would hide
mistakes."""
VECTOR_SPREAD = 0.3
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
PER_TOKEN = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
AT_MOST: Mapping[str, int] = {
    "intermediate_size": 44,
    "n_inner": 44,
    "ffn_dim": 44,
    "moe_intermediate_size": 20,
    "shared_expert_intermediate_size": 28,
    "shared_intermediate_size": 28,
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 10,
    "max_position_embeddings": LONGEST,
    "n_positions": LONGEST,
    "sliding_window": WINDOW,
    "original_max_position_embeddings": FIRST_LENGTH,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_shared_experts": 2,
    "moe_num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "moe_layer_start_index": 1,
    "decoder_sparse_step": 2,
    "moe_layer_interval": 2,
}
"""Sizes: a value above this becomes this."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def shrunk(hf_config: Mapping[str, Any], *, trust_remote_code: bool = False) -> dict[str, Any]:
    """The config.json of a small model of the same form.

    The class of transformers completes it first, so that an absent key has the value that it means.
    """
    config = make_config(hf_config, trust_remote_code=trust_remote_code)
    settings = config.to_dict()
    # A class may call standard sizes otherwise: GPT-2 has n_embd for hidden_size.
    names: Mapping[str, str] = type(config).attribute_map

    def key(standard: str) -> str:
        return names.get(standard, standard)

    for name, value in settings.items():
        if "drop" in name and isinstance(value, float):
            settings[name] = 0.0
    for name, most in AT_MOST.items():
        value = settings.get(key(name))
        if isinstance(value, int) and not isinstance(value, bool):
            settings[key(name)] = min(value, most)

    heads_before = settings[key("num_attention_heads")]
    width_before = settings[key("hidden_size")]
    _shrink_heads(settings, key)
    head_before, head = _shrink_width(settings, key, heads_before, width_before)
    _shrink_experts(settings)
    _shrink_state_space(settings, settings[key("hidden_size")])
    _shrink_layers(settings, key("num_hidden_layers"))

    rotary_dim = settings.get("rotary_dim")
    if isinstance(rotary_dim, int):
        settings["rotary_dim"] = rotary_dim * head // head_before
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(settings.get(name), dict):
            settings[name] = _shrunk_rope(settings[name], head)
    for name in TOKEN_IDS:
        if name in settings:
            settings[name] = None
    return settings


def _shrink_heads(settings: dict[str, Any], key: Any) -> None:
    """A few heads, with several query heads to a KV head where the model has that."""
    heads = settings[key("num_attention_heads")]
    kv_heads = settings.get(key("num_key_value_heads"))
    if not isinstance(kv_heads, int):
        settings[key("num_attention_heads")] = min(heads, 4)
        return
    if kv_heads == heads:
        few = min(heads, 4)
        settings[key("num_attention_heads")] = few
        settings[key("num_key_value_heads")] = few
        return
    few = min(kv_heads, 2)
    settings[key("num_attention_heads")] = few * min(heads // kv_heads, 3)
    settings[key("num_key_value_heads")] = few


def _shrink_width(
    settings: dict[str, Any], key: Any, heads_before: int, width_before: int
) -> tuple[int, int]:
    """Make heads and the stream narrow; the width of a head before and after."""
    heads = settings[key("num_attention_heads")]
    before = settings.get("head_dim") or width_before // heads_before
    if "qk_rope_head_dim" in settings:
        # Latent attention: `head_dim` is the rotated part there.
        if settings.get("head_dim") is not None:
            settings["head_dim"] = settings["qk_rope_head_dim"]
        if "qk_head_dim" in settings:
            settings["qk_head_dim"] = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
        settings[key("hidden_size")] = 48
        return before, settings["qk_rope_head_dim"]

    head = 8
    share = _rotated_share(settings, before)
    while int(head * share) % 2 or int(head * share) == 0:
        head += 4
        if head > before:
            raise ConfigError(f"no small head has an even number of channels in a share of {share}")
    if before * heads_before == width_before:
        settings[key("hidden_size")] = heads * head
    else:
        settings[key("hidden_size")] = heads * head + 8 * heads
    if settings.get("head_dim") is not None:
        settings["head_dim"] = head
    return before, head


def _rotated_share(settings: Mapping[str, Any], head: int) -> float:
    """The share of a head that is rotated."""
    if isinstance(settings.get("rotary_dim"), int):
        return settings["rotary_dim"] / head
    sections: list[Any] = [settings]
    rope = settings.get("rope_parameters")
    if isinstance(rope, Mapping):
        sections += [rope, *rope.values()]
    for section in sections:
        if isinstance(section, Mapping) and section.get("partial_rotary_factor") is not None:
            return float(section["partial_rotary_factor"])
    return 1.0


def _shrink_experts(settings: dict[str, Any]) -> None:
    groups = settings.get("n_group")
    has_groups = isinstance(groups, int) and groups > 1
    for name in EXPERT_COUNTS:
        if isinstance(settings.get(name), int):
            settings[name] = min(settings[name], 8 if has_groups else 6)
    for name in PER_TOKEN:
        if isinstance(settings.get(name), int):
            settings[name] = min(settings[name], 3)
    if has_groups:
        settings["n_group"] = 4
        settings["topk_group"] = min(settings["topk_group"], 2)


def _shrink_state_space(settings: dict[str, Any], width: int) -> None:
    """Few heads of a Mamba-2 layer, whose channels together are a multiple of the stream's."""
    if not {"mamba_n_heads", "mamba_n_groups", "mamba_expand"} <= settings.keys():
        return
    # A small width is a multiple of 8.
    heads = 4
    settings["mamba_n_heads"] = heads
    settings["mamba_n_groups"] = min(settings["mamba_n_groups"], 2)
    settings["mamba_d_head"] = settings["mamba_expand"] * width // heads
    settings["mamba_d_state"] = min(settings["mamba_d_state"], 10)


def _shrink_layers(settings: dict[str, Any], name: str) -> None:
    """Few layers that have every kind which stands among the first ones."""
    before = settings[name]
    layers = 3
    kinds = settings.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == before:
        while set(kinds[:layers]) != set(kinds) and layers < MAX_LAYERS:
            layers += 1
    layers = min(layers, before)
    settings[name] = layers

    # Whatever lists a value for each layer.
    for key, value in settings.items():
        if isinstance(value, list) and len(value) == before:
            settings[key] = value[:layers]
    if isinstance(settings.get("mlp_only_layers"), list):
        settings["mlp_only_layers"] = [
            layer for layer in settings["mlp_only_layers"] if layer < layers
        ]
    for key in ("max_window_layers", "moe_layer_end_index"):
        value = settings.get(key)
        if isinstance(value, int) and value >= layers - 1:
            settings[key] = layers if key == "max_window_layers" else layers - 1


def _shrunk_rope(rope: dict[str, Any], head: int) -> dict[str, Any]:
    """Rotary settings for short documents, of one kind of layer or of several."""
    shrunk_rope = dict(rope)
    for name, value in rope.items():
        if isinstance(value, dict):
            shrunk_rope[name] = _shrunk_rope(value, head)
    for name, length in (
        ("original_max_position_embeddings", FIRST_LENGTH),
        ("max_position_embeddings", LONGEST),
    ):
        if isinstance(rope.get(name), int):
            shrunk_rope[name] = length
    planes = int(head * float(rope.get("partial_rotary_factor") or 1.0)) // 2
    for name in ("short_factor", "long_factor"):
        if isinstance(rope.get(name), list):
            shrunk_rope[name] = rope[name][:planes]
    return shrunk_rope


def random_model(hf_config: Mapping[str, Any], *, trust_remote_code: bool = False) -> Any:
    """The class of transformers for a small config.json, every parameter random, on the CPU."""
    from transformers import AutoModelForCausalLM

    config = make_config(hf_config, trust_remote_code=trust_remote_code)
    options = {
        "attn_implementation": "eager",
        "dtype": torch.float32,
        "trust_remote_code": trust_remote_code,
    }
    with foreign("config.json"), quiet(), torch.random.fork_rng():
        with torch.device("meta"):
            size = AutoModelForCausalLM.from_config(config, **options).num_parameters()
        if size > MAX_PARAMETERS:
            raise ConfigError(f"its small copy still has {size:,} parameters")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, **options)

    generator = torch.Generator().manual_seed(1)
    # Routers of some classes choose experts with a buffer.
    biases = [
        value for name, value in model.named_buffers() if name.endswith("e_score_correction_bias")
    ]
    with torch.no_grad():
        for value in dict.fromkeys([*model.parameters(), *biases]):
            spread = SPREAD if value.dim() > 1 else VECTOR_SPREAD
            value.add_(torch.randn(value.shape, generator=generator) * spread)
    return model.eval()
