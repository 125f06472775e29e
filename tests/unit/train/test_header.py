"""What a run says before its first step is what it then reads."""

import json
from pathlib import Path

import numpy as np
import pytest

from headway.cli import main
from headway.store.writer import StoreWriter
from headway.train import header

MODEL = [
    "model.hidden_size=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.ffn_size=32",
    "model.vocab_size=64",
]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Twenty documents of 20 tokens and twenty of 3."""
    folder = tmp_path / "store"
    with StoreWriter(folder, dtype="uint16", tokenizer_fingerprint="f", masked=False) as writer:
        for number in range(40):
            length = 20 if number % 2 else 3
            writer.add(np.arange(1, 1 + length), None)
        writer.finish()
    return folder


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (["epochs=1"], "tokens: 20 documents, 400 tokens; 3 steps read 400, 1 epoch"),
        (["steps=1"], "tokens: 20 documents, 400 tokens; 1 steps read about 160, about 0.4 epochs"),
    ],
)
def test_documents_tokens_and_epochs_are_those_that_are_read(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], line: str
) -> None:
    monkeypatch.chdir(tmp_path)
    data = [
        f"data.train=[{{path: {store}, min_length: 10}}]",
        "data.tokenizer_unchecked=true",
        "data.seq_len=32",
        "data.workers=0",
    ]
    run = ["run.name=r", "device=cpu", "batch.rows=8", "checkpoint.at_end=false"]
    assert main(["train", *MODEL, *data, *run, *options]) == 0
    log = Path("runs/r/train.log").read_text(encoding="utf-8")
    assert line in log
    steps = [
        json.loads(record)
        for record in Path("runs/r/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    consumed = max(
        record["num_consumed_tokens"] for record in steps if "num_consumed_tokens" in record
    )
    assert consumed == (400 if options == ["epochs=1"] else 160)


@pytest.mark.parametrize(
    ("options", "large", "fast", "is_advised"),
    [
        ([], True, True, True),
        ([], True, False, False),
        ([], False, True, False),
        # Whoever asks for fp32 knows.
        (["precision=fp32"], True, True, False),
        (["precision=bf16"], True, True, False),
    ],
)
def test_bf16_is_advised_for_large_models_on_processors_that_have_it(
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    large: bool,
    fast: bool,
    is_advised: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    if large:
        monkeypatch.setattr(header, "LARGE_FOR_CPU", 1000)
    monkeypatch.setattr(header, "has_fast_bf16", lambda: fast)
    data = [f"data.train=[{store}]", "data.tokenizer_unchecked=true", "data.seq_len=32"]
    run = ["run.name=r", "device=cpu", "batch.rows=2", "steps=1", "checkpoint.at_end=false"]
    assert main(["train", *MODEL, *data, *run, "data.workers=0", *options]) == 0
    log = Path("runs/r/train.log").read_text(encoding="utf-8")
    assert (header.BF16_ADVICE in log) is is_advised
