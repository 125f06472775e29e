"""Latent attention: what is refused, what is counted, and what of published folders is left out."""

import json
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from headway.diagnose.equality import small_model
from headway.errors import ConfigError
from headway.model.adapter.config import AdapterConfig, linears
from headway.model.config import ModelConfig
from headway.model.families.base import family_of, published
from headway.model.flops import token_flops
from headway.model.head_masks.masks import HeadMasks
from headway.model.layout import active_parameters, num_parameters
from headway.model.presets import PRESETS
from headway.model.router import Router

LATENT = {"kv_rank": 16, "q_rank": 12, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
BASE: dict[str, Any] = {"family": "deepseek_v3", "hidden_size": 32, "num_heads": 4, "vocab_size": 64, "latent_attention": LATENT}
EXPERTS = {"num": 8, "per_token": 2, "ffn_size": 8, "shared_ffn_size": 16, "router": "sigmoid", "first_dense": 1, "bias_rate": 0.0}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads is 2; with latent_attention it is num_heads=4"),
        ({"head_dim": 8}, "head_dim is 8; with latent_attention it is 12"),
        ({"qk_norm": True}, "latent_attention is given with qk_norm=True"),
        ({"head_gates": {}}, "so none can stream"),
        ({"latent_attention": {**LATENT, "value_head_dim": 13}}, "must not exceed nope_head_dim + rope_head_dim=12"),
        ({"latent_attention": {**LATENT, "rope_head_dim": 3}}, "multiple of 2"),
        ({"latent_attention": None, "rope_scaling": {"kind": "yarn", "mscale_all_dim": 1.0}}, "which is for latent_attention"),
        ({"experts": {**EXPERTS, "num_groups": 3}}, "num_groups is 3; it must divide num=8"),
        ({"experts": {**EXPERTS, "num_groups": 8, "groups_per_token": 1}}, "groups_per_token is 1"),
        ({"experts": {**EXPERTS, "num_groups": 8, "groups_per_token": 2}}, "use top1"),
    ],
)
def test_settings_that_do_not_fit_are_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate({**BASE, **given})
    assert says in str(error.value)


def test_head_masks_are_refused_by_name() -> None:
    masks = HeadMasks(((True,) * 4,) * 4, 4, 2)
    with pytest.raises(ConfigError, match="latent attention, which has no KV heads to mask"):
        masks.check(ModelConfig.model_validate(BASE))


def test_a_router_takes_the_best_experts_of_the_best_groups() -> None:
    config = ModelConfig.model_validate({**BASE, "experts": {**EXPERTS, "num_groups": 4, "groups_per_token": 2, "routed_scale": 3.0}})
    scores = torch.tensor([0.9, 0.0, 0.5, 0.45, 0.6, 0.1, 0.4, 0.42])  # the groups' sums: 0.9, 0.95, 0.7, 0.82
    chosen, weights = Router(config).choose(scores)
    assert chosen.tolist() == [0, 2]
    assert weights.tolist() == pytest.approx([3 * 0.9 / 1.4, 3 * 0.5 / 1.4])
    biased = Router(config)
    assert biased.e_score_correction_bias is not None
    biased.e_score_correction_bias.data[6:] += 1.0  # decides the choice, not the weights
    chosen, weights = biased.choose(scores)
    assert chosen.tolist() == [7, 6]
    assert weights.tolist() == pytest.approx([3 * 0.42 / 0.82, 3 * 0.4 / 0.82])


def test_published_shapes_count_what_their_makers_say() -> None:
    """DeepSeek V3: 671B parameters, 37B active; V2 Lite: 15.7B and 2.4B. The active ones of V2 Lite are counted without the embedding."""
    big, lite = (ModelConfig.model_validate({"preset": name}) for name in ("deepseek-v3", "deepseek-v2-lite"))
    assert num_parameters(big) == pytest.approx(671e9, rel=0.001)
    assert active_parameters(big) == pytest.approx(37.6e9, rel=0.01)
    assert num_parameters(lite) == pytest.approx(15.7e9, rel=0.01)
    assert active_parameters(lite) - lite.vocab * lite.hidden_size == pytest.approx(2.4e9, rel=0.03)


def test_arithmetic_counts_queries_and_values_by_their_own_widths() -> None:
    config = ModelConfig.model_validate({**BASE, "num_layers": 2})
    near, far = (token_flops(config, length) for length in (10, 20))
    assert far.attention - near.attention == 6 * 2 * 4 * (12 + 8) * 10  # layers, heads, channels of q and v, tokens
    assert near.matrices == far.matrices


def test_every_preset_has_a_form_in_transformers_or_says_why() -> None:
    for name in ("laptop-mla", "deepseek-v2-lite", "deepseek-v3"):
        config = ModelConfig.model_validate({"vocab_size": 64, "preset": name})
        again = family_of(config.family).read(published(config)[1])
        assert again.latent_attention == config.latent_attention
        assert again.rope_scaling == config.rope_scaling
        assert again.experts is not None and config.experts is not None
        assert again.experts.num_groups == config.experts.num_groups
        assert name in PRESETS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"latent_attention": None}, "model.latent_attention is null"),
        ({"experts": {**EXPERTS, "router": "softmax"}}, "model.experts.router is 'softmax'"),
        ({"experts": {**EXPERTS, "shared_ffn_size": 12}}, "model.experts.shared_ffn_size is 12"),
        ({"qkv_bias": True}, "one switch for both"),
        ({"family": "qwen3_moe", "qk_norm": False}, "model.latent_attention is"),
    ],
)
def test_what_their_config_cannot_express_is_named(changes: dict[str, Any], says: str) -> None:
    config = ModelConfig.model_validate({**BASE, "experts": EXPERTS, **changes})
    with pytest.raises(ConfigError) as error:
        published(config)
    assert says in str(error.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads is 2"),
        ({"kv_lora_rank": None}, "kv_lora_rank is null"),
        ({"n_group": 3}, "num_groups is 3"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": "x"}}, "mscale is 'x'"),
    ],
)
def test_a_config_json_that_headway_does_not_compute_is_refused(changes: dict[str, Any], says: str) -> None:
    config = ModelConfig.model_validate({**BASE, "experts": EXPERTS})
    given = {**json.loads(json.dumps(published(config)[1])), **changes}
    with pytest.raises(ConfigError) as error:
        family_of("deepseek_v3").read(given)
    assert says in str(error.value)


def test_a_model_without_biases_is_exported_with_zeros() -> None:
    config = ModelConfig.model_validate({**BASE, "experts": {**EXPERTS, "bias_rate": None}})
    target, _ = published(config)
    assert target.experts is not None and target.experts.bias_rate == 0.0


def test_adapters_reach_both_projections_of_the_stream() -> None:
    config = ModelConfig.model_validate({**BASE, "experts": EXPERTS})
    names = {path.rsplit(".", 1)[-1] for path in AdapterConfig().modules(config)}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= names
    assert not any(path.endswith("mlp.gate") for path in linears(config))


def test_a_small_twin_for_checks_has_latent_attention_too() -> None:
    small, words = small_model(ModelConfig.model_validate({"preset": "deepseek-v2-lite"}), 64)
    assert small.latent_attention is not None and small.latent_attention.q_rank is None
    assert words == "a small random deepseek_v2"


def test_layers_that_predict_more_tokens_are_left_out() -> None:
    config = ModelConfig.model_validate({**BASE, "num_layers": 2, "experts": EXPERTS})
    stored = ["model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight", "model.layers.2.self_attn.o_proj.weight"]
    skip: Any = vars(family_of("deepseek_v3"))["left_out"]
    assert skip(stored, config) == set(stored[1:])
    assert skip([stored[0], "model.layers.2.self_attn.o_proj.weight"], config) == set(), "a layer too many is an error, not an extra"
