"""Plain text: a text file, or the text under a key of a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.errors import DataError
from headway.records.base import FOR_TEXT, DetectContext, Fit, RecordFields, RecordKind, ShownPart
from headway.text.document import Document, Record


@dataclass(frozen=True)
class PlainText:
    """A text."""

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
        if any(name in context.settings for name in FOR_TEXT):
            return Fit((context.text_key,), 0)  # reading it says so where a record lacks the key
        if isinstance(data.get("text"), str):
            return Fit(("text",), 0)
        return None

    def parse(self, record: Record | Document, fields: RecordFields) -> PlainText:
        text = record.text if isinstance(record, Document) else fields.text(record).text
        if not text.strip():
            raise DataError(f"{record.place}: the text is empty.")
        return PlainText(text)

    def show(self, example: PlainText) -> list[list[ShownPart]]:
        return [[ShownPart("text", example.text, True)]]

    def max_length(self, seq_len: int, packing: str, reads: tuple[str, ...]) -> int | None:
        return None
