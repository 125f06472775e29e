"""Open the token stores of a recipe. In: the `data` section, the tokenizer, the model's vocabulary; out: mixtures for the loader.

What cannot work is an error here, before training starts: a missing path, an unfinished store, another tokenizer, an id outside the
vocabulary, an empty side of a split. Raw files must be stores by now: see `prepare_sources` in `prepare/sources.py`.
A folder of several types (InternLM or MDS folders, or a store made from one) becomes one source per type; each gets its own rows and
reported loss. A store whose types are interleaved stays one source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from headway.config.load import set_name
from headway.data.config import DataConfig, SourceConfig, default_cache_dir
from headway.data.groups import DocumentReader, GroupSource, SourceReader
from headway.data.media import MediaFeatures
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection, split_side
from headway.data.synthetic import SyntheticSource
from headway.data.teacher import CachedTeacher
from headway.errors import ConfigError, DataError
from headway.store.checksums import Checksums
from headway.store.foreign.base import ForeignStore
from headway.store.local_copy import copy_to_local
from headway.store.media_items import has_media, read_items
from headway.store.open import detect_kind, open_source
from headway.store.reader import Store, is_store, open_store
from headway.store.source import DocumentRange, SourceView, TokenSource

VALID_NAME = "valid"


@dataclass(frozen=True)
class SourceStore:
    """A source of the recipe and the token store it is read from."""

    config: SourceConfig
    path: Path
    name: str | None = None
    """The name in reports, if it is not the store's path: the raw files that the store was built from."""


@dataclass(frozen=True)
class SourceStores:
    """The stores of the training mixture, and of each validation set by name."""

    train: tuple[SourceStore, ...]
    valid: dict[str, tuple[SourceStore, ...]]

    @staticmethod
    def of(
        config: DataConfig,
        find: Callable[[SourceConfig], SourceStore] = lambda one: SourceStore(one, Path(one.path)),
    ) -> SourceStores:
        """The store of every source, found by `find`; by default every path must be a store."""
        sets = sets_of(config.valid.sets) if config.valid and config.valid.sets else {}
        train = tuple(find(one) for one in config.train or ())
        return SourceStores(
            train, {name: tuple(find(one) for one in many) for name, many in sets.items()}
        )


@dataclass(frozen=True)
class OpenData:
    """The training mixture, and the validation sets by name."""

    train: tuple[MixtureSource, ...]
    valid: dict[str, tuple[MixtureSource, ...]]
    checksums: Checksums = field(default_factory=Checksums)
    media: MediaFeatures | None = None
    """The features of pictures and sounds in the sources; None: text alone."""
    teacher: CachedTeacher | None = None
    """What a teacher expects at every position of the sources; None: nothing is stored of one."""

    @property
    def names(self) -> list[str]:
        """The names of the training sources, in the order of `Batch.source`."""
        return [one.selection.source.name for one in self.train]

    def contents(self) -> list[dict[str, str]]:
        """The checksum of every source, for the checkpoint. Files of formats without checksums are read once."""
        sets = {"train": self.train, **{f"valid.{name}": many for name, many in self.valid.items()}}
        return [
            {
                "set": name,
                "source": one.selection.source.name,
                "content": self._content_of(one.selection.source),
            }
            for name, many in sets.items()
            for one in many
        ]

    def _content_of(self, source: TokenSource) -> str:
        content = _content(source, self.checksums)
        return (
            content
            if self.media is None or not has_media(source)
            else f"{content}-{self.media.key}"
        )


def _content(source: TokenSource, checksums: Checksums) -> str:
    if isinstance(source, GroupSource) and source.store is not None:
        return _content(source.store, checksums) + source.content_suffix
    if isinstance(source, SourceView):
        return f"{_content(source.source, checksums)}-{source.part_key}"
    if isinstance(source, Store):
        return (
            f"{source.manifest.content}-{read_items(source).digest}"
            if has_media(source)
            else source.manifest.content
        )
    if isinstance(source, ForeignStore):
        files = checksums.of_all([file for part in source.parts for file in part.files])
        return hashlib.sha256(repr((source.content_key, files)).encode()).hexdigest()
    return source.content_key


def open_data(
    config: DataConfig,
    stores: SourceStores | None = None,
    *,
    tokenizer: Path | None,
    vocab_size: int,
    seed: int,
    reader: SourceReader | None = None,
    media: MediaFeatures | None = None,
) -> OpenData:
    """Open every source of a recipe from its store in `stores` (None: every path of the recipe is a store).

    `tokenizer`: the path of the recipe's tokenizer, if it has one. `vocab_size`: the model's. `reader`: how the task reads sources; None:
    document by document. `media`: the features for stores that hold pictures and sounds.
    """
    if reader is None:
        reader = DocumentReader()
    reader.check(config)
    checksums = Checksums(config.cache_dir or default_cache_dir())
    stores = stores or SourceStores.of(config)
    if config.train is None:
        opened: list[tuple[SourceConfig, TokenSource]] = [
            (SourceConfig(path="generated data"), SyntheticSource(vocab_size, seed))
        ]
    else:
        opened = [(one.config, _open_store(one, config, checksums)) for one in stores.train]
    valid = {
        name: [(one.config, _open_store(one, config, checksums)) for one in many]
        for name, many in stores.valid.items()
    }
    if config.train is not None:
        opened = [(one, reader.read(source)) for one, source in opened]
        valid = {
            name: [(one, reader.read(source)) for one, source in many]
            for name, many in valid.items()
        }
        if config.by_type and reader.splits_types:
            opened = [typed for one, source in opened for typed in by_type(one, source)]
    from_files = [] if config.train is None else [source for _, source in opened]
    _check_media([*from_files, *(source for many in valid.values() for _, source in many)], media)
    _check(
        [*from_files, *(source for many in valid.values() for _, source in many)],
        tokenizer,
        vocab_size,
        config.tokenizer_unchecked,
    )
    return replace(with_valid(config, opened, valid, checksums), media=media)


Opened = Sequence[tuple[SourceConfig, TokenSource]]


def with_valid(
    config: DataConfig,
    opened: Opened,
    valid: Mapping[str, Opened],
    checksums: Checksums,
    media: MediaFeatures | None = None,
) -> OpenData:
    """The mixtures of opened sources: the validation sets, or the share of the training documents that is held out."""
    fraction = config.valid.fraction if config.valid else None
    if fraction is None:
        return OpenData(
            _mixture(opened, config),
            {name: _mixture(many, config) for name, many in valid.items()},
            checksums,
        )
    sides = {side: _mixture(opened, config, side, fraction) for side in ("train", VALID_NAME)}
    return OpenData(sides["train"], {VALID_NAME: sides[VALID_NAME]}, checksums)


def _check_media(sources: Sequence[TokenSource], media: MediaFeatures | None) -> None:
    """Refuse placeholders of pictures and sounds for a model that would read them as text, and media inputs that nothing would train."""
    if media is not None and not any(has_media(source) for source in sources):
        raise ConfigError(
            "multimodal is set, but no source holds pictures or sounds. Set data.train.0.kind: multimodal for those that do."
        )
    if (
        media is None
        and (found := next((source for source in sources if has_media(source)), None)) is not None
    ):
        raise ConfigError(
            f"data: {found.name} holds pictures or sounds, and the recipe has no `multimodal` section. Set it (docs/multimodal.md)."
        )


def _open_store(one: SourceStore, config: DataConfig, checksums: Checksums) -> TokenSource:
    path, kind = one.path, detect_kind(one.path)
    if kind == "raw":
        raise ConfigError(
            f"data: {path} is raw text, not a token store. Run `headway data tokenize` first."
        )
    if kind != "headway":
        if config.stage_to is not None:
            raise ConfigError(
                f"data.stage_to copies only headway stores; {path} is {kind}. Use `headway data convert` first."
            )
        return open_source(path, kind)
    if config.stage_to is not None:
        path = copy_to_local(path, config.stage_to, checksums)
    return open_store(path, one.name, checksums)


def check_sources(
    sources: Sequence[TokenSource], fingerprint: str | None, vocab_size: int, unchecked: bool
) -> None:
    """Raise a DataError for ids of another tokenizer, or outside the model's vocabulary."""
    for source in sources:
        if source.max_id >= vocab_size:
            raise DataError(
                f"{source.name}: holds id {source.max_id}; the model's vocabulary has {vocab_size} ids (0 to {vocab_size - 1}). "
                f"Use the tokenizer that made the data, or set model.vocab_size to {source.max_id + 1} or more."
            )
        if source.fingerprint is None and not unchecked:
            raise DataError(
                f"{source.name}: does not record which tokenizer made it, so its ids cannot be checked. "
                f"If it is the tokenizer of the recipe, set data.tokenizer_unchecked: true."
            )
        if (
            source.fingerprint is not None
            and fingerprint is not None
            and source.fingerprint != fingerprint
        ):
            raise DataError(
                f"{source.name}: made by another tokenizer ({source.fingerprint[:12]}) than that of the recipe ({fingerprint[:12]}). "
                f"Tokenize it again with `headway data tokenize`, or set `tokenizer` to the one that made it."
            )


def _check(
    sources: Sequence[TokenSource], tokenizer: Path | None, vocab_size: int, unchecked: bool
) -> None:
    fingerprint = None
    if tokenizer is not None and any(source.fingerprint is not None for source in sources):
        from headway.tokenizer.load import load_tokenizer

        fingerprint = load_tokenizer(tokenizer).fingerprint
    check_sources(sources, fingerprint, vocab_size, unchecked)


def _mixture(
    opened: Sequence[tuple[SourceConfig, TokenSource]],
    config: DataConfig,
    side: str | None = None,
    fraction: float = 0.0,
) -> tuple[MixtureSource, ...]:
    found: list[MixtureSource] = []
    for one, source in opened:
        longest = None
        if isinstance(source, GroupSource) and source.keeps_whole:
            longest = config.seq_len
        selection = Selection(source, one.limit, one.min_length, max_length=longest)
        selection.check()
        if side is not None:
            selection = split_side(selection, "valid" if side == VALID_NAME else "train", fraction)
        # Validation reads each document once, independent of the weights for training.
        found.append(
            MixtureSource(selection)
            if side == VALID_NAME
            else MixtureSource(selection, one.weight, one.repeat)
        )
    return tuple(found)


FOLDERS_ARE_TYPES = ("internlm", "mds")


def by_type(given: SourceConfig, source: TokenSource) -> Iterator[tuple[SourceConfig, TokenSource]]:
    """One source per type. Weight and limit are divided among the types."""
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


def _types(source: TokenSource) -> list[TokenSource]:
    if isinstance(source, ForeignStore):
        return [*source.by_folder()] if source.kind in FOLDERS_ARE_TYPES else [source]
    if (
        not isinstance(source, Store)
        or source.manifest.types is None
        or len(source.manifest.types) < 2
    ):
        return [source]
    numbers = source.type_numbers()
    assert numbers is not None
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    if len(begins) != len(np.unique(numbers)):
        return [source]
    ends = [*begins[1:].tolist(), len(numbers)]
    return [
        DocumentRange(source, a, b, source.type_of(a) or "other")
        for a, b in zip(begins.tolist(), ends, strict=True)
    ]


def sets_of(
    given: Mapping[str, tuple[SourceConfig, ...]] | str,
) -> dict[str, tuple[SourceConfig, ...]]:
    """The validation sets by name, or the stores, folders and files of a folder, or the one set that a file is."""
    if not isinstance(given, str):
        return dict(given)
    folder = Path(given)
    if folder.is_file():
        return {set_name(given): (SourceConfig(path=given),)}
    if not folder.is_dir():
        raise ConfigError(
            f"data.valid.sets is {given!r}, and there is no such file or folder. Set a file, a folder of data sets, or named sets: "
            "{sets: {wiki: FILE}}."
        )
    if is_store(folder) or (folder / "index.json").is_file():
        return {folder.name: (SourceConfig(path=given),)}
    found = {
        _set_name(child): (SourceConfig(path=str(child)),)
        for child in sorted(folder.iterdir())
        if _is_set(child)
    }
    if not found:
        raise ConfigError(
            f"data.valid.sets is {given!r}; the folder holds no data set. Set a folder with stores, folders or files."
        )
    return found


def _set_name(child: Path) -> str:
    return child.name if child.is_dir() else set_name(child.name)


def _is_set(child: Path) -> bool:
    if (
        child.name.startswith(".")
        or child.suffix == ".meta"
        or child.name.lower().startswith(("readme", "license"))
    ):
        return False
    try:
        detect_kind(child)
    except DataError:
        return False
    return True
