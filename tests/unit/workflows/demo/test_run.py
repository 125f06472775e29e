"""The demo's bits per byte, by hand: text alone is counted, and the bigram model is divided by the same bytes."""

import math
from pathlib import Path

import pytest
from support.byte_model import CONFIG, byte_tokenizer, write_model

from headway.store.writer import StoreWriter
from headway.workflows.demo.run import Demo, evaluate


def test_the_model_and_the_bigram_are_divided_by_the_bytes_of_the_scored_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = byte_tokenizer()
    demo = Demo(tmp_path, 1)
    write_model(tmp_path / "model", CONFIG.with_(max_seq_len=256))
    demo.run.parent.mkdir()
    (tmp_path / "model" / "out").rename(demo.run)
    writer = StoreWriter(demo.store, dtype="uint16", tokenizer_fingerprint=tokenizer.fingerprint)
    end = tokenizer.eos_id
    assert end is not None
    for _ in range(4):
        writer.add([*tokenizer.encode("héllo"), end])
    writer.finish()
    monkeypatch.setattr("headway.data.selection.in_valid", lambda numbers, _: numbers == 3)
    # One document of 6 bytes and its end token: 6 tokens are scored, which stand for 5 bytes.
    monkeypatch.setattr("headway.workflows.demo.run.bigram_loss", lambda *_: math.log(2))
    figures = evaluate(demo)
    assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2) * 6 / 5)
    assert figures["bigram_bits_per_byte"] == pytest.approx(6 / 5)
