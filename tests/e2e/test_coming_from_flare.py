"""The two recipes of docs/coming-from-flare.md on a small model: surgery, stage 1 on the changed layers, stage 2 on all, both compared."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.byte_model import byte_tokenizer

from headway.checkpoint.stored_model import find_model
from headway.cli import main

SHAPE = {
    "vocab_size": 258,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published Qwen 2 of six layers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    folder = tmp_path_factory.mktemp("base")
    config = transformers.Qwen2Config(
        **SHAPE, num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    byte_tokenizer().save(folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "docs.jsonl"
    path.write_text(
        "".join(
            json.dumps({"body": f"document {n} says " + "over the hills " * 5}) + "\n"
            for n in range(60)
        )
    )
    return path


def small(text: Path, folder: Path) -> list[str]:
    source = {"path": str(text), "limit": 50, "text_key": "body"}
    return [
        f"run.dir={folder}/runs", f"data.train=[{json.dumps(source)}]", f"data.cache_dir={folder}/cache", "data.seq_len=32", "steps=2",
        "batch={rows_per_rank: 2, accumulate: 2}", "device=cpu", "precision=fp32", "parallel.strategy=zero1", "checkpoint.every=1",
    ]  # fmt: skip


def weights(folder: Path) -> dict[str, Any]:
    return {name: value.float() for name, value in find_model(folder).weights()}


def test_both_stages_train_their_layers_and_the_result_is_compared_with_the_base(
    base: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here = small(text, tmp_path)
    surgery = [
        f"init.from={base}",
        "model.no_rope_layers=[4, 5]",
        "train=[layers.4-5]",
        "optim.lr=0.01",
    ]
    assert main(["train", "node/nope_stage1", *here, *surgery]) == 0
    first = tmp_path / "runs" / "nope-stage1"
    before = weights(base)
    after = weights(first)
    moved = {name for name in before if not before[name].equal(after[name])}
    # The biases begin at zero and all of a layer's weights train.
    assert moved
    assert all(name.startswith(("model.layers.4.", "model.layers.5.")) for name in moved)
    assert (first / "command.txt").read_text().strip()
    assert json.loads((first / "environment.json").read_text())["packages"]["torch"]

    assert main(["train", "node/nope_stage2", *here, f"init.from={first}", "optim.lr=0.01"]) == 0
    second = tmp_path / "runs" / "nope-stage2"
    assert find_model(second).config.no_rope_layers == (4, 5)
    assert not weights(second)["model.layers.0.mlp.up_proj.weight"].equal(
        after["model.layers.0.mlp.up_proj.weight"]
    )

    capsys.readouterr()
    compare = [
        "eval",
        "compare",
        str(base),
        str(second),
        "--data",
        str(text),
        "--text-key",
        "body",
        "--max-samples",
        "8",
    ]
    assert main([*compare, "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    spans = [
        [bucket["first"] for bucket in model["datasets"]["docs.jsonl"]["positions"]]
        for model in models
    ]
    assert spans == [[1, 2, 4, 8, 16, 32], [1, 2, 4, 8, 16, 32]]


def test_a_layer_that_the_given_model_does_not_have_is_one_line(
    base: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for settings, last in (
        ([f"init.from={base}", "model.no_rope_layers=[6]"], 5),
        (["model.no_rope_layers=[6]"], 3),
    ):
        recipe = [
            setting for setting in small(text, tmp_path) if not setting.startswith("parallel")
        ]
        assert main(["train", *recipe, *settings, f"tokenizer={base}"]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert [line for line in said if not line.startswith("no recipe is given")] == [
            f"error: model: no_rope_layers holds 6; layers go from 0 to {last}."
        ]
    assert not (tmp_path / "runs").exists()
