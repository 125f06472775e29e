"""Latent attention: what is refused, what is counted, and what of published folders is left out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from support.initial_weights import initialize

from headway.diagnose.equality import small_model
from headway.errors import ConfigError, HeadwayError
from headway.kernels.paged_attention import paged_reference
from headway.model import paged_layer
from headway.model.adapter.config import AdapterConfig, linears
from headway.model.adapter.rows import load_adapters
from headway.model.config import ModelConfig
from headway.model.families.base import family_of, pieces_of, to_hf_config
from headway.model.flops import token_flops
from headway.model.head_masks.masks import HeadMasks
from headway.model.latent_attention import LatentAttention
from headway.model.layout import active_parameters, num_parameters, param_specs
from headway.model.loading.huggingface import check_weights, read_config, read_weights
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.paged_rows import PagedRows
from headway.model.presets import PRESETS
from headway.model.router import Router
from headway.model.transformer import Transformer

LATENT = {"kv_rank": 16, "q_rank": 12, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
BASE: dict[str, Any] = {
    "family": "deepseek_v3",
    "hidden_size": 32,
    "num_heads": 4,
    "vocab_size": 64,
    "latent_attention": LATENT,
}
EXPERTS = {
    "num": 8,
    "per_token": 2,
    "ffn_size": 8,
    "shared_ffn_size": 16,
    "router": "sigmoid",
    "first_dense": 1,
    "bias_rate": 0.0,
}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_kv_heads": 2}, "num_kv_heads is 2; with latent_attention it is num_heads=4"),
        ({"head_dim": 8}, "head_dim is 8; with latent_attention it is 12"),
        ({"qk_norm": True}, "latent_attention is given with qk_norm=True"),
        ({"head_gates": {}}, "head_gates is given with latent_attention"),
        (
            {"latent_attention": {**LATENT, "value_head_dim": 13}},
            "must not exceed nope_head_dim + rope_head_dim=12",
        ),
        ({"latent_attention": {**LATENT, "rope_head_dim": 3}}, "multiple of 2"),
        (
            {"latent_attention": None, "rope_scaling": {"kind": "yarn", "mscale_all_dim": 1.0}},
            "which is for latent_attention",
        ),
        ({"experts": {**EXPERTS, "num_groups": 3}}, "num_groups is 3; it must divide num=8"),
        ({"experts": {**EXPERTS, "num_groups": 8, "groups_per_token": 1}}, "groups_per_token is 1"),
        ({"experts": {**EXPERTS, "num_groups": 8, "groups_per_token": 2}}, "use top1"),
    ],
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError) as error:
        ModelConfig.model_validate({**BASE, **settings})
    assert says in str(error.value)


def test_head_masks_are_refused_by_name() -> None:
    masks = HeadMasks(((True,) * 4,) * 4, 4, 2)
    with pytest.raises(ConfigError, match="latent attention, which has no KV heads to mask"):
        masks.check(ModelConfig.model_validate(BASE))


def test_a_router_takes_the_best_experts_of_the_best_groups() -> None:
    config = ModelConfig.model_validate(
        {
            **BASE,
            "experts": {**EXPERTS, "num_groups": 4, "groups_per_token": 2, "routed_scale": 3.0},
        }
    )
    # the groups' sums: 0.9, 0.95, 0.7, 0.82
    scores = torch.tensor([0.9, 0.0, 0.5, 0.45, 0.6, 0.1, 0.4, 0.42])
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
    big = ModelConfig.model_validate({"preset": "deepseek-v3"})
    lite = ModelConfig.model_validate({"preset": "deepseek-v2-lite"})
    assert num_parameters(big) == pytest.approx(671e9, rel=0.001)
    assert active_parameters(big) == pytest.approx(37.6e9, rel=0.01)
    assert num_parameters(lite) == pytest.approx(15.7e9, rel=0.01)
    assert active_parameters(lite) - lite.vocab * lite.hidden_size == pytest.approx(2.4e9, rel=0.03)


def test_arithmetic_counts_queries_and_values_by_their_own_widths() -> None:
    config = ModelConfig.model_validate({**BASE, "num_layers": 2})
    near = token_flops(config, 10)
    far = token_flops(config, 20)
    # layers, heads, channels of q and v, tokens
    assert far.attention - near.attention == 6 * 2 * 4 * (12 + 8) * 10
    assert near.matrices == far.matrices


def test_every_preset_has_a_form_in_transformers_or_says_why() -> None:
    for name in ("laptop-mla", "deepseek-v2-lite", "deepseek-v3"):
        config = ModelConfig.model_validate({"vocab_size": 64, "preset": name})
        again = family_of(config.family).read(to_hf_config(config)[1])
        assert again.latent_attention == config.latent_attention
        assert again.rope_scaling == config.rope_scaling
        assert again.experts is not None
        assert config.experts is not None
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
        to_hf_config(config)
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
def test_a_config_json_that_headway_does_not_compute_is_refused(
    changes: dict[str, Any], says: str
) -> None:
    config = ModelConfig.model_validate({**BASE, "experts": EXPERTS})
    keys = {**json.loads(json.dumps(to_hf_config(config)[1])), **changes}
    with pytest.raises(ConfigError) as error:
        family_of("deepseek_v3").read(keys)
    assert says in str(error.value)


def test_a_model_without_biases_is_exported_with_zeros() -> None:
    config = ModelConfig.model_validate({**BASE, "experts": {**EXPERTS, "bias_rate": None}})
    target, _ = to_hf_config(config)
    assert target.experts is not None
    assert target.experts.bias_rate == 0.0


def test_adapters_reach_both_projections_of_the_stream() -> None:
    config = ModelConfig.model_validate({**BASE, "experts": EXPERTS})
    names = {path.rsplit(".", 1)[-1] for path in AdapterConfig().modules(config)}
    assert {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"} <= names
    assert not any(path.endswith("mlp.gate") for path in linears(config))


def test_a_small_twin_for_checks_has_latent_attention_too() -> None:
    small, words = small_model(ModelConfig.model_validate({"preset": "deepseek-v2-lite"}), 64)
    assert small.latent_attention is not None
    assert small.latent_attention.q_rank is None
    assert words == "a small random deepseek_v2"
    big, _ = small_model(ModelConfig.model_validate({"preset": "deepseek-v3"}), 64)
    assert big.is_mixture(1)
    assert not big.is_mixture(0)
    assert num_parameters(big) < 20e6 + 2 * big.vocab * big.hidden_size


def test_layers_that_predict_more_tokens_are_left_out() -> None:
    config = ModelConfig.model_validate({**BASE, "num_layers": 2, "experts": EXPERTS})
    stored = [
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.eh_proj.weight",
        "model.layers.2.self_attn.o_proj.weight",
    ]
    skip: Any = vars(family_of("deepseek_v3"))["left_out"]
    assert skip(stored, config) == set(stored[1:])
    assert skip([stored[0], "model.layers.2.self_attn.o_proj.weight"], config) == set(), (
        "a layer too many is an error, not an extra"
    )


def build(**changes: Any) -> Transformer:
    config = ModelConfig.model_validate(
        {
            **BASE,
            "num_layers": 2,
            "max_seq_len": 64,
            "init_std": 0.3,
            "rope_interleaved": True,
            **changes,
        }
    )
    model = Transformer(config).requires_grad_(False)
    initialize(model, 3)
    return model


@pytest.mark.parametrize("q_rank", [None, 12])
def test_both_forms_over_a_cache_are_the_forward(q_rank: int | None) -> None:
    """Chunks of many tokens expand what is stored; single tokens meet it as it is."""
    model = build(latent_attention={**LATENT, "q_rank": q_rank}, attention_scale=0.5)
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(0))
    position = torch.arange(20).expand(2, -1)
    model.fuse_projections()
    rows = PagedRows(model, 2, 20)
    with torch.inference_mode():
        whole = model.hidden_states(tokens, position)
        pieces = [rows.read(tokens[:, :9]), rows.read(tokens[:, 9:15])]
        pieces += [rows.step(tokens[:, position])[:, None] for position in range(15, 20)]
    assert (torch.cat(pieces, 1) - whole).abs().max() < 2e-5


def test_a_token_takes_the_bytes_of_its_latent_and_shared_key() -> None:
    config = build().config
    channels = 16 + 4
    shape = CacheShape(config, None, 64, 8, torch.bfloat16)
    assert (shape.page_bytes, shape.state_bytes) == (2 * 8 * channels * 2, 0)
    paged = PagedCache(shape, slots=2, pages=5, snapshots=0, device=torch.device("cpu"))
    assert paged.num_bytes == 5 * shape.page_bytes
    v3 = ModelConfig.model_validate({"preset": "deepseek-v3"})
    assert CacheShape(v3, None, 4096, 1, torch.bfloat16).page_bytes == 61 * 576 * 2


def test_kernels_of_single_steps_see_a_wide_head_several_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By their references, which read the plans that the kernels read."""
    model = build(num_heads=6, latent_attention={**LATENT, "kv_rank": 300})
    config = model.config
    attention = model.blocks()["model.layers.0"].self_attn
    assert isinstance(attention, LatentAttention)
    monkeypatch.setattr(paged_layer, "MOST_QUERIES", 2)
    monkeypatch.setattr(paged_layer, "paged_attention", paged_reference)
    assert paged_layer.copies_of_head(6, 1, config.cached_size) == 3
    paged = PagedCache(
        CacheShape(config, None, 8, 4, torch.float32),
        slots=2,
        pages=4,
        snapshots=0,
        device=torch.device("cpu"),
    )
    paged.table.append(0, [2])
    paged.table.append(1, [1])
    paged.table.flush()
    batch = paged.decode_batch(2)
    batch.slots.copy_(torch.arange(2))
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        q = torch.randn(2, 1, 6, config.cached_size, generator=generator)
        k = torch.randn(2, 1, 1, config.cached_size, generator=generator)
        position = torch.full((2,), step)
        batch.most = step + 1
        right = paged.layers[1].step(q, k, k, position, batch)  # the plain path, in another layer
        output = paged.layers[0]._step_cuda(q, k, k, position, batch, None)
        assert (output - right).abs().max() < 1e-5


def test_an_adapter_per_request_may_not_change_what_requests_share(tmp_path: Path) -> None:
    model = build()
    settings = {
        "peft_type": "LORA",
        "r": 16,
        "lora_alpha": 32,
        "target_modules": ["kv_b_proj"],
        "base_model_name_or_path": "x",
    }
    (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
    shapes = AdapterConfig(targets=("kv_b_proj",)).shapes(model.config)
    save_file(
        {f"base_model.model.{name}": torch.zeros(shape) for name, shape in shapes.items()},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(
        ConfigError,
        match="changes kv_b_proj, which makes keys and values from the shared cache of latents",
    ):
        load_adapters(model, model.config, {"own": tmp_path})


def write_blocks(
    folder: Path, model: Transformer, block: int, *, further: bool = True
) -> dict[str, torch.Tensor]:
    """A folder as V3 is published: 8-bit matrices with scales in another file, and a layer that predicts more tokens. What it says."""
    exact: dict[str, torch.Tensor] = {}
    tensors: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    config = model.config
    for spec in param_specs(config):
        value = dict(model.named_parameters())[spec.name].detach()
        pieces = pieces_of(family_of(config.family), spec, config)
        for piece, part in zip(
            pieces, value.unbind(0) if len(pieces) > 1 else [value], strict=True
        ):
            if (
                part.dim() < 2
                or "norm" in piece.name
                or piece.name.startswith(("model.embed", "lm_head"))
                or ".gate.weight" in piece.name
            ):
                tensors[piece.name] = part.bfloat16().contiguous()
                exact[piece.name] = tensors[piece.name].float()
                continue
            scale = (
                torch.rand(
                    -(-part.shape[0] // block),
                    -(-part.shape[1] // block),
                    generator=torch.Generator().manual_seed(7),
                )
                + 0.5
            )
            wide = scale.repeat_interleave(block, 0)[: part.shape[0]].repeat_interleave(block, 1)[
                :, : part.shape[1]
            ]
            tensors[piece.name] = (part / wide).to(torch.float8_e4m3fn)
            scales[f"{piece.name}_scale_inv"] = scale
            exact[piece.name] = (tensors[piece.name].float() * wide).bfloat16().float()
    if further:
        prefix = f"model.layers.{config.num_layers}."
        tensors |= {
            f"{prefix}eh_proj.weight": torch.zeros(2, 2).to(torch.float8_e4m3fn),
            f"{prefix}enorm.weight": torch.zeros(2),
        }
        scales[f"{prefix}eh_proj.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "a.safetensors")
    save_file(scales, folder / "b.safetensors")
    files = dict.fromkeys(tensors, "a.safetensors") | dict.fromkeys(scales, "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    method = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "weight_block_size": [block, block],
        "activation_scheme": "dynamic",
    }
    written = {
        **to_hf_config(config)[1],
        "num_nextn_predict_layers": 1,
        "quantization_config": method,
    }
    (folder / "config.json").write_text(json.dumps(written))
    return exact


def test_published_8_bit_weights_are_read_as_floats(tmp_path: Path) -> None:
    model = build(experts=EXPERTS)
    exact = write_blocks(tmp_path, model, 5)
    config = read_config(tmp_path)
    check_weights(tmp_path, config)
    weights = dict(read_weights(tmp_path, config))
    assert weights.keys() == dict(model.named_parameters()).keys()
    for spec in param_specs(config):
        pieces = pieces_of(family_of("deepseek_v3"), spec, config)
        parts = [exact[piece.name] for piece in pieces]
        wanted = torch.stack(parts) if len(parts) > 1 else parts[0]
        assert torch.equal(weights[spec.name].float(), wanted), spec.name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"weight_block_size": None}, r"the weights are quantised \(FP8\)"),
        ({"activation_scheme": "static"}, r"the weights are quantised \(FP8\)"),
        ({"weight_block_size": [4, 4]}, r"_scale_inv has shape .*; blocks of \[4, 4\] make it"),
    ],
)
def test_other_8_bit_weights_are_refused_in_one_line(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    write_blocks(tmp_path, build(experts=EXPERTS), 5)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(HeadwayError, match=says) as error:
        list(read_weights(tmp_path, read_config(tmp_path)))
    assert "\n" not in str(error.value)
