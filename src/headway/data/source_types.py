"""One path, several kinds of data in it: the types of a training source become sources, the sets of a validation folder become sets.

A type is a folder of an InternLM or MDS folder, or of a native store that was made from one: rows hold documents of one type, and each
type's loss is reported. Types whose documents lie scattered in a native store stay one source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from headway.data.config import SourceConfig
from headway.errors import ConfigError, DataError
from headway.store.foreign.documents import ForeignStore
from headway.store.reader import Store, is_store
from headway.store.source import Source
from headway.store.views import DocumentRange

FOLDERS_ARE_TYPES = ("internlm", "mds")


def by_type(given: SourceConfig, source: Source) -> Iterator[tuple[SourceConfig, Source]]:
    """A source as one source per type; weight and limit are shared out, so that together they are what was given."""
    parts = _types(source)
    if len(parts) == 1:
        yield given, source
        return
    total, left = sum(part.num_tokens for part in parts), given.limit
    for part in parts:
        change: dict[str, object] = {}
        if given.weight is not None:
            change["weight"] = given.weight * part.num_tokens / total
        if left is not None:
            if not left:
                break
            change["limit"] = min(left, part.num_documents)
            left -= min(left, part.num_documents)
        yield given.model_copy(update=change), part


def _types(source: Source) -> list[Source]:
    if isinstance(source, ForeignStore):
        return [*source.by_folder()] if source.kind in FOLDERS_ARE_TYPES else [source]
    if not isinstance(source, Store) or source.manifest.types is None or len(source.manifest.types) < 2:
        return [source]
    numbers = source.type_numbers()
    assert numbers is not None
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    if len(begins) != len(np.unique(numbers)):
        return [source]
    ends = [*begins[1:].tolist(), len(numbers)]
    return [DocumentRange(source, a, b, source.type_of(a) or "other") for a, b in zip(begins.tolist(), ends, strict=True)]


def sets_of(given: Mapping[str, tuple[SourceConfig, ...]] | str) -> dict[str, tuple[SourceConfig, ...]]:
    """The validation sets: as they are named, or everything that lies in a folder, named as there."""
    if not isinstance(given, str):
        return dict(given)
    folder = Path(given)
    if not folder.is_dir():
        raise ConfigError(
            f"data.valid.sets is {given!r}, which is no folder. Give a folder of data sets, or names: {{sets: {{wiki: {given}}}}}."
        )
    if is_store(folder) or (folder / "index.json").is_file():
        return {folder.name: (SourceConfig(path=given),)}
    found = {_set_name(child): (SourceConfig(path=str(child)),) for child in sorted(folder.iterdir()) if _is_set(child)}
    if not found:
        raise ConfigError(f"data.valid.sets is {given!r}; the folder holds no data set. Give a folder of stores, folders or files.")
    return found


def _set_name(child: Path) -> str:
    return child.name if child.is_dir() else child.name.split(".")[0]


def _is_set(child: Path) -> bool:
    from headway.store.foreign.detect import detect

    if child.name.startswith(".") or child.suffix == ".meta" or child.name.lower().startswith(("readme", "license")):
        return False
    try:
        detect(child)
    except DataError:
        return False
    return True
