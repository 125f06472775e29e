"""Captions of pictures and sounds, for training an aligner (objective contrastive).

A record becomes a sample of items (caption, picture, sound), not a document of tokens:
`prepare/features.py` reads the samples, and no token store is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import ConfigError
from headway.media.records import MediaRecord, parse_media_record
from headway.records.base import RecordFields, RecordKind, ShownPart
from headway.text.document import Record

if TYPE_CHECKING:
    from headway.records.encode_media import MediaPositions


class Kind(RecordKind):
    """Captions; they have no documents, so nothing about chat templates or lengths applies."""

    mark = None
    unit = "samples"
    content = "captions"
    has_template = False
    has_tokens = False
    holds_media = True
    settings = ("drop_bad",)
    targets = ()
    recipe = None
    large_recipe = None

    def parse(self, record: Record, fields: RecordFields) -> MediaRecord:
        return parse_media_record(record)

    def show(self, example: MediaRecord) -> list[list[ShownPart]]:
        return [[ShownPart("caption", example.caption or "", True)]]

    def check_positions(self, path: str, positions: MediaPositions | None) -> None:
        # Only runs that tokenize their data ask this, and they cannot use captions.
        raise ConfigError(
            f"data: {path} has kind captions, which objective contrastive reads (model.aligner). "
            "Set another kind."
        )
