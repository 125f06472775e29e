"""What one small run with given overrides leaves behind, in the forms in which the table of settings looks at it."""

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.load import load
from headway.data.loader import Loader
from headway.store.foreign.internlm import InternlmWriter
from headway.train import train
from headway.train.build import build
from headway.train.config import Recipe
from headway.train.resolve import resolve
from headway.train.start import decide_start
from support.preference_pairs import make_pair_store
from support.runs import deterministic, make_stores

Row = tuple[tuple[str, ...], Any, Any, Callable[[tuple[str, ...]], Any]]

BASE = (
    "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2", "model.ffn_size=24", "model.vocab_size=64", "model.max_seq_len=128",
    "data.seq_len=32", "data.tokenizer_unchecked=true", "batch.rows=4", "batch.micro_rows=2", "steps=3", "optim.lr=1e-2",
    "optim.schedule.warmup=1", "device=cpu",
)  # fmt: skip


@dataclass(frozen=True)
class SettingRun:
    """What one small run left behind."""

    folder: Path
    log: str
    records: list[dict[str, Any]]

    @property
    def numbers(self) -> list[Any]:
        return [(r["loss"], r["grad_norm"], r["lr"], r["adam_beta2"]) for r in self.records]


def data_folder() -> Path:
    return _data_folder()


def with_data(overrides: Sequence[str]) -> list[str]:
    """A small store where no data is named: of generated data a start would plan a block of a million tokens."""
    named = any(text.startswith("data.train") for text in overrides)
    return [*BASE, *(() if named else (f"data.train=[{data_folder()}/store0]",)), *overrides]


@functools.cache
def _data_folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="headway-settings-"))
    make_stores(folder)
    make_pair_store(folder / "pairs")
    (folder / "raw.jsonl").write_text(
        "".join(
            json.dumps({"text": f"{i} words here", "other": "x" * i}) + "\n" for i in range(1, 60)
        )
    )
    for number, name in enumerate(("cn", "en")):
        with InternlmWriter(folder / "types" / name / "a.bin") as writer:
            for i in range(40):
                writer.add(np.random.default_rng(100 * number + i).integers(2, 60, 20))
            writer.finish()
    (folder / "lines.txt").write_text("".join(f"line {i} of a text\n" for i in range(200)))
    from headway.tokenizer.train import train_bpe

    text = Path(__file__).read_text(encoding="utf-8")
    for number in (0, 1):
        train_bpe([text], vocab_size=300 + 20 * number, out=folder / f"tok{number}")
    turns = [
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "It is a thing of some length."},
    ]
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"text": "plain text", "messages": turns}) + "\n" for _ in range(60))
    )
    (folder / "bad_chat.jsonl").write_text(
        (folder / "chat.jsonl").read_text() + '{"messages": []}\n'
    )
    return folder


RAN: dict[str, SettingRun] = {}
"""By resolved recipe: most rows begin with the default, which all of them share."""


@functools.cache
def trained_run(overrides: tuple[str, ...]) -> SettingRun:
    """Train with these overrides and keep what it wrote; the same recipe trains once, whatever of it was given."""
    folder = Path(tempfile.mkdtemp(dir=data_folder()))
    texts = [text.replace("$", str(data_folder())) for text in overrides]
    if not any(text.startswith("run.dir") for text in texts):
        texts += [f"run.dir={folder}/runs"]
    if not any(text.startswith("data.cache_dir") for text in texts):
        texts += [f"data.cache_dir={folder}/cache"]
    recipe = load(Recipe, None, with_data(texts))
    key = recipe.model_dump_json().replace(str(folder), "")
    if key not in RAN:
        train(recipe)
        run = recipe.run.folder
        RAN[key] = SettingRun(
            run, (run / "train.log").read_text(), deterministic(run / "metrics.jsonl")
        )
    return RAN[key]


def loss_numbers(overrides: tuple[str, ...]) -> Any:
    return trained_run(overrides).numbers


def batch_numbers(overrides: tuple[str, ...]) -> Any:
    return [
        (r["tokens"], r["num_samples_in_batch"], r["loss"], r["micro_num"])
        for r in trained_run(overrides).records
    ]


def built_run(look: Callable[[Any], Any]) -> Callable[[tuple[str, ...]], Any]:
    def see(overrides: tuple[str, ...]) -> Any:
        resolved = resolve(load(Recipe, None, with_data(overrides)))
        run = build(resolved, decide_start(resolved.recipe, "never"))
        run.loader.close()
        return look(run)

    return see


def files_left(pattern: str) -> Callable[[tuple[str, ...]], Any]:
    return lambda overrides: sorted(p.name for p in trained_run(overrides).folder.glob(pattern))


def validations(overrides: tuple[str, ...]) -> Any:
    return [r.get("valid") for r in trained_run(overrides).records]


def num_log_lines(overrides: tuple[str, ...]) -> Any:
    return sum(
        "loss" in line and "tok/s" in line for line in trained_run(overrides).log.splitlines()
    )


def loader_threads(run: Any) -> Any:
    loader: Loader = run.loader
    return loader._config.workers, loader._config.prefetch, loader._pin


def numbers_or_refusal(overrides: tuple[str, ...]) -> Any:
    from headway.errors import HeadwayError

    try:
        return loss_numbers(overrides)
    except HeadwayError as error:
        return str(error)


def parameter_shapes(run: Any) -> Any:
    return {name: tuple(value.shape) for name, value in run.engine.masters.items()}


STORES = ("data.train=[$/store0, $/store1]",)
