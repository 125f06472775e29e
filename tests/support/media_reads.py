"""How often records with media are parsed, and how often a media file is looked at."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from headway.media import records


def count_media_reads(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts from now on: `parsed` records, and media files whose status is asked for (`looked at`)."""
    counts: Counter[str] = Counter()
    parse = records.parse_media_record

    def counting_parse(*arguments: object, **named: object) -> object:
        counts["parsed"] += 1
        return parse(*arguments, **named)  # pyright: ignore[reportArgumentType]

    def counting_stat(stat: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def count(path: object, *arguments: object, **named: object) -> os.stat_result:
            counts["looked at"] += str(path).endswith((".png", ".wav"))
            return stat(path, *arguments, **named)

        return count

    for name in [name for name in sys.modules if name.startswith("headway.")]:
        if getattr(sys.modules[name], "parse_media_record", None) is parse:
            monkeypatch.setattr(f"{name}.parse_media_record", counting_parse)
    monkeypatch.setattr(os, "stat", counting_stat(os.stat))
    monkeypatch.setattr(Path, "stat", counting_stat(Path.stat))
    return counts
