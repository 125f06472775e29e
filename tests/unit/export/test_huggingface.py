"""An export is a whole folder or none, replaces only what it wrote itself, and whatever is wrong with a folder is said in one line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.checkpoint.save import save_checkpoint
from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.errors import CheckpointError, ConfigError
from headway.export.huggingface import export_huggingface, export_model
from headway.infer.load import load_model
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.model.loading.huggingface import read_config, read_weights
from headway.parallel.box import StateTensor
from headway.runtime.digests import write_digests
from headway.tokenizer.load import Tokenizer

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=64,
)


def random_weights(config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    for spec in param_specs(config):
        yield spec.name, initial_value(spec, config, 4)


def tokenizer_folder(folder: Path) -> Path:
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    Tokenizer(backend, {"bos": "<s>", "eos": "</s>", "pad": "<pad>"}).save(folder)
    return folder


@pytest.fixture
def out(tmp_path: Path) -> Path:
    export_huggingface(
        CONFIG,
        random_weights(CONFIG),
        tmp_path / "out",
        tokenizer=tokenizer_folder(tmp_path / "tokenizer"),
    )
    return tmp_path / "out"


def change(out: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Add, replace or drop tensors of an export."""
    weights: dict[str, Any] = {**load_file(out / "model.safetensors"), **tensors}
    save_file(
        {name: value for name, value in weights.items() if value is not None},
        out / "model.safetensors",
    )
    write_digests(out)


def test_config_and_generation_config_carry_the_tokenizers_ids(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    generation = json.loads((out / "generation_config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        256,
        257,
        258,
    )
    assert generation["eos_token_id"] == 257
    assert config["dtype"] == config["torch_dtype"] == "float32"


def test_autotokenizer_reads_the_exported_tokenizer(out: Path) -> None:
    from transformers import AutoTokenizer

    exported = AutoTokenizer.from_pretrained(str(out))
    ours = load_model(out).tokenizer
    assert ours is not None
    text = "héllo wörld\n 12"
    assert exported(text)["input_ids"] == ours.encode(text)
    assert exported.eos_token_id == ours.eos_id == 257


def test_a_large_export_is_cut_into_files_that_read_back_the_same(tmp_path: Path) -> None:
    export_huggingface(
        CONFIG, random_weights(CONFIG), tmp_path / "out", tokenizer=None, max_shard_bytes=30_000
    )
    files = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    for (name, value), (ours, original) in zip(
        read_weights(tmp_path / "out", CONFIG), random_weights(CONFIG), strict=True
    ):
        assert name == ours
        assert torch.equal(value, original)
    (tmp_path / "out" / files[1]).unlink()
    with pytest.raises(
        CheckpointError, match=r"no such file, but model.safetensors.index.json lists it"
    ):
        list(read_weights(tmp_path / "out", CONFIG))


def test_bf16_halves_the_file_and_rounds_once(tmp_path: Path) -> None:
    export_huggingface(
        CONFIG, random_weights(CONFIG), tmp_path / "out", tokenizer=None, dtype="bfloat16"
    )
    for (_, value), (_, original) in zip(
        read_weights(tmp_path / "out", CONFIG), random_weights(CONFIG), strict=True
    ):
        assert torch.equal(value, original.bfloat16())


def test_an_earlier_export_is_replaced_and_anything_else_is_left_alone(
    out: Path, tmp_path: Path
) -> None:
    before = (out / "model.safetensors").read_bytes()
    other = ((name, value + 1) for name, value in random_weights(CONFIG))
    export_huggingface(CONFIG, other, out, tokenizer=None)
    assert (out / "model.safetensors").read_bytes() != before
    assert not (out / "tokenizer.json").exists()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="contains something other than an earlier export"):
        export_huggingface(CONFIG, random_weights(CONFIG), foreign, tokenizer=None)
    assert [p.name for p in foreign.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="which is a file"):
        export_huggingface(CONFIG, random_weights(CONFIG), foreign / "thesis.txt", tokenizer=None)


def test_an_export_that_fails_midway_leaves_the_earlier_one_as_it_was(out: Path) -> None:
    before = {p.name: p.read_bytes() for p in out.iterdir()}

    def failing() -> Iterator[tuple[str, torch.Tensor]]:
        yield next(random_weights(CONFIG))
        raise CheckpointError("the weights end here")

    with pytest.raises(CheckpointError, match="the weights end here"):
        export_huggingface(CONFIG, failing(), out, tokenizer=None)
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert not [p for p in out.parent.iterdir() if p.name.startswith(".tmp-")]


def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(tmp_path: Path) -> None:
    small = CONFIG.with_(vocab_size=64)
    with pytest.raises(ConfigError, match="has 259 ids; the model has rows for 64"):
        export_huggingface(
            small,
            random_weights(small),
            tmp_path / "out",
            tokenizer=tokenizer_folder(tmp_path / "tokenizer"),
        )


def test_every_end_that_a_folder_names_ends_a_text(out: Path) -> None:
    assert load_model(out).end_ids == {257}
    (out / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258]}))
    write_digests(out)
    assert load_model(out).end_ids == {257, 258}


def test_a_model_with_another_models_tokenizer_is_not_loaded(tmp_path: Path) -> None:
    small = CONFIG.with_(vocab_size=64)
    export_huggingface(small, random_weights(small), tmp_path / "out", tokenizer=None)
    tokenizer_folder(tmp_path / "out")
    with pytest.raises(ConfigError, match="has 259 ids; the model has rows for 64"):
        load_model(tmp_path / "out")


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({NORM: None}, f"{NORM} is not among the weights"),
        ({NORM: torch.ones(31)}, rf"{NORM} has shape \[31\]; config.json makes it \[32\]"),
        (
            {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)},
            "q_proj.bias is among the weights, but config.json defines no such parameter",
        ),
    ],
    ids=["missing", "misshapen", "unexpected"],
)
def test_missing_unexpected_and_misshapen_weights_are_named(
    out: Path, tensors: dict[str, torch.Tensor | None], message: str
) -> None:
    change(out, tensors)
    with pytest.raises(CheckpointError, match=message):
        list(read_weights(out, CONFIG))


def test_a_tied_head_that_is_stored_too_must_be_the_embedding(out: Path) -> None:
    embedding = load_file(out / "model.safetensors")["model.embed_tokens.weight"]
    change(
        out,
        {
            "lm_head.weight": embedding.clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        },
    )
    assert len(list(read_weights(out, CONFIG))) == len(param_specs(CONFIG))
    change(out, {"lm_head.weight": embedding + 1})
    with pytest.raises(
        CheckpointError, match=r"lm_head.weight differs from model.embed_tokens.weight"
    ):
        list(read_weights(out, CONFIG))


def test_weights_that_are_no_tensors_are_refused(out: Path) -> None:
    (out / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        list(read_weights(out, CONFIG))
    (out / "model.safetensors").rename(out / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: (refused|cannot be read)"):
        list(read_weights(out, CONFIG))


def test_a_folder_without_weights_is_refused(out: Path) -> None:
    (out / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has neither model.safetensors nor"):
        list(read_weights(out, CONFIG))


def test_a_config_that_is_no_json_is_refused(out: Path) -> None:
    (out / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config.json: not JSON"):
        read_config(out)


def test_a_config_headway_cannot_compute_names_its_file_and_key(out: Path) -> None:
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "hidden_act": "relu"}))
    with pytest.raises(
        ConfigError, match=r"config.json: hidden_act is 'relu' .headway computes only 'silu'"
    ):
        read_config(out)


def test_checkpoints_and_runs_load_and_export_like_the_folder_they_become(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "runs" / "one"
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    for step, shift in ((1, 5.0), (2, 0.0)):
        records = [
            StateTensor(n, "master", tuple(v.shape), [((0,) * v.dim(), v + shift)])
            for n, v in random_weights(CONFIG)
        ]
        save_checkpoint(
            run / "checkpoints", step, records, {"model": CONFIG.model_dump(mode="json")}, tokenizer
        )
    by_run = load_model(run)
    by_step = load_model(run / "checkpoints" / "step-00000002")
    assert by_run.config == by_step.config == CONFIG
    assert by_run.tokenizer is not None
    for (name, value), parameter in zip(
        random_weights(CONFIG), by_run.model.parameters(), strict=True
    ):
        assert torch.equal(value, parameter), name
    options = ["--model", str(run), "--out", str(tmp_path / "out"), "--dtype", "float32", "--json"]
    assert main(["export", "hf", *options]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "out")
    assert find_model(tmp_path / "out").config == CONFIG
    export_model(run / "checkpoints" / "step-00000001", run / "final")
    assert find_model(run).path == run / "final"


def test_a_checkpoint_without_a_model_shape_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, 1, [StateTensor("a", "master", (2,), [((0,), torch.zeros(2))])], {})
    with pytest.raises(CheckpointError, match="does not say what shape the model has"):
        find_model(tmp_path)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", torch.float16),
        ("float16", torch.float16),
        ("bf16", torch.bfloat16),
        ("fp32", torch.float32),
    ],
)
def test_a_dtype_of_an_export_has_a_short_and_a_long_name(
    out: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    assert (
        main(
            ["export", "hf", "--model", str(out), "--out", str(tmp_path / "other"), "--dtype", name]
        )
        == 0
    )
    before = load_file(out / "model.safetensors")
    after = load_file(tmp_path / "other" / "model.safetensors")
    assert all(torch.equal(after[key], value.to(dtype)) for key, value in before.items())
    config = json.loads((tmp_path / "other" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == str(dtype).removeprefix("torch.")
    assert load_model(tmp_path / "other").model.head_weight.dtype == torch.float32


def test_a_weight_that_float16_cannot_hold_is_refused_by_name(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(out / "model.safetensors")[name]
    weight[3, 2] = -70_000.0
    change(out, {name: weight})
    options = ["--model", str(out), "--out", str(tmp_path / "other"), "--dtype"]
    assert main(["export", "hf", *options, "fp16"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
    assert "70000" in line
    assert "Use bfloat16" in line
    assert not (tmp_path / "other").exists()
    assert main(["export", "hf", *options, "bfloat16"]) == 0


def test_a_dtype_that_is_not_known_is_refused(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(out), "--out", str(tmp_path / "third"), "--dtype", "int8"]
    assert main(["export", "hf", *options]) == 2
    assert "--dtype is 'int8'; it must be one of float32" in capsys.readouterr().err
