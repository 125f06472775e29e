"""gpt-oss as it is published: mxfp4 blocks of experts in several files, the first form of its config.json, its chat template.

tests/unit/model/families/test_transformers_parity.py compares the family with transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.byte_model import byte_tokenizer

from headway.checkpoint.stored_model import find_model
from headway.errors import CheckpointError, ConfigError
from headway.model.config import ModelConfig
from headway.model.families import gpt_oss
from headway.model.layout import active_parameters, num_parameters
from headway.model.loading.huggingface import check_weights, read_config, read_weights
from headway.model.loading.mxfp4 import dequantise
from headway.tokenizer.chat import render, render_prompt
from headway.tokenizer.chat_template import Turn
from headway.tokenizer.load import load_tokenizer

CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "eos_token_id": 9,
    "experts_per_token": 2, "num_experts_per_tok": 2, "head_dim": 16, "hidden_act": "silu", "hidden_size": 64, "initial_context_length": 32,
    "initializer_range": 0.02, "intermediate_size": 32, "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 128, "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2, "num_local_experts": 3,
    "output_router_logits": False, "pad_token_id": 8, "rms_norm_eps": 1e-05, "rope_theta": 150000, "router_aux_loss_coef": 0.9,
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 32, "rope_type": "yarn", "truncate": False,
    },
    "sliding_window": 8, "swiglu_limit": 7.0, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 96,
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
}  # fmt: skip


def packed(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales of a random tensor [..., outputs, inputs]."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(
        0, 256, (*shape[:-1], shape[-1] // 32, 16), dtype=torch.uint8, generator=generator
    )
    return blocks, torch.randint(
        117, 129, blocks.shape[:-1], dtype=torch.uint8, generator=generator
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files: blocks in the one, scales in the other, so that neither is enough."""
    published = tmp_path_factory.mktemp("gpt_oss")
    (published / "config.json").write_text(json.dumps(CONFIG))
    config = read_config(published)
    generator = torch.Generator().manual_seed(0)
    files: dict[str, dict[str, torch.Tensor]] = {"a.safetensors": {}, "b.safetensors": {}}
    from headway.model.families.base import pieces_of
    from headway.model.layout import param_specs

    for spec in param_specs(config):
        (piece,) = pieces_of(gpt_oss, spec, config)  # pyright: ignore[reportArgumentType]
        if piece.transposed:
            continue
        shape = (spec.shape[0], piece.stop) if piece.dim is not None else spec.shape
        files["a.safetensors"][piece.name] = (
            torch.randn(shape, generator=generator) * 0.2
        ).bfloat16()
    for layer in range(2):
        for name, shape in (("gate_up_proj", (3, 64, 64)), ("down_proj", (3, 64, 32))):
            blocks, scales = packed(shape, layer)
            path = f"model.layers.{layer}.mlp.experts.{name}"
            files["a.safetensors"][f"{path}_blocks"] = blocks
            files["b.safetensors"][f"{path}_scales"] = scales
    for file, held in files.items():
        save_file(held, published / file)
    index = {name: file for file, held in files.items() for name in held}
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return published


def test_blocks_are_dequantised_as_transformers_does() -> None:
    reference = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales = packed((3, 8, 96), 5)
    blocks[0, 0, 0] = torch.arange(0, 256, 17, dtype=torch.uint8)  # every value, in both halves
    scales[1, 0] = torch.tensor([0, 40, 254], dtype=torch.uint8)  # beyond what fp16 could hold
    expected = reference.convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    values = dequantise(blocks, scales)
    assert values.dtype == torch.bfloat16
    assert torch.equal(values, expected)


def test_a_published_folder_loads_expert_by_expert_into_our_layout(folder: Path) -> None:
    config = read_config(folder)
    check_weights(folder, config)
    weights = dict(read_weights(folder, config))
    blocks, scales = packed((3, 64, 64), 1)
    whole = dequantise(blocks, scales)
    experts = "model.layers.1.mlp.experts."
    assert torch.equal(weights[experts + "gate_proj.weight"], whole[:, ::2])
    assert torch.equal(weights[experts + "up_proj.weight"], whole[:, 1::2])
    assert torch.equal(weights[experts + "down_proj.weight"], dequantise(*packed((3, 64, 32), 1)))
    assert weights[experts + "up_proj.bias"].shape == (3, 32)


def test_a_published_folder_computes_what_transformers_computes_of_it(
    folder: Path, tmp_path: Path
) -> None:
    """Through our export, in bf16 under the stock names."""
    transformers = pytest.importorskip("transformers")
    from headway.export.huggingface import export_model
    from headway.kernels.attention import causal_mask
    from headway.model.transformer import Transformer

    export_model(folder, tmp_path / "out", dtype="bfloat16")
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert "quantization_config" not in written
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", attn_implementation="eager", dtype=torch.float32
    ).eval()
    config = read_config(folder)
    ours = Transformer(config)
    ours.load_state_dict(dict(read_weights(folder, config)), strict=True)
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits = ours.logits(ours(tokens, torch.arange(20)[None], causal_mask(1, 20)))
        expected = reference(tokens).logits
    assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_keys_of_the_first_files_are_read(folder: Path) -> None:
    config = read_config(folder)
    assert config.attention_sinks
    assert config.qkv_bias
    assert config.output_bias
    assert config.window_layers == (0,)
    assert config.rope_scaling is not None
    assert config.rope_scaling.kind == "yarn"
    assert not config.rope_scaling.truncate
    experts = config.experts
    assert experts is not None
    assert experts.swiglu_limit == 7.0
    assert experts.swiglu_alpha == 1.702
    assert experts.per_token == 2


def test_experts_are_balanced_where_the_file_asks_for_router_logits(folder: Path) -> None:
    silent = read_config(folder).experts
    assert silent is not None
    assert silent.aux_loss == 0.0, "output_router_logits is false: no balancing loss of weight 0.9"
    asked = gpt_oss.read({**plain(), "output_router_logits": True}).experts
    assert asked is not None
    assert asked.aux_loss == 0.9


def test_keys_that_a_file_leaves_out_have_the_published_values() -> None:
    keys = plain()
    for name in ("rope_scaling", "rope_theta", "layer_types"):
        keys.pop(name, None)
    config = gpt_oss.read(keys)
    assert config.rope_theta == 150_000
    assert config.rope_scaling is not None
    assert config.rope_scaling.factor == 32
    assert config.window_layers == (0,), "every other layer, the first one too"


def plain() -> dict[str, Any]:
    return {key: value for key, value in CONFIG.items() if key != "quantization_config"}


def test_keys_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ConfigError, match="experts_per_token is 4 and num_experts_per_tok is 2"):
        gpt_oss.read({**plain(), "experts_per_token": 4})


def test_weights_quantised_in_another_way_are_refused(tmp_path: Path) -> None:
    config = {**CONFIG, "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="bitsandbytes"):
        read_config(tmp_path)


def test_blocks_and_scales_that_do_not_belong_together_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    tensors = {**load_file(folder / "a.safetensors"), **load_file(folder / "b.safetensors")}
    scales = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[scales] = tensors[scales][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"down_proj_blocks is U8 \[3, 64, 1, 16\] and .*down_proj_scales U8 \[3, 63, 1\]",
    ):
        check_weights(tmp_path, read_config(tmp_path))


def test_a_model_without_sinks_or_a_swiglu_limit_is_not_written(folder: Path) -> None:
    config = read_config(folder)
    with pytest.raises(ConfigError, match="attention_sinks is False"):
        gpt_oss.write(config.with_(attention_sinks=False))
    assert config.experts is not None
    unlimited = {**config.experts.model_dump(), "swiglu_limit": None}
    with pytest.raises(ConfigError, match="swiglu_limit is null"):
        gpt_oss.write(config.with_(experts=unlimited))


def test_a_family_name_is_enough_for_its_form() -> None:
    config = ModelConfig.model_validate({"family": "gpt_oss", "experts": {"num": 4}})
    assert config.attention_sinks
    assert config.experts is not None
    assert config.experts.num == 4
    assert config.experts.bias
    assert config.experts.router_bias
    assert config.experts.swiglu_limit == 7.0


@pytest.mark.parametrize(
    ("preset", "parameters", "active_billions"),
    [("gpt-oss-20b", 20_914_757_184, 3.6), ("gpt-oss-120b", 116_829_156_672, 5.1)],
)
def test_presets_have_the_published_sizes(
    preset: str, parameters: int, active_billions: float
) -> None:
    config = ModelConfig(preset=preset)
    embedding = 201088 * 2880
    assert num_parameters(config) == parameters
    assert round((active_parameters(config) - embedding) / 1e9, 1) == active_billions


def test_a_chat_template_with_channels_loads_with_the_folder(tmp_path: Path) -> None:
    """A small one of its kind: roles and channels between special tokens."""
    byte_tokenizer("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>").save(
        tmp_path
    )
    (tmp_path / "chat_template.jinja").write_text(
        "{%- for message in messages -%}<|start|>{{ message.role }}{%- if message.role == 'assistant' -%}<|channel|>final{%- endif -%}"
        "<|message|>{{ message.content }}{{ '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"
    )
    tokenizer = load_tokenizer(tmp_path)
    ids, mask = render([Turn("user", "Hi"), Turn("assistant", "Yes")], "tokenizer", tokenizer)
    text = tokenizer.decode(ids.tolist())
    assert (
        text
        == "<|start|>user<|message|>Hi<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>"
    )
    assert tokenizer.decode(ids[mask].tolist()) == "<|channel|>final<|message|>Yes<|return|>", (
        "an answer begins with its channel"
    )
    assert tokenizer.decode(render_prompt([Turn("user", "Hi")], "tokenizer", tokenizer)).endswith(
        "<|start|>assistant"
    )


def test_a_published_folder_is_found_as_a_model(folder: Path) -> None:
    assert find_model(folder).config.family == "gpt_oss"
