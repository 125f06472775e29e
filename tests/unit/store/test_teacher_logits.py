"""A store of a teacher's likeliest tokens: what was written is what is read, over shards and parts of a token store."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.store import teacher_logits
from headway.store.teacher_logits import LogitsOrigin, TeacherLogitsWriter, open_logits


def origin(first: int, last: int, vocab: int = 100) -> LogitsOrigin:
    return LogitsOrigin(
        store="content", tokenizer="f", documents=(0, 1), tokens=(first, last), teacher="t", teacher_sha256="0" * 64, vocab=vocab,
        seq_len=8, top_k=2, temperature=1.0, dtype="float32",
    )  # fmt: skip


@pytest.mark.parametrize("shard_positions", [100, 3])
def test_positions_are_found_whichever_shard_they_are_in(
    tmp_path: Path, shard_positions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # three fp32 numbers of a position
    monkeypatch.setattr(teacher_logits, "SHARD_BYTES", shard_positions * 12)
    ids = np.arange(20).reshape(10, 2)
    log_probs = -np.arange(30, dtype=np.float32).reshape(10, 3)
    # tokens 5 to 14 of a token store
    with TeacherLogitsWriter(tmp_path / "l", origin(5, 15)) as writer:
        writer.add(ids[:4], log_probs[:4])
        writer.add(ids[4:], log_probs[4:])
        writer.finish()
    store: Any = open_logits(tmp_path / "l")
    positions = np.array([14, 5, 9, 8, 5])
    found_ids, found_logits = store.gather(positions)
    np.testing.assert_array_equal(found_ids, ids[positions - 5])
    np.testing.assert_array_equal(found_logits, log_probs[positions - 5])
    assert len(store.manifest.shards) == (1 if shard_positions == 100 else 4)
    assert store.manifest.max_id == 19


def test_the_mass_is_that_of_the_ids_without_the_rest(tmp_path: Path) -> None:
    with TeacherLogitsWriter(tmp_path / "l", origin(0, 2)) as writer:
        writer.add(
            np.array([[1, 2], [3, 4]]), np.log(np.array([[0.5, 0.25, 0.25], [0.75, 0.125, 0.125]]))
        )
        writer.finish()
    assert open_logits(tmp_path / "l").manifest.mass == pytest.approx(0.75 + 0.875)


def test_ids_are_as_wide_as_the_vocabulary_needs() -> None:
    assert [origin(0, 1, vocab).id_dtype for vocab in (65_535, 65_536, 65_537)] == [
        "uint16",
        "uint16",
        "uint32",
    ]
    assert origin(0, 1).widths == (4, 12)
    assert origin(0, 1, 70_000).widths == (8, 12)
