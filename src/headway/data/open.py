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
from functools import partial
from pathlib import Path

import numpy as np

from headway.config.load import set_name
from headway.data.config import DataConfig, SourceConfig, default_cache_dir
from headway.data.media import MediaFeatures
from headway.data.mixture import MixtureSource
from headway.data.pairs import PairSource, is_preference
from headway.data.selection import Selection, split_side
from headway.data.synthetic import SyntheticSource
from headway.data.teacher import CachedTeacher
from headway.data.unpaired import UnpairedSource, is_unpaired
from headway.errors import ConfigError, DataError
from headway.store.checksums import Checksums
from headway.store.foreign.base import ForeignStore
from headway.store.local_copy import copy_to_local
from headway.store.media_items import has_media, read_items
from headway.store.open import detect_kind, open_source
from headway.store.reader import Store, is_store, open_store
from headway.store.source import DocumentRange, SourceView, TokenSource

VALID_NAME = "valid"
MIN_PAIR_TOKENS = 8


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
    if isinstance(source, PairSource):
        return _content(source.store, checksums)
    if isinstance(source, UnpairedSource):
        return f"{_content(source.store, checksums)}-{source.labels_key}"
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
    pairs: bool = False,
    unpaired: bool = False,
    media: MediaFeatures | None = None,
) -> OpenData:
    """Open every source of a recipe from its store in `stores` (None: every path of the recipe is a store).

    `tokenizer`: the path of the recipe's tokenizer, if it has one. `vocab_size`: the model's. `pairs`: the objective compares pairs; then
    every source must hold pairs, else none may. `unpaired`: it learns from labelled answers; every source must hold those, or pairs.
    `media`: the features for stores that hold pictures and sounds.
    """
    if pairs:
        check_rows_of_pairs(config)
    if unpaired:
        check_rows_of_records(config)
    checksums, stores = (
        Checksums(config.cache_dir or default_cache_dir()),
        stores or SourceStores.of(config),
    )
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
        counter = _Counter()
        read = (
            _read_unpaired(config.seq_len, counter)
            if unpaired
            else partial(_read_as, pairs=pairs, counter=counter)
        )
        opened = [(one, read(source)) for one, source in opened]
        valid = {
            name: [(one, read(source)) for one, source in many] for name, many in valid.items()
        }
        if config.by_type and not pairs and not unpaired:
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


@dataclass
class _Counter:
    pairs: int = 0
    records: int = 0


def _read_unpaired(seq_len: int, counter: _Counter) -> Callable[[TokenSource], TokenSource]:
    """Reads a source as labelled answers, numbered over all sources; an error if it holds none."""

    def read(source: TokenSource) -> TokenSource:
        if not isinstance(source, Store) or not (is_unpaired(source) or is_preference(source)):
            raise ConfigError(
                f"data: {source.name} holds no labelled answers, which objective kto needs. Raw files: set kind: unpaired (prompt, "
                "completion, label) or kind: preference. Stores: make them with `headway data tokenize --kind unpaired`."
            )
        found = UnpairedSource(source, seq_len, counter.records)
        counter.records += found.num_documents
        return found

    return read


def _read_as(source: TokenSource, pairs: bool, counter: _Counter) -> TokenSource:
    """The source, or its pairs, numbered over all sources; an error if the objective needs the other."""
    holds_pairs = isinstance(source, Store) and is_preference(source)
    if isinstance(source, Store) and is_unpaired(source):
        raise ConfigError(
            f"data: {source.name} holds answers labelled good or bad, which objective kto reads; others would train on the bad answers, "
            "too. Set objective.kind: kto, or other data."
        )
    if holds_pairs and not pairs:
        raise ConfigError(
            f"data: {source.name} holds preference pairs; next-token training would train on the rejected answers, too. "
            "Set objective.kind: dpo, or use conversations (kind: chat)."
        )
    if not pairs:
        return source
    if not holds_pairs or not isinstance(source, Store):
        raise ConfigError(
            f"data: {source.name} holds no preference pairs, which objective dpo needs. Raw files: set kind: preference. "
            "Stores: make them with `headway data tokenize --kind preference`."
        )
    found = PairSource(source, counter.pairs)
    counter.pairs += found.num_documents
    return found


def check_rows_of_records(config: DataConfig) -> None:
    """Raise a ConfigError if the settings do not keep labelled answers whole."""
    if config.train is None:
        raise ConfigError(
            "data.train is null (generated data), but objective kto needs labelled answers. Set sources with kind: unpaired."
        )
    if config.packing not in ("best_fit", "pad"):
        raise ConfigError(
            f"data.packing is {config.packing}, which splits records. Use best_fit or pad with objective kto."
        )
    if config.seq_len < MIN_PAIR_TOKENS:
        raise ConfigError(
            f"data.seq_len is {config.seq_len}; a row must hold a prompt and an answer. Use {MIN_PAIR_TOKENS} or more."
        )


def check_rows_of_pairs(config: DataConfig) -> None:
    """Raise a ConfigError if the settings do not allow a preference pair in a row."""
    if config.train is None:
        raise ConfigError(
            "data.train is null (generated data), but objective dpo needs pairs. Set sources with kind: preference."
        )
    if config.packing not in ("best_fit", "pad"):
        raise ConfigError(
            f"data.packing is {config.packing}, which splits pairs. Use best_fit or pad with objective dpo."
        )
    if config.documents_per_row < 3:
        raise ConfigError(
            f"data.max_documents is {config.max_documents}; a row must hold a pair and padding. Use 3 or more."
        )
    if config.seq_len < MIN_PAIR_TOKENS:
        raise ConfigError(
            f"data.seq_len is {config.seq_len}; a row must hold a pair. Use {MIN_PAIR_TOKENS} or more."
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
        longest = config.seq_len if isinstance(source, (PairSource, UnpairedSource)) else None
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
