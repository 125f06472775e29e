"""Open the token stores of a recipe. In: the `data` section, the tokenizer, the model's vocabulary;
out: mixtures for the loader.

What cannot work is an error here, before training starts: a missing path, an unfinished store,
another tokenizer, an id outside the vocabulary, an empty side of a split. Raw files must be stores
by now: see `prepare_sources` in `prepare/sources.py`. A folder of several types (InternLM or MDS
folders, or a store made from one) becomes one source per type; each gets its own rows and reported
loss. A store whose types are interleaved stays one source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from headway.config.overrides import set_name
from headway.data.config import DataConfig, SourceConfig, default_cache_dir
from headway.data.groups import DocumentReader, GroupSource, SourceReader
from headway.data.mixture import MixtureSource
from headway.data.selection import Selection, split_side
from headway.errors import ConfigError, DataError
from headway.store.checksums import Checksums
from headway.store.media_items import has_media, read_items
from headway.store.open import detect_kind, open_source
from headway.store.reader import Store, is_store, open_store
from headway.store.source import DocumentRange, SourceView, TokenSource

if TYPE_CHECKING:
    from headway.data.media import MediaFeatures
    from headway.data.pictures import PictureFeatures
    from headway.data.teacher import CachedTeacher

VALID_NAME = "valid"


@dataclass(frozen=True)
class SourceStore:
    """A source of the recipe and the token store it is read from."""

    config: SourceConfig
    path: Path
    name: str | None = None
    """The name in reports, if it is not the store's path: the raw files that the store was built
    from."""


@dataclass(frozen=True)
class SourceStores:
    """The stores of the training mixture, and of each validation set by name."""

    train: tuple[SourceStore, ...]
    valid: dict[str, tuple[SourceStore, ...]]

    @staticmethod
    def of(
        config: DataConfig,
        find: Callable[[SourceConfig], SourceStore] = lambda source: SourceStore(
            source, Path(source.path)
        ),
    ) -> SourceStores:
        """The store of every source, found by `find`; by default every path must be a store."""
        sets = {}
        if config.valid and config.valid.sets:
            sets = sets_of(config.valid.sets)
        train = tuple(find(source) for source in config.train or ())
        valid = {name: tuple(find(source) for source in sources) for name, sources in sets.items()}
        return SourceStores(train, valid)


@dataclass(frozen=True)
class OpenData:
    """The training mixture, and the validation sets by name."""

    train: tuple[MixtureSource, ...]
    valid: dict[str, tuple[MixtureSource, ...]]
    checksums: Checksums = field(default_factory=Checksums)
    media: MediaFeatures | PictureFeatures | None = None
    """The features of pictures and sounds in the sources; None: text alone."""
    teacher: CachedTeacher | None = None
    """What a teacher expects at every position of the sources; None: nothing is stored of one."""

    @property
    def names(self) -> list[str]:
        """The names of the training sources, in the order of `Batch.source`."""
        return [member.selection.source.name for member in self.train]

    def contents(self) -> list[dict[str, str]]:
        """The checksum of every source, for the checkpoint. Files of formats without checksums are
        read once."""
        mixtures = {"train": self.train}
        mixtures |= {f"valid.{name}": mixture for name, mixture in self.valid.items()}
        contents: list[dict[str, str]] = []
        for name, mixture in mixtures.items():
            for member in mixture:
                source = member.selection.source
                contents.append(
                    {"set": name, "source": source.name, "content": self._content_of(source)}
                )
        return contents

    def _content_of(self, source: TokenSource) -> str:
        content = _content(source, self.checksums)
        # Another encoder gives other features for the same store: to the model that is other data.
        if self.media is None or not has_media(source):
            return content
        return f"{content}-{self.media.key}"


def _content(source: TokenSource, checksums: Checksums) -> str:
    if isinstance(source, GroupSource) and source.store is not None:
        return _content(source.store, checksums) + source.content_suffix
    if isinstance(source, SourceView):
        return f"{_content(source.source, checksums)}-{source.part_key}"
    if isinstance(source, Store):
        if has_media(source):
            return f"{source.manifest.content}-{read_items(source).digest}"
        return source.manifest.content
    from headway.store.foreign.base import ForeignStore

    if isinstance(source, ForeignStore):
        # Other systems' stores carry no checksum of their content, so their files are read (once
        # per file: the result is cached).
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
    media: MediaFeatures | PictureFeatures | None = None,
) -> OpenData:
    """Open every source of a recipe from its store in `stores` (None: every path of the recipe is a
    store).

    `tokenizer`: the path of the recipe's tokenizer, if it has one. `vocab_size`: the model's.
    `reader`: how the task reads sources; None: document by document. `media`: the features for
    stores that hold pictures and sounds.
    """
    if reader is None:
        reader = DocumentReader()
    reader.check(config)
    checksums = Checksums(config.cache_dir or default_cache_dir())
    stores = stores or SourceStores.of(config)

    # Every store is opened before any is read by the task: a missing path is reported first.
    train = [(store.config, _open_store(store, config, checksums)) for store in stores.train]
    valid = {
        name: [(store.config, _open_store(store, config, checksums)) for store in members]
        for name, members in stores.valid.items()
    }
    if config.train is None:
        from headway.data.synthetic import SyntheticSource

        train = [(SourceConfig(path="generated data"), SyntheticSource(vocab_size, seed))]
        # No tokenizer made it, so there is nothing to check.
        from_files = []
    else:
        # The order matters: a reader numbers groups over all sources, training first.
        train = [(settings, reader.read(source)) for settings, source in train]
        valid = {
            name: [(settings, reader.read(source)) for settings, source in members]
            for name, members in valid.items()
        }
        if config.by_type and reader.splits_types:
            train = [typed for member in train for typed in by_type(*member)]
        from_files = [source for _, source in train]

    from_files += [source for members in valid.values() for _, source in members]
    _check_media(from_files, media)
    _check(from_files, tokenizer, vocab_size, config.tokenizer_unchecked)
    return replace(with_valid(config, train, valid, checksums), media=media)


Opened = Sequence[tuple[SourceConfig, TokenSource]]
"""Settings of sources in the recipe, and the sources themselves."""


def with_valid(
    config: DataConfig,
    opened: Opened,
    valid: Mapping[str, Opened],
    checksums: Checksums,
) -> OpenData:
    """The mixtures of opened sources: the validation sets, or the share of the training documents
    that is held out."""
    fraction = config.valid.fraction if config.valid else None
    if fraction is None:
        return OpenData(
            _mixture(opened, config),
            {name: _mixture(members, config) for name, members in valid.items()},
            checksums,
        )
    train = _mixture(opened, config, "train", fraction)
    held_out = _mixture(opened, config, VALID_NAME, fraction)
    return OpenData(train, {VALID_NAME: held_out}, checksums)


def _check_media(
    sources: Sequence[TokenSource], media: MediaFeatures | PictureFeatures | None
) -> None:
    """Refuse placeholders of pictures and sounds for a model that would read them as text, and
    media inputs that nothing would train."""
    with_media = [source for source in sources if has_media(source)]
    if media is not None and not with_media:
        raise ConfigError(
            "multimodal is set, but no source holds pictures or sounds. Set data.train.0.kind: "
            "multimodal for those that do."
        )
    if media is None and with_media:
        raise ConfigError(
            f"data: {with_media[0].name} holds pictures or sounds, and the recipe has no "
            "`multimodal` section. Set it (docs/multimodal.md)."
        )


def _open_store(store: SourceStore, config: DataConfig, checksums: Checksums) -> TokenSource:
    path = store.path
    kind = detect_kind(path)
    if kind == "raw":
        raise ConfigError(
            f"data: {path} is raw text, not a token store. Run `headway data tokenize` first."
        )
    if kind != "headway":
        if config.stage_to is not None:
            raise ConfigError(
                f"data.stage_to copies only headway stores; {path} is {kind}. Use `headway data "
                "convert` first."
            )
        return open_source(path, kind)
    if config.stage_to is not None:
        from headway.store.local_copy import copy_to_local

        path = copy_to_local(path, config.stage_to, checksums)
    return open_store(path, store.name, checksums)


def check_sources(
    sources: Sequence[TokenSource], fingerprint: str | None, vocab_size: int, unchecked: bool
) -> None:
    """Raise a DataError for ids of another tokenizer, or outside the model's vocabulary."""
    for source in sources:
        if source.max_id >= vocab_size:
            raise DataError(
                f"{source.name}: holds id {source.max_id}; the model's vocabulary has {vocab_size} "
                f"ids (0 to {vocab_size - 1}). Use the tokenizer that made the data, or set "
                f"model.vocab_size to {source.max_id + 1} or more."
            )

        if source.fingerprint is None and not unchecked:
            raise DataError(
                f"{source.name}: does not record which tokenizer made it, so its ids cannot be "
                "checked. If it is the tokenizer of the recipe, set data.tokenizer_unchecked: true."
            )

        if (
            source.fingerprint is not None
            and fingerprint is not None
            and source.fingerprint != fingerprint
        ):
            raise DataError(
                f"{source.name}: made by another tokenizer ({source.fingerprint[:12]}) than that "
                f"of the recipe ({fingerprint[:12]}). Tokenize it again with `headway data "
                "tokenize`, or set `tokenizer` to the one that made it."
            )


def _check(
    sources: Sequence[TokenSource], tokenizer: Path | None, vocab_size: int, unchecked: bool
) -> None:
    fingerprint = None
    if tokenizer is not None and any(source.fingerprint is not None for source in sources):
        from headway.tokenizer.load import load_tokenizer

        # Only where a store has something to compare: loading a tokenizer takes time.
        fingerprint = load_tokenizer(tokenizer).fingerprint
    check_sources(sources, fingerprint, vocab_size, unchecked)


def _mixture(
    opened: Opened,
    config: DataConfig,
    side: str | None = None,
    fraction: float = 0.0,
) -> tuple[MixtureSource, ...]:
    """The members of a mixture. `side`: train or valid, where `fraction` of the documents is held
    out; None: all documents."""
    members: list[MixtureSource] = []
    for settings, source in opened:
        # Half a pair teaches nothing: a group that is longer than a row is left out, not cut.
        max_length = None
        if isinstance(source, GroupSource) and source.keeps_whole:
            max_length = config.seq_len
        selection = Selection(source, settings.limit, settings.min_length, max_length=max_length)
        selection.check()

        if side is None:
            members.append(MixtureSource(selection, settings.weight, settings.repeat))
        elif side == VALID_NAME:
            # Validation reads each document once, independent of the weights for training.
            members.append(MixtureSource(split_side(selection, "valid", fraction)))
        else:
            selection = split_side(selection, "train", fraction)
            members.append(MixtureSource(selection, settings.weight, settings.repeat))
    return tuple(members)


FOLDERS_ARE_TYPES = ("internlm", "mds")
"""Formats of other systems in which each folder is a type."""


def by_type(
    settings: SourceConfig, source: TokenSource
) -> Iterator[tuple[SourceConfig, TokenSource]]:
    """One source per type. Weight and limit are divided among the types."""
    parts = _types(source)
    if len(parts) == 1:
        yield settings, source
        return
    total = sum(part.num_tokens for part in parts)
    limit_left = settings.limit
    for part in parts:
        change: dict[str, object] = {}
        if settings.weight is not None:
            change["weight"] = settings.weight * part.num_tokens / total
        if limit_left is not None:
            # The limit means the first documents of the whole folder, so the first types use it up.
            if not limit_left:
                break
            limit = min(limit_left, part.num_documents)
            change["limit"] = limit
            limit_left -= limit
        yield settings.model_copy(update=change), part


def _types(source: TokenSource) -> list[TokenSource]:
    if not isinstance(source, Store):
        from headway.store.foreign.base import ForeignStore

        if isinstance(source, ForeignStore) and source.kind in FOLDERS_ARE_TYPES:
            return [*source.by_folder()]
        return [source]
    if source.manifest.types is None or len(source.manifest.types) < 2:
        return [source]

    # A type can be a source only if its documents are one contiguous range: as many changes of type
    # along the store as there are types.
    numbers = source.type_numbers()
    assert numbers is not None
    begins = np.flatnonzero(np.diff(numbers, prepend=-1))
    if len(begins) != len(np.unique(numbers)):
        return [source]
    ends = [*begins[1:].tolist(), len(numbers)]
    return [
        DocumentRange(source, first, last, source.type_of(first) or "other")
        for first, last in zip(begins.tolist(), ends, strict=True)
    ]


def sets_of(
    sets: Mapping[str, tuple[SourceConfig, ...]] | str,
) -> dict[str, tuple[SourceConfig, ...]]:
    """The validation sets by name, or the stores, folders and files of a folder, or the one set
    that a file is."""
    if not isinstance(sets, str):
        return dict(sets)
    folder = Path(sets)
    if folder.is_file():
        return {set_name(sets): (SourceConfig(path=sets),)}
    if not folder.is_dir():
        raise ConfigError(
            f"data.valid.sets is {sets!r}, and there is no such file or folder. Set a file, a "
            f"folder of data sets, or named sets: {{sets: {{wiki: FILE}}}}."
        )

    # A store is a folder of files, but one set. `index.json`: an MDS folder.
    if is_store(folder) or (folder / "index.json").is_file():
        return {folder.name: (SourceConfig(path=sets),)}
    sets_by_name = {
        _set_name(child): (SourceConfig(path=str(child)),)
        for child in sorted(folder.iterdir())
        if _is_set(child)
    }

    if not sets_by_name:
        raise ConfigError(
            f"data.valid.sets is {sets!r}; the folder holds no data set. Set a folder with stores, "
            "folders or files."
        )
    return sets_by_name


def _set_name(child: Path) -> str:
    if child.is_dir():
        return child.name
    return set_name(child.name)


def _is_set(child: Path) -> bool:
    """Whether a file or folder of a folder of sets is data. Notes beside the data are not."""
    if child.name.startswith("."):
        return False
    if child.suffix == ".meta" or child.name.lower().startswith(("readme", "license")):
        return False
    try:
        detect_kind(child)
    except DataError:
        return False
    return True
