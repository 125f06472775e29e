"""Distillation from stored logits: the same run as with the teacher in memory, whatever becomes of rows, ranks, writers and resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.ranks import start_processes
from support.runs import assert_same_run, deterministic, headway, make_stores, tiny_settings

from headway.config.load import load
from headway.errors import HeadwayError
from headway.infer.load import LoadedModel, load_model
from headway.infer.teacher_logits import LogitsOptions, LogitsResult, write_logits
from headway.store import teacher_logits as logits_files
from headway.store.reader import open_store
from headway.store.teacher_logits import open_logits
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics
from headway.train import train
from headway.train.config import Recipe

NUMBERS = ("loss", "grad_norm", "nll", "kl", "accuracy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stores, a third with answers to learn and documents longer than a row, and a trained teacher."""
    path = tmp_path_factory.mktemp("cache")
    make_stores(path)
    rng = np.random.default_rng(5)
    writer = StoreWriter(path / "chat", dtype="uint16", tokenizer_fingerprint=None, masked=True)
    for size in (150, 20, 64, 33, 130, 5, 41):
        writer.add(rng.integers(0, 64, size).astype(np.uint16), rng.random(size) < 0.6)
    writer.finish()
    run(
        path,
        "teacher",
        "optim.lr=1e-2",
        "data.valid=null",
        "eval.every=null",
        "steps=8",
        "model.hidden_size=48",
    )
    return path


@pytest.fixture(scope="module")
def teacher(folder: Path) -> LoadedModel:
    return load_model(folder / "runs" / "teacher")


@pytest.fixture(scope="module")
def few(folder: Path, teacher: LoadedModel) -> tuple[str, ...]:
    """A run with eight tokens per position, in half precision."""
    write(folder, teacher, "store0", "few", LogitsOptions(top_k=8, temperature=2.0))
    shape = (
        "objective.kind=distill",
        f"objective.cache={folder}/few",
        "objective.temperature=2.0",
        "model.num_layers=2",
    )
    return (*shape, "steps=4", "optim.lr=1e-2", "checkpoint.every=2")


def write(
    folder: Path, teacher: LoadedModel, store: str, out: str, options: LogitsOptions
) -> LogitsResult:
    return write_logits(teacher, open_store(folder / store), folder / out, options)


def recipe(folder: Path, name: str, *overrides: str) -> Recipe:
    return load(
        Recipe,
        None,
        [*tiny_settings(folder / "runs", name), f"data.train=[{folder}/store0]", *overrides],
    )


def run(folder: Path, name: str, *overrides: str) -> list[dict[str, Any]]:
    loaded = recipe(folder, name, *overrides)
    train(loaded)
    return read_metrics(loaded.run.folder / "metrics.jsonl")


def assert_same(got: list[dict[str, Any]], right: list[dict[str, Any]], rel: float = 2e-5) -> None:
    assert len(got) == len(right)
    for measured, other in zip(got, right, strict=True):
        assert {k: measured[k] for k in NUMBERS} == pytest.approx(
            {k: other[k] for k in NUMBERS}, rel=rel, abs=1e-6
        ), f"step {measured['step']}"
        for name, values in other.get("valid", {}).items():
            assert measured["valid"][name] == pytest.approx(values, rel=rel, abs=1e-6)


def test_the_whole_vocabulary_gives_the_run_of_a_teacher_in_memory(
    folder: Path, teacher: LoadedModel
) -> None:
    whole = LogitsOptions(top_k=64, temperature=2.0, dtype="float32", seq_len=64, batch_tokens=128)
    write(folder, teacher, "store0", "whole/store0", whole)
    for number in range(2):
        write(
            folder,
            teacher,
            "chat",
            f"whole/chat{number}",
            LogitsOptions(**{**vars(whole), "shard": (number, 2)}),
        )
    data = (
        f"data.train=[{{path: {folder}/store0, weight: 0.5}}, {{path: {folder}/chat, weight: 0.5}}]"
    )
    shape = (
        data,
        "objective.kind=distill",
        "objective.temperature=2.0",
        "steps=3",
        "optim.lr=1e-2",
    )
    live = run(folder, "live", *shape, f"objective.teacher={folder}/runs/teacher")
    stored = run(folder, "stored", *shape, f"objective.cache={folder}/whole")
    assert_same(stored, live)
    assert "no model in memory" in (folder / "runs" / "stored" / "train.log").read_text()


def test_a_few_tokens_in_half_precision_teach_nearly_the_same(
    folder: Path, few: tuple[str, ...]
) -> None:
    """And the stored numbers are small: eight ids of two bytes and nine numbers of two bytes for each position."""
    tokens = open_store(folder / "store0").num_tokens
    assert sum(file.stat().st_size for file in (folder / "few").glob("*.bin")) == tokens * (
        8 * 2 + 9 * 2
    )
    short = ("steps=1", "eval.every=null", "data.valid=null", "checkpoint.every=null")
    live = run(
        folder, "live8", *few[:1], *few[2:], f"objective.teacher={folder}/runs/teacher", *short
    )
    got = run(folder, "few", *few, *short)
    assert got[0]["nll"] == pytest.approx(live[0]["nll"])
    assert 0.3 * live[0]["kl"] < got[0]["kl"] < live[0]["kl"]  # classes joined never diverge more
    dropped = run(
        folder, "dropped", *few, "objective.tail=drop", "objective.temperature=3.0", *short
    )
    assert 0 < dropped[0]["kl"] != pytest.approx(got[0]["kl"])


@pytest.mark.slow
def test_microbatches_and_ranks_change_nothing_and_a_resumed_run_is_the_uninterrupted_one(
    folder: Path, few: tuple[str, ...]
) -> None:
    plain = run(folder, "plain", *few)
    assert_same(run(folder, "wide", *few, "batch.micro_rows=4", "data.workers=0"), plain, 1e-4)
    layouts = {
        "zero1": (),
        "fsdp": ("parallel.strategy=fsdp",),
        "pipeline": ("parallel.pipeline=2",),
    }
    for name, more in layouts.items():
        recipe_of_ranks = recipe(folder, name, *few, "checkpoint.every=null", *more)
        start_processes(lambda cached_recipe=recipe_of_ranks: train(cached_recipe), 2)
        assert_same(read_metrics(recipe_of_ranks.run.folder / "metrics.jsonl"), plain, 1e-4)
    straight = folder / "runs" / "plain"
    again = folder / "runs" / "again"
    shutil.copytree(folder / "few", folder / "moved")
    moved = (*few, f"objective.cache={folder}/moved")
    train(recipe(folder, "again", *moved), resume=str(straight / "checkpoints" / "step-00000002"))
    assert deterministic(again / "metrics.jsonl") == deterministic(straight / "metrics.jsonl")[2:]
    shutil.copyfile(straight / "metrics.jsonl", again / "metrics.jsonl")
    assert_same_run(straight, again, 4)
    write(folder, load_model(straight), "store0", "others", LogitsOptions(top_k=8, temperature=2.0))
    with pytest.raises(HeadwayError, match="other teacher weights"):
        run(folder, "plain", *few, f"objective.cache={folder}/others", "steps=5")


def test_a_killed_writer_continues_and_leaves_the_same_bytes(
    folder: Path, teacher: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = LogitsOptions(top_k=5, seq_len=64, batch_tokens=64)
    monkeypatch.setattr(logits_files, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(logits_files, "SHARD_BYTES", 6000)
    straight = write(folder, teacher, "chat", str(tmp_path / "straight"), options)
    assert (straight.tokens_done_before, straight.tokens, straight.documents) == (0, 443, 7)
    real = logits_files.TeacherLogitsWriter.add
    calls = list[int]()

    def dies(self: logits_files.TeacherLogitsWriter, ids: Any, log_probs: Any) -> None:
        calls.append(len(ids))
        if len(calls) == 5:
            real(self, ids[:3], log_probs[:3])  # torn: written, not committed
            raise KeyboardInterrupt
        real(self, ids, log_probs)

    monkeypatch.setattr(logits_files.TeacherLogitsWriter, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        write(folder, teacher, "chat", str(tmp_path / "killed"), options)
    with pytest.raises(HeadwayError, match="unfinished logits"):
        open_logits(tmp_path / "killed")
    with pytest.raises(HeadwayError, match=r"other settings \(top_k\)"):
        write(folder, teacher, "chat", str(tmp_path / "killed"), LogitsOptions(top_k=6, seq_len=64))
    resumed = write(folder, teacher, "chat", str(tmp_path / "killed"), options)
    assert resumed.tokens_done_before == sum(calls[:4])
    assert resumed.coverage == pytest.approx(straight.coverage)
    files = sorted(file.name for file in (tmp_path / "straight").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "killed").iterdir())
    for name in files:
        assert (tmp_path / "killed" / name).read_bytes() == (
            tmp_path / "straight" / name
        ).read_bytes(), name


def test_the_verb_writes_beside_the_store_and_says_what_it_kept(
    folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder / "store1", tmp_path / "text")
    command = (
        "data",
        "teacher-logits",
        str(tmp_path / "text"),
        "--teacher",
        str(folder / "runs" / "teacher"),
        "--top-k",
        "4",
        "--json",
    )
    first = headway(*command)
    assert first.returncode == 0, first.stderr
    report = json.loads(first.stdout)["logits"][0]
    assert report["out"] == str(tmp_path / "text.logits")
    assert report["tokens"] == open_store(tmp_path / "text").num_tokens
    assert 4 / 64 < report["coverage"] < 1
    again = json.loads(headway(*command).stdout)["logits"][0]
    assert again["tokens_done_before"] == report["tokens"]
    assert again["coverage"] == pytest.approx(report["coverage"])
    wrong = headway(*command[:-1], "--top-k", "65")
    assert wrong.returncode == 2
    assert wrong.stderr.strip().endswith(
        "it must be 1 to 64, the vocabulary of " + str(folder / "runs" / "teacher" / "final") + "."
    )


def test_logits_that_do_not_belong_are_refused_in_one_line(
    folder: Path, teacher: LoadedModel, few: tuple[str, ...], tmp_path: Path
) -> None:
    write(
        folder,
        teacher,
        "store0",
        str(tmp_path / "half"),
        LogitsOptions(top_k=8, temperature=2.0, shard=(0, 2)),
    )
    shutil.copytree(folder / "few", tmp_path / "bad")
    shard = tmp_path / "bad" / "logps-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    cases = {
        (f"data.train=[{folder}/store1]",): "no logits for .*store1: .* of other token stores",
        (f"objective.cache={tmp_path}/half",): "no logits for tokens",
        (f"objective.cache={tmp_path}/bad",): "damaged: its checksum differs",
        (f"objective.cache={folder}/store0",): "no logits of a teacher",
        ("objective.temperature=1.0",): "objective.temperature is 1; .* for 2",
        (
            "objective.teacher=null",
            f"objective.teacher={folder}/runs/teacher",
        ): "teacher and cache are both given",
        ("objective.cache=null", "objective.tail=drop"): "which is for stored logits",
        ("parallel.tensor=2",): "parallel.tensor is 2 and objective distill",
        ("model.vocab_size=60",): "vocabulary",
    }
    for overrides, said in cases.items():
        with pytest.raises(HeadwayError, match=said) as refused:
            run(folder, "refused", *few, *overrides)
        assert "\n" not in str(refused.value)
        assert not (folder / "runs" / "refused").exists()
