"""Data given in Python: paths, records, a Hugging Face dataset or an iterator come in; the sources
of a recipe go out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.data.config import SourceConfig
    from headway.train.config import Recipe

Kind: TypeAlias = Literal["text", "chat", "preference", "unpaired"] | str
"""A kind of records of headway, or the module of your own kind, as in a recipe."""
Records: TypeAlias = Iterable[Mapping[str, Any]]
"""A list of dicts, a Hugging Face `Dataset`, or any iterator of dicts, which is read once."""
Data: TypeAlias = str | Path | Sequence[str | Path] | Records
"""Paths are files, folders, globs, token stores or hub ids, as in a recipe; anything else is
`Records`.
"""


def input_paths(data: Data, cache_dir: Path | None = None, *, name: str = "data") -> list[str]:
    """The paths of some data; records are first written to a file in the cache."""
    from headway.prepare.records_file import write_records

    if isinstance(data, str | Path):
        return [str(data)]
    if (
        isinstance(data, list | tuple)
        and data
        and all(isinstance(path, str | Path) for path in data)
    ):
        return [str(path) for path in data]
    return [str(write_records(data, cache_dir, name=name))]  # pyright: ignore[reportArgumentType]


def with_data(
    recipe: Recipe, data: Data | None, valid: Data | float | None, kind: Kind | None
) -> Recipe:
    """The recipe with other data.

    A recipe with one source keeps how that source is read (kind, chat_template, keys, ...).
    """
    if kind is not None and data is None and valid is None:
        raise ConfigError(
            f"kind is {kind!r}, but neither data nor valid is given. "
            "Set data.train.0.kind in the recipe."
        )

    # Which stage would read it is not known.
    if (data is not None or valid is not None) and recipe.stages:
        raise ConfigError(
            "data or valid is given, but the recipe has stages, which may read different data. "
            "Write records to files."
        )

    source_settings = _reading(recipe.data.train, kind)
    changes: dict[str, Any] = {}
    if data is not None:
        changes["data.train"] = _sources(data, recipe, source_settings, "data")

    if isinstance(valid, int | float):
        changes["data.valid"] = {"fraction": float(valid)}
    elif valid is not None:
        changes["data.valid"] = {
            "sets": {"valid": _sources(valid, recipe, source_settings, "valid")}
        }

    if changes:
        return recipe.with_(changes)
    return recipe


def _sources(
    data: Data, recipe: Recipe, source_settings: Mapping[str, Any], name: str
) -> list[dict[str, Any]]:
    """The sources of some data, each with `source_settings`, which say how raw files are read."""
    is_path = isinstance(data, str | Path)
    sources: list[dict[str, Any]] = []
    for path in input_paths(data, recipe.data.cache_dir, name=name):
        # A token store was read when it was written: settings for raw files would be refused.
        settings = {} if is_path and _is_store(path) else source_settings
        sources.append({**settings, "path": path})
    return sources


def _is_store(path: str) -> bool:
    """Whether a path holds tokens already, so that settings for raw files do not apply."""
    from headway.store.reader import is_store

    return is_store(Path(path))


def _reading(sources: tuple[SourceConfig, ...] | None, kind: Kind | None) -> dict[str, Any]:
    """How the only source of a recipe is read, as settings of another one."""
    settings: dict[str, Any] = {}
    if sources is not None and len(sources) == 1:
        settings = sources[0].model_dump(
            mode="json", exclude_unset=True, exclude={"path", "weight", "repeat", "limit"}
        )
    # Keys and templates of another kind of records mean nothing for this one.
    if kind is not None and kind != settings.get("kind", "auto"):
        return {"kind": kind}
    return settings
