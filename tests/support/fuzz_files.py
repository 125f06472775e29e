"""Fuzz targets over files and folders: a good one of each kind is made once, a copy of it is damaged, and verbs read it."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headway.runtime.digests import DIGESTS
from support.fuzzing import HOSTILE_TEXTS, Target, mutate_bytes, mutate_file, mutate_value, run_verb
from support.runs import make_stores, tiny_settings

WORDS = [
    "Index funds follow a market.",
    "股票是公司的份额。",
    "def f(x):\n    return x + 1",
    "naïve café — 42",
    "",
]
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {
        "role": "assistant",
        "content": "A thing.",
        "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}],
    },
    {"role": "tool", "content": "42"},
    {"role": "assistant", "content": "It is 42."},
]
RECORDS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"messages": TURNS, "tools": [{"name": "f", "parameters": {}}]}),
    (
        "chat",
        {
            "instruction": "Say a.",
            "input": "b",
            "output": "a",
            "history": [["q", "a"]],
            "system": "s",
        },
    ),
    (
        "chat",
        {
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
            "id": 1,
        },
    ),
    ("chat", {"prompt": "a", "response": "b"}),
    ("preference", {"prompt": "a", "chosen": "b", "rejected": "c"}),
    (
        "preference",
        {
            "conversations": [{"from": "human", "value": "a"}],
            "chosen": {"from": "gpt", "value": "b"},
            "rejected": {"value": "c"},
        },
    ),
    ("preference", {"prompt": [TURNS[1]], "chosen": [TURNS[4]], "rejected": [TURNS[4]]}),
    ("text", {"text": "one document", "meta": {"a": [1]}}),
]


def file_targets() -> list[Target]:
    """One target for each kind of file people hand in."""
    return [
        Target("raw files", _raw, _make_raw),
        Target("records", _record, _make_tokenizer),
        Target("token stores", _store, _make_stores),
        Target("run folders", _run_folder, _make_run),
        Target("model folders", _model_folder, _make_run),
        Target("tokenizers", _tokenizer, _make_tokenizer),
    ]


def _make_tokenizer(folder: Path) -> None:
    from headway.tokenizer.train import train_bpe

    if not (folder / "tok").exists():
        train_bpe(WORDS * 3, vocab_size=300, out=folder / "tok")


def _make_raw(folder: Path) -> None:
    import pyarrow
    import pyarrow.parquet
    import zstandard

    _make_tokenizer(folder)
    good = folder / "good"
    good.mkdir(exist_ok=True)
    lines = "".join(
        json.dumps({"text": word, "n": i}, ensure_ascii=False) + "\n"
        for i, word in enumerate(WORDS)
    )
    table = pyarrow.table(
        {"text": WORDS, "when": pyarrow.array([1, 2, 3, 4, None], pyarrow.timestamp("ns"))}
    )
    text = io.StringIO()
    csv.writer(text).writerows([["text", "n"], *([word, i] for i, word in enumerate(WORDS))])
    wiki = "<mediawiki><page><title>T</title><ns>0</ns><revision><text>'''Bold''' {{x|y}} [[a|b]] text</text></revision></page></mediawiki>"
    (good / "a.txt").write_text("\n".join(WORDS), encoding="utf-8")
    (good / "a.jsonl").write_text(lines, encoding="utf-8")
    (good / "a.json").write_text(json.dumps([{"text": word} for word in WORDS]), encoding="utf-8")
    (good / "a.csv").write_text(text.getvalue(), encoding="utf-8")
    (good / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (good / "a.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (good / "a.xml").write_text(wiki, encoding="utf-8")
    pyarrow.parquet.write_table(table, good / "a.parquet")
    with pyarrow.ipc.new_file(str(good / "a.arrow"), table.schema) as writer:
        writer.write_table(table)


def _work(folder: Path) -> Path:
    """An empty folder for one case, which is also the working directory."""
    work = folder / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    os.chdir(work)
    return work


def _raw(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    source = rng.choice(sorted((folder / "good").iterdir()))
    verb = rng.choice(
        (
            ["data", "tokenize", "--input", "IT", "--tokenizer", "../tok", "--out", "out"],
            ["data", "clean", "IT", "out.jsonl"],
            ["data", "validate", "IT"],
            ["data", "inspect", "IT"],
            ["tokenizer", "train", "--input", "IT", "--vocab-size", "280", "--out", "out"],
        )
    )
    inner = random.Random(rng.random())

    def call() -> int:
        work = _work(folder)
        shutil.copy(source, work / source.name)
        mutate_file(work / source.name, inner)
        return run_verb([source.name if part == "IT" else part for part in verb])

    return f"{verb} on {source.name}, damaged", call


def _record(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    kind, good = rng.choice(RECORDS)
    record = good
    for _ in range(rng.choice((1, 1, 2, 3))):
        changed = mutate_value(record, rng)
        record = changed if isinstance(changed, dict) or rng.random() < 0.3 else record
        if not isinstance(record, dict):
            break
    line = json.dumps(record)
    if rng.random() < 0.1:
        line = mutate_bytes(line.encode(), rng).decode("utf-8", "replace")
    template = rng.choice(
        (
            "chatml",
            "llama3",
            "qwen",
            "alpaca",
            "internlm",
            "zero2all",
            "tokenizer",
            *HOSTILE_TEXTS[:3],
        )
    )
    reading = ["--kind", kind, "--tokenizer", "../tok", "--template", template]
    how = rng.choice(
        (
            ["data", "validate", "x.jsonl", *reading],
            ["data", "tokenize", "--input", "x.jsonl", *reading, "--out", "out"],
        )
    )
    if kind == "text":
        how = [part for part in how if part not in ("--template", template)]

    def call() -> int:
        work = _work(folder)
        (work / "x.jsonl").write_text(
            line + "\n" + json.dumps(good) + "\n", encoding="utf-8", errors="surrogatepass"
        )
        return run_verb(how)

    return f"{how[:2]} {template}: {line[:250]}", call


def _make_stores(folder: Path) -> None:
    if (folder / "good").exists():
        return
    good = folder / "good"
    good.mkdir()
    make_stores(good)
    _make_tokenizer(folder)
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"# {word}"}) + "\n" for word in WORDS * 4), encoding="utf-8"
    )
    for to in ("internlm", "zero2all", "mds"):
        line = [
            "data",
            "tokenize",
            "--input",
            str(folder / "a.jsonl"),
            "--tokenizer",
            str(folder / "tok"),
            "--to",
            to,
        ]
        assert run_verb([*line, "--out", str(good / to)]) == 0


def _damaged(source: Path, work: Path, rng: random.Random) -> tuple[Path, str]:
    """A copy of a file or folder with one or two of its files damaged."""
    copy = work / source.name
    shutil.copytree(source, copy, symlinks=True) if source.is_dir() else shutil.copy(source, copy)
    files = (
        sorted(p for p in copy.rglob("*") if p.is_file() and not p.is_symlink())
        if copy.is_dir()
        else [copy]
    )
    chosen = rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2))))
    return copy, "; ".join(mutate_file(path, rng) for path in chosen)


def _store(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    source = rng.choice(sorted((folder / "good").iterdir()))
    verb = rng.choice(
        (
            ["data", "inspect", "IT"],
            [
                "data",
                "convert",
                "IT",
                "out",
                "--to",
                rng.choice(("headway", "internlm", "zero2all", "mds")),
            ],
            [
                "data",
                "pack",
                "IT",
                "out",
                "--pack-length",
                "32",
                "--mode",
                rng.choice(("concat", "best_fit", "prulong")),
            ],
            ["data", "merge", "IT", "../good/store1", "--out", "out"],
            [
                "train",
                *tiny_settings(folder / "good", "run"),
                "run.dir=runs",
                "data.train=[IT]",
                "data.cache_dir=cache",
                "steps=2",
                "--dry-run",
            ],
        )
    )
    inner = random.Random(rng.random())

    def call() -> int:
        work = _work(folder)
        copy, _ = _damaged(source, work, inner)
        return run_verb(
            [
                part.replace("IT", copy.name) if part in ("IT", "data.train=[IT]") else part
                for part in verb
            ]
        )

    return f"{verb[:2]} on a damaged {source.name}", call


def _make_run(folder: Path) -> None:
    """A finished run of a few steps with an exported model."""
    if (folder / "good").exists():
        return
    (folder / "good").mkdir()
    make_stores(folder)
    _make_tokenizer(folder)
    line = [
        "train",
        *tiny_settings(folder, "run"),
        "run.dir=" + str(folder / "good"),
        "steps=4",
        "checkpoint.every=2",
        "model.vocab_size=320",
    ]
    assert run_verb([*line, f"tokenizer={folder / 'tok'}"]) == 0


def _run_folder(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    again = [
        "train",
        *tiny_settings(folder, "run"),
        "run.dir=.",
        "steps=5",
        "checkpoint.every=2",
        "model.vocab_size=320",
        "tokenizer=../tok",
    ]
    verb = rng.choice(
        (
            again,
            again,
            ["verify", "checkpoint", "run"],
            ["generate", "--model", "run", "--prompt", "a", "--max-new-tokens", "2"],
            ["export", "hf", "--model", "run", "--out", "out"],
            ["config", "diff", "run", "../good/run"],
            ["stop", "run"],
        )
    )
    inner = random.Random(rng.random())

    def call() -> int:
        _damaged(folder / "good" / "run", _work(folder), inner)
        return run_verb(verb)

    return f"{verb[:2]} on a damaged run folder", call


def _model_folder(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    verb = rng.choice(
        (
            ["generate", "--model", "final", "--prompt", "a", "--max-new-tokens", "2"],
            ["eval", "ppl", "--model", "final", "--data", "x.txt"],
            ["export", "hf", "--model", "final", "--out", "out"],
            [
                "train",
                *tiny_settings(folder, "run"),
                "run.dir=.",
                "steps=1",
                "init.from=final",
                "model.vocab_size=320",
                "--dry-run",
            ],
        )
    )
    inner = random.Random(rng.random())

    def call() -> int:
        work = _work(folder)
        (work / "x.txt").write_text(WORDS[0], encoding="utf-8")
        copy, _ = _damaged(folder / "good" / "run" / "final", work, inner)
        if inner.random() < 0.8:
            # else they would find every damage before a reader does
            _remove(copy / DIGESTS)
        return run_verb(verb)

    return f"{verb[:2]} on a damaged model folder", call


def _remove(path: Path) -> None:
    """Damage may have made a folder or a link of a file."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _tokenizer(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    verb = rng.choice(
        (
            ["tokenizer", "inspect", "tok", "--data", "x.txt"],
            ["data", "tokenize", "--input", "x.txt", "--tokenizer", "tok", "--out", "out"],
            [
                "data",
                "validate",
                "x.jsonl",
                "--kind",
                "chat",
                "--tokenizer",
                "tok",
                "--template",
                "tokenizer",
            ],
        )
    )
    inner = random.Random(rng.random())

    def call() -> int:
        work = _work(folder)
        (work / "x.txt").write_text(WORDS[0], encoding="utf-8")
        (work / "x.jsonl").write_text(json.dumps(RECORDS[0][1]), encoding="utf-8")
        _damaged(folder / "tok", work, inner)
        return run_verb(verb)

    return f"{verb[:2]} with a damaged tokenizer", call
