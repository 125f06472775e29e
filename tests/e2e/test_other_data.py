"""A run is not resumed on other data without being asked to: what the sources hold is in the checkpoint."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from support.byte_model import byte_tokenizer
from support.runs import headway, make_stores, tiny_settings

from headway.checkpoint.load import open_checkpoint
from headway.store.writer import StoreWriter
from headway.track.metrics_file import read_metrics

pytestmark = pytest.mark.slow


def rewrite_in_place(path: Path, content: bytes) -> None:
    """Another content of the same size under the same name and time of change."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def raw_data(folder: Path) -> list[str]:
    texts = folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    byte_tokenizer().save(folder / "tokenizer")
    return [f"data.train=[{texts}]", f"tokenizer={folder / 'tokenizer'}", "model.vocab_size=300"]


def change_raw(folder: Path) -> None:
    rewrite_in_place(
        folder / "texts" / "a.txt", ("THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG. " * 40).encode()
    )


def store_data(folder: Path) -> list[str]:
    make_stores(folder)
    return []


def change_store(folder: Path) -> None:
    """Another store in its place: sizes, times and names as before."""
    old = folder / "store0"
    new = folder / "other"
    lengths = np.diff(np.fromfile(old / "docs-00000.idx", "<i8"))
    with StoreWriter(new, dtype="uint16", tokenizer_fingerprint=None) as writer:
        for length in lengths:
            writer.add(np.full(int(length), 63, np.uint16))
        writer.finish()
    for file in new.iterdir():
        os.utime(file, ns=((old / file.name).stat().st_mtime_ns,) * 2)
    shutil.rmtree(old)
    new.rename(old)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        pytest.param(raw_data, change_raw, id="raw files"),
        pytest.param(store_data, change_store, id="a store", marks=pytest.mark.drill),
    ],
)
def test_a_run_is_resumed_on_other_data_only_if_asked_to(tmp_path: Path, make, change) -> None:
    settings = [
        *tiny_settings(tmp_path, "run"),
        "data.valid=null",
        "eval.every=null",
        "checkpoint.every=2",
        *make(tmp_path),
    ]
    first = headway("train", *settings, "steps=4")
    assert first.returncode == 0, first.stderr
    same = headway("train", *settings, "steps=5")
    assert same.returncode == 0, same.stderr
    change(tmp_path)
    refused = headway("train", *settings, "steps=8")
    assert refused.returncode == 2, refused.stderr
    assert "the data changed since" in refused.stderr
    assert "data.accept_changed=true" in refused.stderr
    assert [step["step"] for step in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [
        1,
        2,
        3,
        4,
        5,
    ]
    asked = headway("train", *settings, "steps=8", "data.accept_changed=true")
    assert asked.returncode == 0, asked.stderr
    assert "reading it from its beginning" in asked.stderr
    assert open_checkpoint(tmp_path / "run" / "checkpoints" / "latest").step == 8
    again = headway("train", *settings, "steps=9")  # what was accepted is the run's data now
    assert again.returncode == 0, again.stderr
