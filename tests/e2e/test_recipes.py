"""Every recipe we ship is read strictly; the laptop ones run, and every setting they give is read by something."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headway.config.load import load, read_yaml
from headway.config.section import Section
from headway.config.shipped import FOLDER
from headway.export.huggingface import export_huggingface
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.prepare.build import build_store
from headway.tokenizer.train import train_bpe
from headway.train import train
from headway.train.config import Recipe
from headway.train.stages import expand

ROOT = FOLDER
ALL = sorted(ROOT.rglob("*.yaml"))


def test_the_package_ships_recipes() -> None:
    assert ALL


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_recipe_is_valid(path: Path) -> None:
    load(Recipe, path)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and a store of some real text: our own source."""
    folder = tmp_path_factory.mktemp("text")
    sources = sorted((Path(__file__).parents[2] / "src").rglob("*.py"))
    corpus = folder / "corpus.jsonl"
    corpus.write_text(
        "".join(
            json.dumps({"text": path.read_text(encoding="utf-8")}) + "\n"
            for path in sources
            if path.stat().st_size
        )
    )
    train_bpe(
        [json.loads(line)["text"] for line in corpus.read_text().splitlines()],
        vocab_size=512,
        out=folder / "tokenizer",
    )
    build_store([corpus], folder / "tokenizer", folder / "store")
    config = ModelConfig(
        hidden_size=32, num_layers=2, num_heads=2, ffn_size=48, vocab_size=512, max_seq_len=512
    )
    weights = ((spec.name, initial_value(spec, config, 0)) for spec in param_specs(config))
    export_huggingface(config, weights, folder / "base", tokenizer=folder / "tokenizer")
    chat = [
        {"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))}
        for n in range(2, 40)
    ]
    pairs = [
        {"prompt": record["instruction"], "chosen": record["output"], "rejected": "No."}
        for record in chat
    ]
    labelled = [
        {"prompt": record["instruction"], "completion": record["output"], "label": n % 3 > 0}
        for n, record in enumerate(chat)
    ]
    prompts = [{"question": f"{n}+1?", "answer": str(n + 1)} for n in range(40)]
    for name, records in (
        ("prompts", prompts),
        ("chat", chat),
        ("pairs", pairs),
        ("labelled", labelled),
    ):
        (folder / f"{name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for record in records)
        )
    return folder


def overrides(path: Path, text: Path) -> list[str]:
    """What a recipe needs to run here: where things lie, and small numbers."""
    if path.stem == "stages":
        layers = [
            "model.no_rope_layers=[1]",
            "stages.0.train=[layers.1]",
            f"stages.2.data.train.0.path={text}/chat.jsonl",
        ]
        short = [f"stages.{number}.steps={steps}" for number, steps in enumerate((1, 2, 1))]
        where = [
            f"init.from={text}/base",
            f"data.train=[{text}/store]",
            "batch={tokens: 2048, micro_rows: 2}",
        ]
        return [*where, *layers, *short, "stages.2.epochs=null", "data.valid.fraction=0.1"]
    if path.stem in ("sft", "dpo", "kto", "lora", "reward"):
        raw = {"sft": "chat", "dpo": "pairs", "kto": "labelled", "lora": "chat", "reward": "pairs"}[
            path.stem
        ]
        short = ["data.seq_len=128"] if path.stem == "kto" else []
        return [
            f"init.from={text}/base",
            f"data.train.0.path={text}/{raw}.jsonl",
            "epochs=null",
            "batch={rows: 2, micro_rows: 1}",
            *short,
        ]
    if path.stem == "grpo":
        return [
            f"init.from={text}/base",
            f"data.train.0.path={text}/prompts.jsonl",
            "rollout={prompts: 2, samples: 2, max_new_tokens: 4}",
        ]
    if path.stem == "sparsify":
        return [
            f"init.from={text}/base",
            f"data.train=[{text}/store]",
            "batch={tokens: 2048, micro_rows: 2}",
        ]
    taught = [f"objective.teacher={text}/base"] if path.stem == "distill" else []
    return [
        *taught,
        f"tokenizer={text}/tokenizer",
        f"data.train=[{text}/store]",
        "model={hidden_size: 32, num_layers: 2, num_heads: 2, ffn_size: 48}",
        "batch={tokens: 2048, micro_rows: 2}",
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "laptop").glob("*.yaml")), ids=lambda p: p.stem)
def test_a_laptop_recipe_runs_and_every_setting_it_gives_is_read(
    path: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: set[tuple[str, str]] = set()
    plain = Section.__getattribute__

    def watched(self: Section, name: str) -> Any:
        if name in type(self).model_fields:
            read.add((type(self).__name__, name))
        return plain(self, name)

    small = [
        f"run.dir={tmp_path}",
        f"data.cache_dir={tmp_path}/cache",
        "steps=3",
        "eval.rows=4",
        "device=cpu",
    ]
    recipe = load(Recipe, path, [*overrides(path, text), *small])
    raw = read_yaml(path)
    settings_given = set(fields_given(recipe, raw))
    for stage, says in zip(expand(recipe), raw.get("stages", ()), strict=True):
        settings_given |= set(
            fields_given(stage.recipe, {key: value for key, value in says.items() if key != "name"})
        )
    settings_given -= {("ModelConfig", "preset"), ("Config", "kind")}  # read while loading
    monkeypatch.setattr(Section, "__getattribute__", watched)
    summary = train(recipe)
    monkeypatch.undo()
    assert summary["steps"] == (4 if recipe.stages else 3)
    assert (tmp_path / recipe.run.name / "final" / "config.json").exists()
    assert not settings_given - read, f"nothing reads {sorted(settings_given - read)}"


def fields_given(config: BaseModel, data: Any) -> Iterator[tuple[str, str]]:
    """(class, field) of every setting a recipe file names."""
    if not isinstance(data, dict):
        return
    for key, value in data.items():
        name = next(n for n, f in type(config).model_fields.items() if key in (n, f.alias))
        yield type(config).__name__, name
        below = getattr(config, name)
        if isinstance(below, BaseModel):
            yield from fields_given(below, value)
