"""The index of an export in several files: every parameter where it lies, the size that of all bytes, no file above the limit."""

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from support.byte_model import byte_tokenizer

from headway.export.huggingface import export_huggingface
from headway.infer.load import load_model
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import num_parameters, param_specs

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=64,
    max_seq_len=32,
)


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_the_index_says_where_every_parameter_is_and_how_many_bytes_there_are(
    tmp_path: Path, dtype: str, width: int
) -> None:
    limit = 10_000
    weights = ((spec.name, initial_value(spec, CONFIG, 1)) for spec in param_specs(CONFIG))
    export_huggingface(
        CONFIG, weights, tmp_path / "out", tokenizer=None, dtype=dtype, max_shard_bytes=limit
    )  # pyright: ignore
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == width * num_parameters(CONFIG)
    assert set(index["weight_map"]) == {spec.name for spec in param_specs(CONFIG)}
    sizes = {spec.name: width * spec.size for spec in param_specs(CONFIG)}
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        assert all(index["weight_map"][name] == file.name for name in names)
        assert sum(sizes[name] for name in names) <= limit or len(names) == 1


@pytest.mark.parametrize(
    ("ends", "listed"), [((), 257), ((5,), [257, 5]), ((9, 5, 257), [257, 5, 9])]
)
def test_every_token_that_ends_a_text_is_listed_for_generation(
    tmp_path: Path, ends: tuple[int, ...], listed: object
) -> None:
    config = CONFIG.with_(vocab_size=320)
    byte_tokenizer().save(tmp_path / "tokenizer")
    weights = ((spec.name, initial_value(spec, config, 1)) for spec in param_specs(config))
    export_huggingface(
        config, weights, tmp_path / "out", tokenizer=tmp_path / "tokenizer", end_ids=ends
    )
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"]) == (256, listed)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == 257
    loaded = load_model(tmp_path / "out")
    assert loaded.end_ids == {257, *ends}
