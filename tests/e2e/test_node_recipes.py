"""The recipes for a node as they stand: where they look for models and data lie small ones, and only sizes are made smaller."""

import functools
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.byte_model import byte_tokenizer

from headway.checkpoint.stored_model import find_model
from headway.cli import main
from headway.config.load import load, read_yaml
from headway.config.shipped import FOLDER
from headway.infer.load import load_model
from headway.kernels.attention import causal_mask
from headway.model.layout import GATES
from headway.train import train
from headway.train.config import Recipe

NODE = FOLDER / "node"
NAMES = sorted(path.stem for path in NODE.glob("*.yaml"))
BEFORE = {
    "dpo": "sft",
    "grpo": "sft",
    "dapo": "sft",
    "nope_stage2": "nope_stage1",
    "prulong-masks-and-weights": "prulong-masks",
    "prulong-sft": "prulong-masks-and-weights",
}
"""A recipe that starts from what another one left."""
SMALL = {
    "seq_len": 64,
    "steps": 1,
    "every": 1,
    "window": 16,
    "sinks": 4,
    "context": 1,
    "max_seq_len": 128,
    "limit": 50,
    "no_rope_layers": [3, 4, 5],
    "max_new_tokens": 8,
    "max_tokens": 8,
    "buffer": 4,
    "prompts": 4,
    "samples": 2,
}
BATCH = {
    "tokens": {"tokens": 128, "micro_rows": 1},
    "rows": {"rows": 2, "micro_rows": 1},
    "rows_per_rank": {"rows_per_rank": 1, "accumulate": 2},
}
SHAPE: dict[str, Any] = {
    "vocab_size": 272,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def smaller(value: Any) -> Any:
    """A recipe with the same settings and smaller sizes."""
    if isinstance(value, list):
        return [smaller(item) for item in value]
    if not isinstance(value, dict):
        return "layers.3-5" if value == "layers.20-32" else value
    reduced = {key: SMALL[key] if key in SMALL else smaller(inner) for key, inner in value.items()}
    if "batch" in reduced and reduced["batch"].keys() & BATCH.keys():
        reduced["batch"] = next(BATCH[key] for key in reduced["batch"] if key in BATCH)
    if "epochs" in reduced:
        del reduced["epochs"]
        reduced["steps"] = SMALL["steps"]
    if "eval" in reduced:
        reduced["eval"]["rows"] = 4
    if "valid" in reduced:
        reduced["valid"] = {"fraction": 0.2}
    return reduced


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with everything the recipes name, as the working directory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

    folder = tmp_path_factory.mktemp("node")
    qwen = transformers.Qwen2Config(
        **SHAPE, num_hidden_layers=6, max_position_embeddings=128, tie_word_embeddings=True
    )
    llama = transformers.LlamaConfig(
        **{**SHAPE, "num_key_value_heads": 2}, num_hidden_layers=2, max_position_embeddings=128
    )
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>")
    tokenizer.save(folder / "tokenizer")
    settings = json.loads((folder / "tokenizer" / "tokenizer_config.json").read_text())
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    settings["chat_template"] = (
        template + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    torch.manual_seed(0)
    for name, config in (
        ("qwen2.5-3b", qwen),
        ("qwen2.5-7b", qwen),
        ("llama-3.1-8b-instruct", llama),
    ):
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(
            folder / "models" / name
        )
        for file in (folder / "tokenizer").iterdir():
            (folder / "models" / name / file.name).write_bytes(file.read_bytes())
    texts = [{"text": f"document {n} says " + "over the hills " * 4} for n in range(60)]
    chat = [{"instruction": f"Say {n}.", "output": f"{n}"} for n in range(40)]
    prompts = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(40)]
    pairs = [
        {"prompt": record["instruction"], "chosen": record["output"], "rejected": "No."}
        for record in chat
    ]
    sample = Path("togethercomputer/RedPajama-Data-1T-Sample/docs.jsonl")
    for name, records in (
        ("chat.jsonl", chat),
        ("pairs.jsonl", pairs),
        ("prompts.jsonl", prompts),
        ("redpajama.jsonl", texts),
        ("long.jsonl", texts),
        (sample, texts),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    domains = [
        f"long-context-65536/{name}"
        for name in ("thestackv1_concat_by_repo-65536", "book-65536", "fineweb-edu")
    ]
    for name in (*domains, "long-context-524288/book-524288", "prolong-ultrachat-64K"):
        options = [
            "--input",
            str(folder / "redpajama.jsonl"),
            "--tokenizer",
            str(folder / "tokenizer"),
            "--to",
            "mds",
        ]
        assert main(["data", "tokenize", *options, "--out", str(folder / "datasets" / name)]) == 0
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def trained(there: Path) -> Callable[[str], dict[str, Any]]:
    """Trains a recipe, after the one it starts from; each once."""

    @functools.cache
    def run(name: str) -> dict[str, Any]:
        if name in BEFORE:
            run(BEFORE[name])
        if name == "prulong-masks-and-weights":
            # Of two layers with two heads each, half stream.
            options = [
                "--model",
                "runs/prulong-masks",
                "--sparsity",
                "0.5",
                "--out",
                "masks_sp0.7.tsv",
            ]
            assert main(["masks", "export", *options]) == 0
        (there / f"{name}.yaml").write_text(json.dumps(smaller(read_yaml(NODE / f"{name}.yaml"))))
        return train(load(Recipe, there / f"{name}.yaml", ["device=cpu"]))

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_node_recipe_trains_and_leaves_a_model(
    name: str, there: Path, trained: Callable[[str], dict[str, Any]]
) -> None:
    summary = trained(name)
    recipe = load(Recipe, NODE / f"{name}.yaml")
    assert summary["steps"] == max(1, len(recipe.stages))
    model = find_model(there / recipe.run.folder)
    assert model.path == there / recipe.run.folder / "final"
    assert model.tokenizer_folder is not None
    if recipe.model.no_rope_layers:
        assert model.config.no_rope_layers == (3, 4, 5)
    if name == "extend-base":
        assert model.config.rope_theta == 1e7, "the base of the last stage"
    if name in ("extend-yarn", "extend-linear"):
        assert model.config.rope_scaling == recipe.model.rope_scaling
    if name.startswith("prulong"):
        assert GATES in dict(model.weights())


def test_staged_surgery_is_exported_to_a_model_that_plain_transformers_computes_alike(
    there: Path, trained: Callable[[str], dict[str, Any]]
) -> None:
    import transformers

    trained("nope")
    assert main(["export", "hf", "--model", "runs/nope", "--out", "hf/nope"]) == 0
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        there / "hf" / "nope", dtype=torch.float32
    ).eval()
    assert type(plain).__name__ == "SmolLM3ForCausalLM"
    model = load_model(there / "runs" / "nope", dtype=torch.float32).model
    tokens = torch.arange(1, 65)[None] * 3 % 250
    with torch.inference_mode():
        mine = model.logits(model(tokens, torch.arange(64)[None], causal_mask(1, 64)))
        torch.testing.assert_close(mine, plain(tokens).logits, rtol=1e-5, atol=1e-5)
