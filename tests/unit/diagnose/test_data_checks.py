"""Checks of the data say how much of it they have read."""

from pathlib import Path

import numpy as np
import pytest

from headway.data.mixture import MixtureSource
from headway.data.open import OpenData
from headway.data.selection import Selection
from headway.diagnose import data_checks
from headway.store.reader import open_store
from headway.store.writer import StoreWriter


def _source(path: Path, num_documents: int) -> MixtureSource:
    with StoreWriter(path, dtype="uint16", tokenizer_fingerprint=None) as writer:
        for number in range(num_documents):
            writer.add(np.full(10, number, np.uint16))
        writer.finish()
    return MixtureSource(Selection(open_store(path)))


@pytest.mark.parametrize(("most_tokens", "is_whole"), [(160, True), (100, False)])
def test_the_line_about_copies_says_when_a_part_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most_tokens: int, is_whole: bool
) -> None:
    monkeypatch.setattr(data_checks, "MOST_TOKENS", most_tokens)
    # Each of the two has 80 tokens: fewer than the limit of both together, which they share.
    data = OpenData((_source(tmp_path / "a", 8), _source(tmp_path / "b", 8)), {})
    (check,) = data_checks.overlap_checks(data)
    assert ("tokens that were read" not in check.detail) == is_whole
