"""The sources a recipe names, opened and checked. In: the `data` section, the tokenizer, the model's vocabulary; out: mixtures to read.

What cannot work is refused here, before any work starts: a missing path, a half-written store, another tokenizer, an id beyond the
vocabulary, a split that leaves one side empty. Raw files are built into a cached store first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from headway.data.config import DataConfig, SourceConfig, default_cache_dir
from headway.data.mixture import MixtureSource
from headway.data.pairs import PairSource
from headway.data.shuffle import Selection
from headway.data.source_types import by_type, sets_of
from headway.data.split import one_side
from headway.data.synthetic import SyntheticSource
from headway.errors import ConfigError, DataError
from headway.prepare.preference import is_preference
from headway.prepare.record_keys import KeyMap
from headway.store.checksums import Checksums
from headway.store.local_copy import staged
from headway.store.reader import Store, open_store
from headway.store.source import Source
from headway.store.views import View
from headway.text.hub import is_hub_id, local_or_hub

VALID_NAME = "valid"
LEAST_PAIR_TOKENS = 8


@dataclass(frozen=True)
class OpenData:
    """What a run reads: the training mixture, and the validation sets by name."""

    train: tuple[MixtureSource, ...]
    valid: dict[str, tuple[MixtureSource, ...]]
    checksums: Checksums = field(default_factory=Checksums)

    @property
    def names(self) -> list[str]:
        """The names of the training sources, in the order of `Batch.source`."""
        return [one.selection.source.name for one in self.train]

    def contents(self) -> list[dict[str, str]]:
        """What every source holds, as checksums; the checkpoint keeps it. Files without checksums of their own are read once for it."""
        sets = {"train": self.train, **{f"valid.{name}": many for name, many in self.valid.items()}}
        return [
            {"set": name, "source": one.selection.source.name, "content": _content(one.selection.source, self.checksums)}
            for name, many in sets.items()
            for one in many
        ]


def _content(source: Source, checksums: Checksums) -> str:
    from headway.store.foreign.documents import ForeignStore

    if isinstance(source, PairSource):
        return _content(source.store, checksums)
    if isinstance(source, View):
        return f"{_content(source.source, checksums)}-{source.part_key}"
    if isinstance(source, Store):
        return source.content
    if isinstance(source, ForeignStore):
        files = checksums.of_all([file for part in source.parts for file in part.files])
        return hashlib.sha256(repr((source.content_key, files)).encode()).hexdigest()
    return source.content_key


def open_data(config: DataConfig, *, tokenizer: Path | None, vocab_size: int, seed: int, pairs: bool = False) -> OpenData:
    """Open every source of a recipe. `tokenizer` is where it lies (None: none is configured), `vocab_size` the model's.

    `pairs`: the objective compares pairs, so every source must hold them; without it none may.
    """
    if pairs:
        _check_rows_of_pairs(config)
    checksums = Checksums(config.cache_dir or default_cache_dir())
    if config.train is None:
        opened: list[tuple[SourceConfig, Source]] = [(SourceConfig(path="generated data"), SyntheticSource(vocab_size, seed))]
    else:
        opened = [(one, open_source(one, config, tokenizer, checksums)) for one in config.train]
    sets = sets_of(config.valid.sets) if config.valid and config.valid.sets else {}
    valid = {name: [(one, open_source(one, config, tokenizer, checksums)) for one in many] for name, many in sets.items()}
    if config.train is not None:
        counter = _Counter()
        opened = [(one, _read_as(source, pairs, counter)) for one, source in opened]
        valid = {name: [(one, _read_as(source, pairs, counter)) for one, source in many] for name, many in valid.items()}
        if config.by_type and not pairs:
            opened = [typed for one, source in opened for typed in by_type(one, source)]
    stores = [] if config.train is None else [source for _, source in opened]
    _check([*stores, *(source for many in valid.values() for _, source in many)], tokenizer, vocab_size, config.tokenizer_unchecked)
    fraction = config.valid.fraction if config.valid else None
    if fraction is None:
        return OpenData(_mixture(opened, config), {name: _mixture(many, config) for name, many in valid.items()}, checksums)
    return OpenData(_mixture(opened, config, "train", fraction), {VALID_NAME: _mixture(opened, config, VALID_NAME, fraction)}, checksums)


@dataclass
class _Counter:
    pairs: int = 0


def _read_as(source: Source, pairs: bool, counter: _Counter) -> Source:
    """A store of pairs as pairs, numbered through over all sources; refused where the objective wants the other."""
    holds_pairs = isinstance(source, Store) and is_preference(source)
    if holds_pairs and not pairs:
        raise ConfigError(
            f"data: {source.name} holds preference pairs, and next-token training would learn the rejected answers too. "
            "Set objective.kind: dpo, or give conversations (kind: chat)."
        )
    if not pairs:
        return source
    if not holds_pairs or not isinstance(source, Store):
        raise ConfigError(
            f"data: {source.name} holds no preference pairs, which objective dpo compares. Raw files: set kind: preference; "
            "stores: `headway data tokenize --kind preference` makes them."
        )
    found = PairSource(source, counter.pairs)
    counter.pairs += found.num_documents
    return found


def _check_rows_of_pairs(config: DataConfig) -> None:
    if config.train is None:
        raise ConfigError("data.train is null, which is generated data; objective dpo compares pairs. Give sources with kind: preference.")
    if config.packing not in ("best_fit", "pad"):
        raise ConfigError(f"data.packing is {config.packing}; it would cut pairs apart. Use best_fit or pad with objective dpo.")
    if config.documents_per_row < 3:
        raise ConfigError(f"data.max_documents is {config.max_documents}; a row must hold a pair and its padding. Use 3 or more.")
    if config.seq_len < LEAST_PAIR_TOKENS:
        raise ConfigError(f"data.seq_len is {config.seq_len}; a row must hold a pair. Use {LEAST_PAIR_TOKENS} or more.")


def open_source(one: SourceConfig, config: DataConfig, tokenizer: Path | None, checksums: Checksums | None = None) -> Source:
    """Open one path: a store (staged to a local disk if the recipe says so), a foreign store, or raw files."""
    checksums = checksums or Checksums(config.cache_dir or default_cache_dir())
    from headway.store.foreign import source as any_kind
    from headway.store.foreign.detect import detect

    if not Path(one.path).exists() and is_hub_id(one.path):
        one = one.model_copy(update={"path": str(local_or_hub(one.path, dataset=True, cache_dir=config.cache_dir))})
    path, kind = Path(one.path), detect(one.path)
    if kind != "raw" and one.raw_settings:
        raise ConfigError(f"data: {one.path} is a token store ({kind}), but {one.raw_settings[0]} is for raw files. Remove it.")
    if kind not in ("headway", "raw"):
        if config.stage_to is not None:
            raise ConfigError(
                f"data.stage_to copies headway's stores; {one.path} is {kind}. Run `headway data convert` first, or remove it."
            )
        return any_kind.open_source(path, kind)
    if kind == "raw":
        path = _cached(one, config, tokenizer)
    if config.stage_to is not None:
        path = staged(path, config.stage_to, checksums)
    return open_store(path, one.path if kind == "raw" else None, checksums)


def _cached(one: SourceConfig, config: DataConfig, tokenizer: Path | None) -> Path:
    if tokenizer is None:
        raise ConfigError(f"data: {one.path} is raw text and needs a tokenizer. Set `tokenizer` in the recipe, or give a token store.")
    if one.kind == "chat":
        from headway.prepare.chat import ChatOptions, cached_chat

        # Cut to a row, a conversation keeps its beginning; the rest of it would be answers to questions that are not there.
        longest = config.seq_len if config.packing in ("best_fit", "pad") else None
        options = ChatOptions(one.chat_template, longest, drop_bad=one.drop_bad, keys=KeyMap.of(one.keys))
        return cached_chat([one.path], tokenizer, config.cache_dir, options)
    if one.kind == "preference":
        from headway.prepare.preference import PreferenceOptions, cached_preference

        options = PreferenceOptions(one.chat_template, config.seq_len // 2, drop_bad=one.drop_bad, keys=KeyMap.of(one.keys))
        return cached_preference([one.path], tokenizer, config.cache_dir, options)
    from headway.prepare.cache import cached_store
    from headway.prepare.tokenize import TokenizeOptions

    return cached_store([one.path], tokenizer, config.cache_dir, TokenizeOptions(one.text_key, one.template, one.split))


def check_sources(sources: Sequence[Source], fingerprint: str | None, vocab_size: int, unchecked: bool) -> None:
    """Refuse ids that another tokenizer made, or that the model has no row for."""
    for source in sources:
        if source.max_id >= vocab_size:
            raise DataError(
                f"{source.name}: holds id {source.max_id}; the model's vocabulary has {vocab_size} ids (0 to {vocab_size - 1}). "
                f"Use the tokenizer that made the data, or set model.vocab_size to {source.max_id + 1} or more."
            )
        if source.fingerprint is None and not unchecked:
            raise DataError(
                f"{source.name}: does not say which tokenizer made it, so its ids cannot be checked. "
                f"If it is the recipe's, set data.tokenizer_unchecked: true."
            )
        if source.fingerprint is not None and fingerprint is not None and source.fingerprint != fingerprint:
            raise DataError(
                f"{source.name}: made by another tokenizer ({source.fingerprint[:12]}) than the recipe's ({fingerprint[:12]}). "
                f"Tokenize it again with `headway data tokenize`, or set `tokenizer` to the one that made it."
            )


def _check(sources: Sequence[Source], tokenizer: Path | None, vocab_size: int, unchecked: bool) -> None:
    fingerprint = None
    if tokenizer is not None and any(source.fingerprint is not None for source in sources):
        from headway.tokenizer.load import load_tokenizer

        fingerprint = load_tokenizer(tokenizer).fingerprint
    check_sources(sources, fingerprint, vocab_size, unchecked)


def _mixture(
    opened: Sequence[tuple[SourceConfig, Source]], config: DataConfig, side: str | None = None, fraction: float = 0.0
) -> tuple[MixtureSource, ...]:
    found: list[MixtureSource] = []
    for one, source in opened:
        selection = Selection(source, one.limit, one.min_length, max_length=config.seq_len if isinstance(source, PairSource) else None)
        selection.check()
        if side is not None:
            selection = one_side(selection, "valid" if side == VALID_NAME else "train", fraction)
        # Validation reads each document once, whatever the weights of training are.
        found.append(MixtureSource(selection) if side == VALID_NAME else MixtureSource(selection, one.weight, one.repeat))
    return tuple(found)
