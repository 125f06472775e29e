"""Families read and write config.json without losing anything, and refuse by name what headway does not compute."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.config.load import validate
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.families.base import family_for, family_names, family_of, to_hf_config
from headway.model.presets import FORMS, PRESETS

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
WRITABLE = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "smollm3": {"no_rope_layers": (1, 3)},
}


def test_the_shipped_families_are_the_files_of_the_folder() -> None:
    assert {
        "internlm",
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "z2all",
    } <= set(family_names())
    assert {
        "cohere2",
        "gemma2",
        "gemma3",
        "glm4",
        "gpt2",
        "granite",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi3",
    } <= set(family_names())


@pytest.mark.parametrize("name", WRITABLE)
def test_what_a_family_writes_it_reads_back(name: str) -> None:
    config = ModelConfig(
        family=name,
        vocab_size=96,
        num_kv_heads=2,
        head_dim=64,
        norm_eps=3e-4,
        rope_theta=5e4,
        **WRITABLE[name],
    )
    family = family_of(name)
    written = family.write(config)
    assert family_for(written) is family
    assert family.read(written) == config
    assert written["architectures"] == [family.ARCHITECTURE]
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 5e4


@pytest.mark.parametrize("name", WRITABLE)
@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, "rope_type is 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "low_freq_factor": 1.0}},
            "with low_freq_factor",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}},
            "beta_fast is 1.0",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type is 'dynamic'"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "beta_fast": 32}},
            "with beta_fast",
        ),
        ({"rope_parameters": {"rope_type": "linear"}}, "without factor"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "with full_attention"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor",
        ),
        ({"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}}, "rope_theta is given as"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"auto_map": {"AutoModel": "theirs.py"}}, "auto_map is"),
        ({"num_experts": 8}, "num_experts is 8"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "32"}, "hidden_size is"),
        ({"num_key_value_heads": 3}, "num_kv_heads is 3"),
    ],
)
def test_a_setting_headway_does_not_compute_is_refused_by_name(
    name: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        family_of(name).read({"model_type": name, **SHAPE, **settings})


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("llama", {"pretraining_tp": 2}, "pretraining_tp is 2"),
        ("llama", {"no_rope_layers": [1, 0]}, "no_rope_layers is"),
        ("qwen2", {"no_rope_layers": [1, 0]}, "no_rope_layers is"),
        ("smollm3", {"no_rope_layers": [2, 1]}, "no_rope_layers is"),
        ("llama", {"sliding_window": 8}, "sliding_window is 8"),
        ("llama", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is"),
        ("mistral", {"attention_bias": True}, "attention_bias is True"),
        ("mistral", {"layer_types": ["sliding_attention"] * 2}, "layer_types is"),
        ("qwen2", {"attention_bias": True}, "attention_bias is True"),
        ("qwen2", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is false"),
        ("qwen3", {"layer_types": ["full_attention"]}, "layer_types names 1 layers"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layer_types holds 'linear_attention'",
        ),
    ],
)
def test_a_setting_of_another_family_is_refused(
    name: str, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        family_of(name).read({"model_type": name, **SHAPE, **settings})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"qk_norm": True}),
        ("llama", {"sliding_window": 8}),
        ("llama", {"norm": "layernorm"}),
        ("llama", {"no_rope_layers": (1,)}),
        ("llama", {"output_bias": True}),
        ("mistral", {"qkv_bias": True}),
        ("mistral", {"ffn_bias": True}),
        ("mistral", {"sliding_window": 8, "window_layers": (1,)}),
        ("qwen2", {"qkv_bias": False}),
        ("qwen2", {"output_bias": True}),
        ("qwen2", {"no_rope_layers": (0,)}),
        ("qwen3", {"qk_norm": False}),
        ("qwen3", {"ffn_bias": True}),
        ("qwen3", {"qkv_bias": True}),
        ("qwen3", {"no_rope_layers": (0,)}),
        ("smollm3", {"output_bias": True}),
        ("smollm3", {"qk_norm": True}),
    ],
)
def test_a_model_a_family_cannot_say_is_not_written(name: str, settings: dict[str, Any]) -> None:
    config = ModelConfig(family=name, vocab_size=96, **{**WRITABLE[name], **settings})
    with pytest.raises(ConfigError, match=f"model\\.\\w+ is .* {name} model"):
        family_of(name).write(config)


def test_keys_that_change_nothing_are_read_over() -> None:
    extra = {
        "_name_or_path": "x",
        "transformers_version": "4.40.0",
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "unknown": None,
    }
    assert family_of("llama").read({**SHAPE, **extra}) == family_of("llama").read(SHAPE)


def test_absent_keys_mean_what_they_mean_to_transformers() -> None:
    bare = {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"}
    llama = family_of("llama").read(bare)
    assert (llama.kv_heads, llama.norm_eps, llama.rope_theta, llama.tie_embeddings) == (
        4,
        1e-6,
        10000.0,
        False,
    )
    mistral = family_of("mistral").read({**bare, "num_attention_heads": 8})
    assert (mistral.kv_heads, mistral.sliding_window, mistral.max_seq_len) == (8, 4096, 131072)
    assert family_of("qwen3").read(SHAPE).head_dim == 128


@pytest.mark.parametrize(
    ("settings", "width"),
    [
        ({}, 256),
        ({"block_ff_dim": 600}, 512),
        ({"intermediate_size": 385, "block_multiple_of": 1}, 256),
        ({"intermediate_size": 100, "block_multiple_of": 20, "block_ffn_dim_multiplier": 1.3}, 100),
        ({"intermediate_size": 100, "block_auto_adjust_ff_dim": False}, 100),
    ],
)
def test_lfm2_has_the_inner_width_of_transformers(settings: dict[str, Any], width: int) -> None:
    config = {"model_type": "lfm2", **SHAPE, "layer_types": ["conv", "full_attention"], **settings}
    assert family_of("lfm2").read(config).ffn_size == width
    transformers = pytest.importorskip("transformers")
    reference = transformers.Lfm2Config(**config)
    with torch.device("meta"):
        model = transformers.Lfm2ForCausalLM(reference)
    assert model.model.layers[0].feed_forward.w1.out_features == width


def test_published_lfm2_files_are_read_with_their_older_keys() -> None:
    config = {
        **SHAPE, "model_type": "lfm2", "full_attn_idxs": [1], "tie_embedding": False, "theta": 1000000.0, "block_use_swiglu": True,
        "conv_dim": 32, "norm_eps": 1e-3,
    }  # fmt: skip
    read = family_of("lfm2").read(config)
    assert read.short_convolution is not None
    assert read.short_convolution.layers == (0,)
    assert (read.tie_embeddings, read.rope_theta, read.norm_eps) == (False, 1e6, 1e-3)


@pytest.mark.parametrize(
    ("family", "first", "sliding"),
    [("qwen2", 2, (2, 3)), ("qwen3", 1, (1, 2, 3)), ("qwen2", 3, (3,)), ("qwen2", 4, None)],
)
def test_layers_from_max_window_layers_on_have_the_window_where_no_types_are_given(
    family: str, first: int, sliding: tuple[int, ...] | None
) -> None:
    """As transformers has it: `i >= max_window_layers` slides, counted from 0."""
    keys = {
        **SHAPE,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": first,
    }
    config = family_of(family).read(keys)
    assert (config.window_layers, config.sliding_window) == (
        sliding,
        None if sliding is None else 8,
    )
    assert [config.window_of(layer) for layer in range(4)] == [
        8 if sliding and layer in sliding else None for layer in range(4)
    ]


def test_an_unknown_family_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'mistral'"):
        family_of("mistrall")
    with pytest.raises(ConfigError, match="there is no module of that name"):
        family_of("no_such_lab.model")
    with pytest.raises(
        ConfigError,
        match=r"model_type is 'no_such_type'; headway reads .*gemma2, gemma3_text, .*llama, .*mistral.*z2all",
    ):
        family_for({"model_type": "no_such_type"})


@pytest.mark.parametrize("name", FORMS)
def test_a_family_alone_has_the_form_that_its_config_json_expresses(name: str) -> None:
    more: dict[str, Any] = (
        {"sliding_window": 8, "window_layers": (0, 2), "no_rope_layers": (1, 3)}
        if name == "cohere2"
        else {}
    )
    if name.startswith("deepseek"):
        kind = (
            {"router": "sigmoid", "bias_rate": 0.0}
            if name == "deepseek_v3"
            else {"normalize": False}
        )
        more = {
            "latent_attention": {"q_rank": 8},
            "experts": {"ffn_size": 16, "shared_ffn_size": 32, "aux_loss": 0.0, **kind},
        }
    if name == "qwen3_5_moe":
        # its files have no width of a plain feed-forward, and one form of the balancing loss
        more = {"ffn_size": 16, "experts": {"ffn_size": 16, "aux_layers": "pooled"}}
    # A rate of the balancing bias is the recipe's, not the file's.
    if name in ("glm4_moe", "ernie4_5_moe"):
        more = {"experts": {"ffn_size": 16, "shared_ffn_size": 32, "bias_rate": 0.0}}
    if name == "qwen2_moe":
        more = {"experts": {"ffn_size": 16}}
    if name == "minimax_m2":
        more = {"experts": {"bias_rate": 0.0}}
    if name == "lfm2_moe":
        more = {"experts": {"ffn_size": 16, "bias_rate": 0.0}}
    if name == "granitemoehybrid":
        # its files always say the scale of scores
        more = {"attention_scale": 0.125}
    config = ModelConfig(family=name, vocab_size=96, **more)
    written = family_of(name).write(config)
    again = family_of(name).read(written)
    assert again.with_(head_dim=None, num_kv_heads=None) == config
    assert ModelConfig(family=name, norm="rmsnorm").norm == "rmsnorm", "what is given counts more"


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_can_be_exported(name: str) -> None:
    config = ModelConfig(**{"vocab_size": 64, **PRESETS[name]})
    to_hf_config(config)
    assert config.embed_scale == (config.hidden_size**0.5 if name.startswith("gemma") else 1.0)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"rotary_fraction": 0.3, "head_dim": 10}, "rotary_fraction=0.3 is 3 channels"),
        ({"rope_local_theta": 1e4}, "rope_local_theta is given without sliding_window"),
        ({"qk_norm_over": "projection"}, "qk_norm_over is projection without qk_norm"),
        (
            {"parallel_block": True, "norm_placement": "both"},
            "parallel_block is given with norm_placement=both",
        ),
        (
            {"positions": "learned", "no_rope_layers": (1,)},
            "positions is learned and no_rope_layers is given",
        ),
        (
            {"rope_scaling": {"kind": "longrope"}},
            "longrope needs short_factor and long_factor of one length",
        ),
        (
            {"rope_scaling": {"kind": "longrope", "short_factor": (1.0,), "long_factor": (1.0,)}},
            "short_factor has 1 numbers",
        ),
        (
            {"rope_scaling": {"kind": "linear", "short_factor": (1.0,)}},
            "short_factor, which is for kind longrope",
        ),
        (
            {"head_gates": {}, "attention_softcap": 5.0},
            "head_gates is given with attention_softcap",
        ),
        ({"attention_softcap": 0.0}, "attention_softcap"),
    ],
)
def test_settings_of_the_model_that_contradict_each_other_are_refused(
    settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        validate(ModelConfig, settings)


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"model_type": "gemma2", "use_bidirectional_attention": True},
            "use_bidirectional_attention is true",
        ),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0"),
        (
            {"model_type": "gemma2", "hidden_activation": "relu"},
            "hidden_activation is 'relu'; headway computes silu",
        ),
        (
            {"model_type": "gemma3_text", "attn_logit_softcapping": 50.0},
            "attn_logit_softcapping is 50.0",
        ),
        ({"model_type": "gemma3", "text_config": 3}, "text_config is 3"),
        ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling is 0"),
        ({"model_type": "lfm2", "layer_types": ["conv"]}, "layer_types names 1 layers"),
        (
            {"model_type": "granitemoehybrid", "time_step_limit": [0.0, 0.1]},
            r"time_step_limit is \[0.0, 0.1\]; headway computes steps without a limit",
        ),
        (
            {"model_type": "granitemoehybrid", "mamba_d_head": 7},
            "mamba_d_head is 7 with mamba_n_heads 128; their product must be",
        ),
        (
            {"model_type": "granitemoehybrid", "layer_types": ["moe", 3]},
            "layer_types is .*; names of kinds are expected",
        ),
        ({"model_type": "lfm2_moe"}, "layer_types is missing; it must name conv or"),
        (
            {"model_type": "lfm2", "layer_types": ["conv", "mamba"]},
            "layer_types holds 'mamba'; headway computes conv and full_attention",
        ),
        (
            {"model_type": "lfm2", "full_attn_idxs": [1], "block_multiple_of": 0},
            "block_multiple_of is 0",
        ),
        (
            {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx is True",
        ),
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "without long_factor",
        ),
        (
            {
                "model_type": "olmo3",
                "rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}},
            },
            "headway rotates windowed layers unscaled",
        ),
    ],
)
def test_what_the_newer_families_do_not_compute_is_refused_by_name(
    config: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        family_for(config).read({**SHAPE, **config})


def test_a_gemma_3_with_pictures_is_read_as_its_text_part() -> None:
    text = {
        **SHAPE,
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    published = {
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {},
        "mm_tokens_per_image": 256,
    }
    family = family_for(published)
    config = family.read(published)
    assert (config.family, config.rope_local_theta, config.rope_theta) == (
        "gemma3",
        10_000.0,
        1_000_000.0,
    )
    assert (
        family.from_hf_name("language_model.model.layers.0.pre_feedforward_layernorm.weight")
        == "model.layers.0.post_attention_layernorm.weight"
    )
    assert (
        family.from_hf_name("vision_tower.vision_model.embeddings.patch_embedding.weight") is None
    )
    assert family.write(config)["model_type"] == "gemma3_text"


def test_a_users_own_module_is_a_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "my_lab"]:  # that of another test
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "__init__.py").write_text("")
    (tmp_path / "my_lab" / "own.py").write_text("from headway.model.families.llama import *\n")
    (tmp_path / "my_lab" / "bad.py").write_text("MODEL_TYPE = 'bad'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert family_of("my_lab.own").MODEL_TYPE == "llama"
    with pytest.raises(ConfigError, match="has no ARCHITECTURE"):
        family_of("my_lab.bad")
    for name in [n for n in sys.modules if n.startswith("my_lab")]:
        del sys.modules[name]


def test_a_family_written_for_the_last_release_works_and_is_told_the_new_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "last_years_family.py").write_text(
        "from headway.model.families.llama import ARCHITECTURE, MODEL_TYPE, read, write\n"
        "from headway.model.families import llama\n"
        "published = llama.to_hf_model\n"
        "def to_theirs(name): return 'old.' + name\n"
        "def to_ours(name): return name.removeprefix('old.')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    family = family_of("./last_years_family.py")
    assert family.to_hf_name("norm.weight") == "old.norm.weight"
    assert family.from_hf_name("old.norm.weight") == "norm.weight"
    assert "published to to_hf_model, to_theirs to to_hf_name" in caplog.text


def test_lists_of_layers_pass_as_json_writes_them() -> None:
    config = validate(
        ModelConfig, {"no_rope_layers": [0, 2], "sliding_window": 4, "window_layers": [1]}
    )
    assert (config.no_rope_layers, config.window_layers) == ((0, 2), (1,))


REAL = {
    "SmolLM2": ("llama", {
        "is_llama_config": True, "rope_interleaved": False, "mlp_bias": False, "attention_bias": False, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "pad_token_id": 2, "rope_theta": 100000,
    }),
    "SmolVLM's text": ("llama", {
        "neftune_noise_alpha": 0.0, "qk_layer_norms": False, "pixel_shuffle_factor": None, "use_resampler": False, "head_dim": 8,
    }),
    "Llama 1": ("llama", {"max_sequence_length": 2048, "pad_token_id": -1, "transformers_version": "4.28.0.dev0"}),
    "Falcon 3": ("llama", {"activation": "swiglu", "hidden_act": "silu", "head_dim": 8}),
    "PaddleNLP": ("llama", {
        "alibi": False, "paddlenlp_version": None, "rope_scaling_factor": 1.0, "rope_scaling_type": None, "use_recompute": False,
        "virtual_pp_degree": 1, "use_fused_rope": True, "use_flash_attention": True, "fuse_attention_qkv": True,
    }),
    "unsloth": ("llama", {
        "_model_name_or_path": "x/y", "unk_token_id": 0, "unsloth_version": "2025.1", "model_max_length": 4096, "use_sdpa": True,
        "layer_types": ["full_attention", "full_attention"], "use_sliding_window": False, "max_window_layers": 28,
    }),
    "R1-Distill-Qwen": ("qwen2", {"use_mrope": False, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 21}),
    "Mistral": ("mistral", {"sliding_window": None, "attention_bias": False, "mlp_bias": False, "head_dim": 8}),
    "Yi": ("llama", {"pretraining_tp": 1, "tie_word_embeddings": False, "num_experts": 0, "use_flash_attn": True}),
}  # fmt: skip


@pytest.mark.parametrize("name", REAL)
def test_real_files_are_read_over_keys_without_effect(name: str) -> None:
    kind, keys = REAL[name]
    config = {"model_type": kind, "num_key_value_heads": 2, **SHAPE}
    plain = family_for(config).read(
        {
            **config,
            **{
                key: keys[key]
                for key in ("rope_theta", "sliding_window", "head_dim")
                if key in keys
            },
        }
    )
    assert family_for(config).read({**config, **keys}) == plain


def test_one_line_names_every_key_that_headway_cannot_compute() -> None:
    config = {
        **SHAPE,
        "model_type": "llama",
        "rope_interleaved": True,
        "use_mrope": True,
        "num_experts": 8,
        "strange": 3,
        "odd": [1],
    }
    config |= {"hidden_size": "32", "vocab_size": None}
    with pytest.raises(ConfigError) as caught:
        family_of("llama").read(config)
    said = str(caught.value)
    assert "\n" not in said
    for words in (
        "rope_interleaved is True (headway computes only False)", "use_mrope is True", "num_experts is 8", "strange is 3, odd is [1]",
        "hidden_size is '32'; a whole number", "vocab_size is missing",
    ):  # fmt: skip
        assert words in said, said
