"""A fraction of a source for validation. In: what of a source is wanted, a side, a fraction; out: what that side reads, never nothing.

Documents are divided by their index alone. Where that leaves a side without one, the document nearest to the border changes sides; where
there is only one document, validation gets its last tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np

from headway.data.pairs import PairSource
from headway.data.shuffle import SCAN_DOCUMENTS, SPLIT_KEY, Selection, in_valid, mix
from headway.errors import ConfigError
from headway.store.views import TokenRange

LEAST_TOKENS = 2
"""A token and the next one, which is its target."""


def one_side(wanted: Selection, side: Literal["train", "valid"], fraction: float) -> Selection:
    """What one side of a split reads of a selection that holds something."""
    documents, lowest, highest = 0, None, None
    for begin in range(0, wanted.num_documents, SCAN_DOCUMENTS):
        found, _ = wanted.pick(begin, begin + SCAN_DOCUMENTS)
        if not len(found):
            continue
        documents += len(found)
        keys = mix(found, SPLIT_KEY)
        low, high = int(np.argmin(keys)), int(np.argmax(keys))
        lowest = min(lowest or (int(keys[low]), int(found[low])), (int(keys[low]), int(found[low])))
        highest = max(highest or (int(keys[high]), int(found[high])), (int(keys[high]), int(found[high])))
        ends = in_valid(np.array([lowest[1], highest[1]]), fraction).tolist()
        if ends == [True, False]:
            return replace(wanted, side=side, fraction=fraction)
    assert lowest is not None and highest is not None, "the selection holds nothing"
    if documents == 1:
        return _of_one_document(wanted, lowest[1], side, fraction)
    # Both ends are on one side: all documents are for validation, or all for training.
    moved = highest[1] if bool(in_valid(np.array([lowest[1]]), fraction)[0]) else lowest[1]
    return replace(wanted, side=side, fraction=fraction, moved=moved)


def _of_one_document(wanted: Selection, document: int, side: Literal["train", "valid"], fraction: float) -> Selection:
    source = wanted.source
    length = int(source.lengths(document, document + 1)[0])
    least = max(LEAST_TOKENS, wanted.min_length)
    if isinstance(source, PairSource) or length < 2 * least:
        what = "one pair" if isinstance(source, PairSource) else f"one document, of {length} tokens"
        raise ConfigError(
            f"data.valid.fraction is {fraction:g}, but {source.name} holds {what}, which cannot be divided. Give it more documents, or "
            "validation data of its own: data.valid.sets."
        )
    cut = length - min(max(least, round(length * fraction)), length - least)
    view = TokenRange(source, document, 0, cut) if side == "train" else TokenRange(source, document, cut, length)
    return Selection(view, min_length=wanted.min_length)
