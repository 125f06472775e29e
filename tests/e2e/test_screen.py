"""A run on a terminal as a person sees it: header, bar, what to do next; and the commands it prints work."""

import io
import json
import shlex
import sys
from pathlib import Path

import pytest
from support.terminal import on_terminal

from headway.cli import main
from headway.tokenizer.train import train_bpe

TINY = [
    "model={hidden_size: 16, num_layers: 1, num_heads: 2, ffn_size: 24, max_seq_len: 64}", "data.seq_len=64", "batch.rows=2", "device=cpu",
    "data.cache_dir=cache", "data.valid.fraction=0.2", "steps=6", "eval.every=3",
]  # fmt: skip


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    train_bpe([Path(__file__).read_text()], vocab_size=300, out=tmp_path / "tokenizer")
    turns = [
        {"role": "user", "content": "what is it?"},
        {"role": "assistant", "content": "it is this"},
    ]
    records = {"text": {"text": "some text about something"}, "chat": {"messages": turns}}
    for name, record in records.items():
        (tmp_path / f"my {name}.jsonl").write_text(
            "".join(json.dumps(record) + "\n" for _ in range(40))
        )
    return tmp_path


@pytest.mark.parametrize(("kind", "columns"), [("text", 60), ("chat", 200)])
def test_a_run_shows_a_header_a_bar_and_commands_that_work(
    kind: str,
    columns: int,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with on_terminal(monkeypatch, columns) as terminal:
        options = [f"data.train=my {kind}.jsonl", f"run.name={kind}", *TINY]
        assert main(["train", "tokenizer=tokenizer", *options]) == 0
    rows = terminal.screen()
    assert (
        f"my {kind}.jsonl: {kind} ({'text' if kind == 'text' else 'messages'}), 40 records"
        in rows[0]
    )
    labels = [
        row.split()[0]
        for row in rows
        if row.startswith("  ") and not row.startswith(("  headway", "    "))
    ]
    assert labels == [
        "run",
        "model",
        "data",
        "length",
        "layout",
        "memory",
        "results",
        *["before:", "after:"] * 2,
    ]
    ending = rows[
        next(number for number, row in enumerate(rows) if row.startswith("validation loss: ")) :
    ]
    samples = [row for row in ending[: ending.index("next:")] if row.startswith(("held-out", "  "))]
    assert samples and all(len(row) < columns for row in samples), "answers fit the screen"
    (bar,) = [row for row in rows if "6/6" in row]
    assert "loss " in bar
    assert "valid " in bar
    assert "tok/s" in bar
    assert len(bar) < columns
    assert "mfu" not in bar
    assert not any(row.startswith("1/6") for row in rows), "steps are in the bar, not in lines"
    assert [row[:14] for row in rows if row.startswith("step ")] == [
        "step 3  valid:",
        "step 6  valid:",
    ]
    log = (here / "runs" / kind / "train.log").read_text()
    assert (
        "1/6  loss" in log
        and "valid/tokens" in log
        and "step 3  valid:" not in log
        and "tokens: 34 documents" in log  # of 40, the others are for validation
        and "results" not in log
    )
    assert not list((here / "runs" / kind / "logs").glob("stacks*"))
    commands = [
        shlex.split(row.partition("   # ")[0])
        for row in rows[rows.index("next:") + 1 :]
        if row.strip()
    ]
    assert [words[1] for words in commands] == (
        ["generate", "eval", "export"] if kind == "text" else ["chat", "generate", "export"]
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    for words in commands:
        capsys.readouterr()
        assert main(words[1:]) == 0, words


def test_a_dumb_terminal_and_a_pipe_get_plain_lines(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", "tokenizer=tokenizer", "data.train=my text.jsonl", *TINY, "steps=2"]
    with on_terminal(monkeypatch, term="dumb") as terminal:
        assert main([*train, "run.name=dumb"]) == 0
    assert "\x1b" not in terminal.text
    assert "1/2  loss" in terminal.text
    assert "next:" in terminal.text
    assert main([*train, "run.name=pipe"]) == 0
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert "\r" not in said
    assert "1/2  loss" in said


def test_without_colour_there_is_still_a_bar(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    with on_terminal(monkeypatch) as terminal:
        assert main(["train", *TINY, "data.valid=null", "run.name=plain"]) == 0
    assert "━" in terminal.text
    assert "\x1b[3" not in terminal.text
    assert "\x1b[2m" not in terminal.text
    assert "headway generate" not in terminal.text, (
        "generated data has no tokenizer, so there is nothing to say"
    )
