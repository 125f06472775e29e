"""Ranks of an aligner's vectors, counted by hand: recall, MRR, median; ties share their rank; absent modalities take no part."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headway.errors import ConfigError
from headway.eval import retrieval
from headway.eval.retrieval import evaluate_retrieval


def found(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    records: list[dict[str, str]],
    vectors: dict[str, dict[int, Any]],
) -> Any:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for record in records:
        for modality in ("image", "audio"):
            if modality in record:
                # Files of different content: equal ones would share a rank.
                (tmp_path / record[modality]).write_text(record[modality])
    heads = SimpleNamespace(tensors={f"heads.{name}.proj.weight": None for name in vectors})
    monkeypatch.setattr(retrieval, "aligner_folder", lambda path: path)
    monkeypatch.setattr(retrieval, "read_aligner", lambda path: heads)
    monkeypatch.setattr(
        retrieval,
        "_vectors",
        lambda folder, heads, name, samples: {n: np.array(v) for n, v in vectors[name].items()},
    )
    return evaluate_retrieval(tmp_path, str(tmp_path / "a.jsonl"))


def test_ranks_are_those_of_a_hand_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [
        {"text": "a", "image": "a.png"},
        {"text": "b", "image": "b.png"},
        {"text": "c", "image": "c.png"},
        {"text": "d", "audio": "d.wav"},
    ]
    images = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [0.0, 1.0]}
    texts = {0: [1.0, 0.0], 1: [0.0, 1.0], 2: [0.8, 0.6], 3: [9.0, 9.0]}
    scores, rows = found(tmp_path, monkeypatch, records, {"text": texts, "image": images})
    first = next(score for score in scores if score.pair == "text_to_image")
    # a is first; b shares the first two places with c; c is behind a and shares the last two with b
    assert first.candidates == 3
    assert first.recall_at_1 == pytest.approx((1 + 0.5 + 0) / 3)
    assert first.mrr == pytest.approx((1 + 1 / 1.5 + 1 / 2.5) / 3)
    assert first.median_rank == 1.5
    assert first.recall_at_5 == 1.0
    assert first.chance == pytest.approx(1 / 3)
    assert first.modality_gap == pytest.approx(np.hypot(0.6 - 1 / 3, 1.6 / 3 - 2 / 3))
    assert [row.rank for row in rows[:3]] == [1, 2, 3]
    assert rows[2].found[0][0].name.endswith("a.png")


def test_nothing_to_rank_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="nothing can be ranked"):
        found(
            tmp_path,
            monkeypatch,
            [{"text": "a", "image": "a.png"}],
            {"text": {0: [1.0]}, "image": {0: [1.0]}},
        )
    monkeypatch.setattr(retrieval, "aligner_folder", lambda path: None)
    with pytest.raises(ConfigError, match="is not a run of phase 1"):
        evaluate_retrieval(tmp_path, "x")
