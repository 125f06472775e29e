"""Plain text: a text file, or the text under a key of a record.

Text takes its own way through headway/prepare: it has no chat template and no loss mask, every
token is a target, and long files are read in pieces. So this kind has no encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import DataError
from headway.records.base import FOR_TEXT, DetectContext, Fit, RecordFields, RecordKind, ShownPart
from headway.text.document import Document, Record


@dataclass(frozen=True)
class PlainText:
    """The example of this kind; other keys of a record are metadata, and not reported as unread."""

    text: str
    unread: tuple[str, ...] = ()


class Kind(RecordKind):
    """Text; every token is a target."""

    mark = None
    unit = "documents"
    content = "text"
    has_template = False
    is_text = True
    settings = (*FOR_TEXT, "format")
    targets = None
    recipe = "pretrain"
    large_recipe = "pretrain"

    def detect(self, data: Mapping[str, Any], context: DetectContext) -> Fit | None:
        # A source that states text_key or template is text, even where this record lacks the key:
        # reading it then reports the missing key, which says more than a failed detection.
        if any(name in context.settings for name in FOR_TEXT):
            return Fit((context.text_key,), 0)
        if isinstance(data.get("text"), str):
            return Fit(("text",), 0)
        return None

    def parse(self, record: Record | Document, fields: RecordFields) -> PlainText:
        if isinstance(record, Document):
            text = record.text
        else:
            text = fields.text(record).text
        if not text.strip():
            raise DataError(f"{record.place}: the text is empty.")
        return PlainText(text)

    def show(self, example: PlainText) -> list[list[ShownPart]]:
        return [[ShownPart("text", example.text, True)]]

    def max_length(self, seq_len: int, packing: str, reads: tuple[str, ...]) -> int | None:
        # Packing cuts a text that is longer than a row and trains on all of its pieces.
        return None
