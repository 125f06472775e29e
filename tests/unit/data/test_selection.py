"""What of a source is wanted, at the edges of every limit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headway.data.selection import Selection
from headway.store.reader import open_store
from headway.store.writer import StoreWriter


@pytest.mark.parametrize(
    ("wanted", "documents"),
    [
        ({}, [0, 1, 3, 4, 5]),  # a document without tokens is none
        ({"min_length": 4}, [1, 3, 5]),
        ({"min_length": 5}, [3, 5]),
        ({"min_length": 6}, [5]),
        ({"max_length": 4}, [0, 1, 4]),
        ({"min_length": 4, "max_length": 5}, [1, 3]),
        ({"limit": 4}, [0, 1, 3]),
        ({"limit": 4, "min_length": 4}, [1, 3]),
    ],
)
def test_limits_include_what_is_exactly_as_long(
    tmp_path: Path, wanted: dict[str, Any], documents: list[int]
) -> None:
    with StoreWriter(tmp_path / "s", dtype="uint16", tokenizer_fingerprint=None) as writer:
        for length in (3, 4, 0, 5, 1, 6):
            writer.add(np.ones(length, np.uint16))
        writer.finish()
    picked, lengths = Selection(open_store(tmp_path / "s"), **wanted).pick(0, 99)
    assert picked.tolist() == documents
    assert lengths.tolist() == [(3, 4, 0, 5, 1, 6)[number] for number in documents]
