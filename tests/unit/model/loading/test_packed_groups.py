"""AWQ and GPTQ folders are read as the whole numbers, zeros and scales that they hold, bit for bit, and other variants are refused in one line."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.family_shapes import FAMILY_SHAPES
from support.packed_folders import Packing, pack_folder, packed_matrix, write_two

from headway.diagnose.model_folder import examine_model
from headway.errors import CheckpointError, ConfigError, HeadwayError
from headway.export.huggingface import export_huggingface, export_model
from headway.model.config import ModelConfig
from headway.model.families.base import family_of, pieces_of
from headway.model.layout import param_specs
from headway.model.loading.huggingface import check_weights, read_config, read_weights
from headway.model.loading.packed_groups import GroupFormat, PackedParts, dequantised

CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    max_seq_len=64,
)
PACKINGS = {
    "awq": Packing("awq"),
    "awq, a group for all": Packing("awq", group_size=-1),
    "gptq, symmetric": Packing("gptq", is_symmetric=True),
    "gptq, asymmetric": Packing("gptq"),
    "gptq, inputs in another order": Packing("gptq", is_reordered=True),
    "gptq, a group for all": Packing("gptq", group_size=-1),
    "gptq, 8 bits": Packing("gptq", bits=8),
    "gptq, 8 bits, symmetric, in another order": Packing(
        "gptq", bits=8, is_symmetric=True, is_reordered=True
    ),
    "gptq_v2": Packing("gptq", is_second_format=True),
    "gptq_v2, 8 bits": Packing("gptq", bits=8, is_second_format=True),
    "a last group that is smaller": Packing("gptq", group_size=40),
}
QKV = "model.layers.0.self_attn.q_proj"


def written(config: ModelConfig, folder: Path) -> Path:
    torch.manual_seed(0)
    weights = ((spec.name, torch.randn(spec.shape)) for spec in param_specs(config))
    export_huggingface(config, weights, folder, tokenizer=None)
    # Later changes of a test would be damage.
    (folder / "headway_digests.json").unlink()
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(CONFIG, tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture
def gptq(plain: Path, tmp_path: Path) -> Path:
    pack_folder(plain, tmp_path / "gptq", Packing("gptq", is_reordered=True))
    return tmp_path / "gptq"


def quantise_config(folder: Path, how: Packing) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": how.settings()}))


def pack_one(folder: Path, ending: str, how: Packing) -> tuple[str, torch.Tensor]:
    """Pack the matrix of a folder whose name ends so; its name and exact values."""
    stored = load_file(folder / "model.safetensors")
    name = next(name for name in stored if name.endswith(ending))
    outputs, inputs = stored.pop(name).shape
    parts, exact = packed_matrix(outputs, inputs, how, torch.Generator().manual_seed(2))
    module = name.removesuffix(".weight")
    stored |= {f"{module}.{kind}": part for kind, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    quantise_config(folder, how)
    return name, exact


def change(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {**load_file(folder / "a.safetensors"), **load_file(folder / "b.safetensors")}


def read(folder: Path) -> dict[str, torch.Tensor]:
    config = read_config(folder)
    check_weights(folder, config)
    return dict(read_weights(folder, config))


@pytest.mark.parametrize("name", PACKINGS)
def test_weights_are_those_that_the_packed_numbers_stand_for(
    name: str, plain: Path, tmp_path: Path
) -> None:
    exact = pack_folder(plain, tmp_path, PACKINGS[name])
    weights = read(tmp_path)
    for spec in param_specs(read_config(tmp_path)):
        assert torch.equal(weights[spec.name], exact[spec.name]), spec.name


def test_parts_of_a_joined_matrix_are_cut_from_the_packed_whole(tmp_path: Path) -> None:
    config = CONFIG.with_(family="phi3")
    exact = pack_folder(
        written(config, tmp_path / "plain"), tmp_path / "packed", Packing("gptq", is_reordered=True)
    )
    weights = read(tmp_path / "packed")
    for spec in param_specs(config):
        pieces = pieces_of(family_of("phi3"), spec, config)
        whole = exact[pieces[0].name]
        if pieces[0].dim is not None:
            whole = whole[pieces[0].start : pieces[0].stop]
        assert torch.equal(weights[spec.name], whole), spec.name


def test_experts_that_are_packed_one_by_one_are_stacked(tmp_path: Path) -> None:
    config = CONFIG.with_(family="mixtral", experts={"num": 4, "per_token": 2})
    plain = written(config, tmp_path / "plain")
    _, exact = pack_one(plain, "layers.1.block_sparse_moe.experts.2.w1.weight", Packing("awq"))
    assert torch.equal(read(plain)["model.layers.1.mlp.experts.gate_proj.weight"][2], exact)


def test_a_group_index_of_another_order_changes_the_result(plain: Path, gptq: Path) -> None:
    reordered = read(gptq)
    stored = tensors(gptq)
    for name in stored:
        if name.endswith("g_idx"):
            stored[name] = stored[name].sort().values
    write_two(gptq, stored, {})
    sorted_groups = read(gptq)
    assert not torch.equal(reordered[f"{QKV}.weight"], sorted_groups[f"{QKV}.weight"])

    # In that order the index says no more than the group size, and may be absent.
    change(gptq, desc_act=False)
    write_two(gptq, {name: v for name, v in stored.items() if not name.endswith("g_idx")}, {})
    assert torch.equal(read(gptq)[f"{QKV}.weight"], sorted_groups[f"{QKV}.weight"])


def test_a_zero_of_the_first_format_wraps_around() -> None:
    parts = PackedParts(
        torch.zeros(1, 8, dtype=torch.int32),
        torch.full((1, 1), -1, dtype=torch.int32),  # 15 in every place: a zero of 16 is 0
        torch.ones(1, 8),
        None,
    )
    assert dequantised("x.weight", parts, GroupFormat("gptq", 4, -1, 1)).eq(0).all()
    assert dequantised("x.weight", parts, GroupFormat("gptq", 4, -1, 0)).eq(-15).all()


def test_settings_in_a_file_of_their_own_are_read(plain: Path, tmp_path: Path) -> None:
    how = Packing("gptq", bits=8)
    exact = pack_folder(plain, tmp_path, how)
    config = json.loads((tmp_path / "config.json").read_text())
    settings = config.pop("quantization_config")
    del settings["quant_method"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "quantize_config.json").write_text(json.dumps(settings))
    assert torch.equal(read(tmp_path)[f"{QKV}.weight"], exact[f"{QKV}.weight"])


def test_biases_of_zeros_that_tools_add_are_left_out_and_others_refused(gptq: Path) -> None:
    stored = tensors(gptq) | {f"{QKV}.bias": torch.zeros(32)}
    write_two(gptq, stored, {})
    assert f"{QKV}.bias" not in read(gptq)
    stored[f"{QKV}.bias"][3] = 1e-3
    write_two(gptq, stored, {})
    with pytest.raises(CheckpointError, match=rf"{QKV}\.bias is among the weights"):
        read(gptq)


def test_an_export_is_plain_and_holds_the_same_weights(gptq: Path, tmp_path: Path) -> None:
    weights = read(gptq)
    export_model(gptq, tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], value) for name, value in weights.items())


def test_one_line_says_that_weights_are_dequantised(
    gptq: Path, plain: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "headway"):
        read(plain)
        read(gptq)
    (line,) = caplog.messages
    assert "quantised (GPTQ, 4 bits, groups of 16) and are dequantised" in line


def test_the_doctor_says_how_weights_are_stored_and_what_comes_of_them(gptq: Path) -> None:
    report = examine_model(gptq, compares=False)
    line = next(check for check in report.checks if check.name == "weights")
    assert report.is_usable
    assert "GPTQ, 4 bits, groups of 16, dequantised while they are read" in line.detail


VARIANTS: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {"bits": 3}, r"quantization_config\.bits is 3; .* 4 or 8"),
    ("gptq", {"bits": None}, r"quantization_config\.bits is null"),
    ("gptq", {"bits": True}, r"quantization_config\.bits is true"),
    ("gptq", {"checkpoint_format": "marlin"}, r'checkpoint_format is "marlin"; .*"gptq_v2"'),
    ("gptq", {"format": "gptq_v2"}, r'format is "gptq_v2"; .*\'gptq\', as checkpoint_format says'),
    ("gptq", {"is_marlin_format": True}, r"is_marlin_format is true"),
    ("gptq", {"pack_dtype": "int8"}, r'pack_dtype is "int8"; .*"int32"'),
    ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic is .*the same packing"),
    ("gptq", {"desc_act": "yes"}, r'desc_act is "yes"'),
    ("gptq", {"group_size": 0}, r"group_size is 0; .*a number of inputs, or -1"),
    ("awq", {"bits": 8}, r"quantization_config\.bits is 8; .* with 4"),
    ("awq", {"version": "gemv"}, r'version is "gemv"; .*"gemm"'),
    ("awq", {"version": "marlin"}, r'version is "marlin"'),
    ("awq", {"zero_point": False}, r"zero_point is false; .*true"),
    ("awq", {"backend": "llm-awq"}, r'backend is "llm-awq"'),
]


@pytest.mark.parametrize(("method", "changes", "says"), VARIANTS)
def test_other_variants_are_refused_in_one_line(
    method: str, changes: dict[str, Any], says: str, plain: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_bytes((plain / "config.json").read_bytes())
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = Packing(method).settings() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=says) as error:
        read_config(tmp_path)
    assert "\n" not in str(error.value)
    assert "Give the model they were made from." in str(error.value)


def damages() -> Iterator[tuple[str, dict[str, torch.Tensor | None], str]]:
    words = torch.zeros(4, 32, dtype=torch.int32)
    yield "no scales", {"scales": None}, r"q_proj\.scales is not among the weights"
    yield "no zeros", {"qzeros": None}, r"q_proj\.qzeros is not among the weights"
    yield "no order", {"g_idx": None}, r"q_proj\.g_idx is not among the weights"
    yield "few scales", {"scales": torch.ones(1, 32).half()}, r"q_proj\.scales is F16 \[1, 32\]"
    yield "wide zeros", {"qzeros": words}, r"q_proj\.qzeros is I32 \[4, 32\].*make it I32 \[2, 4\]"
    yield "whole scales", {"scales": words[:2]}, r"q_proj\.scales is I32 \[2, 32\]"
    yield "float codes", {"qweight": torch.ones(4, 32)}, r"q_proj\.qweight is F32 \[4, 32\]"
    yield "flat codes", {"qweight": words.flatten()}, r"q_proj\.qweight is I32 \[128\]"
    yield (
        "no group",
        {"g_idx": torch.full((32,), 2).int()},
        r"g_idx names the groups 2 to 2; 0 to 1",
    )
    yield "short index", {"g_idx": torch.zeros(8).int()}, r"g_idx is I32 \[8\].*make it I32 \[32\]"
    yield "a plain weight too", {"weight": torch.ones(32, 32)}, r"has both .*qweight and .*weight;"


@pytest.mark.parametrize(("name", "changes", "says"), list(damages()))
def test_parts_that_do_not_fit_are_refused_before_a_wrong_weight_is_read(
    name: str, changes: dict[str, torch.Tensor | None], says: str, gptq: Path
) -> None:
    stored = tensors(gptq)
    for kind, value in changes.items():
        if value is None:
            del stored[f"{QKV}.{kind}"]
        else:
            stored[f"{QKV}.{kind}"] = value
    write_two(gptq, stored, {})
    with pytest.raises(HeadwayError, match=says) as error:
        read(gptq)
    assert "\n" not in str(error.value)
    assert "ownload the " in str(error.value)


def test_a_packed_weight_of_another_shape_than_the_config_says_is_refused(gptq: Path) -> None:
    stored = tensors(gptq)
    parts, _ = packed_matrix(
        40, 32, Packing("gptq", is_reordered=True), torch.Generator().manual_seed(0)
    )
    stored |= {f"{QKV}.{kind}": part for kind, part in parts.items()}
    write_two(gptq, stored, {})
    with pytest.raises(CheckpointError, match=rf"{QKV}\.weight has shape \[40, 32\].*\[32, 32\]"):
        read(gptq)


def test_a_family_that_stores_weights_transposed_is_refused(tmp_path: Path) -> None:
    plain = written(
        CONFIG.with_(family="gpt2", num_kv_heads=4, qkv_bias=True, **FAMILY_SHAPES["gpt2"]),
        tmp_path / "plain",
    )

    name, _ = pack_one(plain, "h.0.attn.c_proj.weight", Packing("gptq", group_size=-1))
    with pytest.raises(CheckpointError, match=rf"{name} is packed, and .*\[in, out\]"):
        read(plain)


def test_packed_pickles_are_refused(plain: Path, gptq: Path) -> None:
    stored = tensors(gptq)
    for name in ("a.safetensors", "b.safetensors", "model.safetensors.index.json"):
        (gptq / name).unlink()
    torch.save(stored, gptq / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"in GPTQ are read from safetensors"):
        read(gptq)


def test_a_class_of_transformers_takes_no_packed_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = {
        "model_type": "stablelm",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_config(tmp_path).family == "transformers"
    quantise_config(tmp_path, Packing("awq"))
    with pytest.raises(ConfigError, match=r"the weights are quantised \(AWQ\)"):
        read_config(tmp_path)


def test_a_packed_text_part_is_read_and_exported_plain_in_the_whole_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from support.whole_cases import build_whole

    folder = tmp_path / "whole"
    build_whole("llava").save_pretrained(folder)
    name, exact = pack_one(folder, "layers.1.mlp.up_proj.weight", Packing("awq"))
    head, exact_head = pack_one(folder, "lm_head.weight", Packing("awq"))
    weights = read(folder)
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], exact)
    assert torch.equal(weights["lm_head.weight"], exact_head)

    export_model(folder, tmp_path / "out", dtype="float32")
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())
    exported: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        exported |= load_file(file)
    assert torch.equal(exported[name], exact)
    assert torch.equal(exported[head], exact_head)


def test_a_packed_vision_tower_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    from support.whole_cases import build_whole

    build_whole("llava").save_pretrained(tmp_path)
    name, _ = pack_one(tmp_path, "linear_1.weight", Packing("awq"))
    with pytest.raises(ConfigError, match=rf"{name} is packed \(AWQ.*no part of the text model"):
        read(tmp_path)
