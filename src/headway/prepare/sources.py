"""The sources of a recipe as token stores. In: the `data` section and a tokenizer; out: one store per source.

A source of raw files becomes a store in the cache, built now if it is not there yet. A source that is a store already is passed on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from headway.data.config import DataConfig, SourceConfig
from headway.data.open import SourceStore, SourceStores
from headway.errors import ConfigError
from headway.prepare.build import BuildOptions, cached_store, describe_cached
from headway.prepare.detect import format_of, local_path, with_kind
from headway.prepare.own_format import read_own_format
from headway.records.base import record_kind
from headway.text.record_keys import KeyMap
from headway.tokenizer.load import load_tokenizer

log = logging.getLogger("headway")

MakeStore = Callable[[SourceConfig], SourceStore]


def prepare_sources(
    config: DataConfig,
    tokenizer: Path | None,
    *,
    reads: tuple[str, ...] = (),
    media: MakeStore | None = None,
    workers: int | None = None,
    say: Callable[[str], object] = log.debug,
) -> SourceStores:
    """The store of every source of a recipe: downloaded from the hub and tokenized where needed. `reads`: the kinds of records that the
    task reads, the preferred one first.
    `media` makes the stores of sources with pictures and sounds; `workers`: processes that tokenize the others, None: one per core.
    `say` receives a line for every source of records: how many there are, their chat template, what was dropped."""
    find = partial(
        prepare_source,
        config=config,
        tokenizer=tokenizer,
        media=media,
        workers=workers,
        reads=reads,
        say=say,
    )
    return SourceStores.of(config, find)


def prepare_source(
    one: SourceConfig,
    config: DataConfig,
    tokenizer: Path | None,
    media: MakeStore | None = None,
    workers: int | None = None,
    reads: tuple[str, ...] = (),
    say: Callable[[str], object] = log.debug,
) -> SourceStore:
    """The store of one source."""
    if media is not None and one.kind != "auto" and _places_media(one.kind):
        made = media(one)
        say(f"{one.path}: {describe_cached(made.path, one, config.seq_len)}")
        return made
    path = local_path(one.path, config.cache_dir)
    if one.format is not None:
        path = str(read_own_format(path, one.format, config.cache_dir))
    kind = "raw" if one.format is not None else format_of(path)
    if kind == "raw":
        known = with_kind(
            one, path, None if tokenizer is None else load_tokenizer(tokenizer), reads=reads
        )
        options = replace(_options(path, known, config, reads), workers=workers)
        store = _tokenized(path, config, tokenizer, options)
        if not record_kind(known.kind).is_text:
            say(f"{one.path}: {describe_cached(store, known, options.max_length)}")
        return SourceStore(one, store, name=one.path)
    if one.raw_settings:
        raise ConfigError(
            f"data: {path} is a token store ({kind}), but {one.raw_settings[0]} is for raw files. Remove it."
        )
    return SourceStore(one, Path(path))


def _tokenized(
    path: str, config: DataConfig, tokenizer: Path | None, options: BuildOptions
) -> Path:
    if tokenizer is None:
        raise ConfigError(
            f"data: {path} is raw text and needs a tokenizer. Set `tokenizer` in the recipe, or give a token store."
        )
    return cached_store([path], tokenizer, config.cache_dir, options)


def _places_media(name: str) -> bool:
    kind = record_kind(name)
    return kind.holds_media and kind.has_tokens


def _options(
    path: str, source: SourceConfig, config: DataConfig, reads: tuple[str, ...]
) -> BuildOptions:
    """How a source is tokenized; its kind is known."""
    assert source.kind != "auto", "the kind of raw data is known before it is tokenized"
    kind = record_kind(source.kind)
    kind.check_positions(path, None)
    if kind.is_text:
        return BuildOptions(
            source.kind,
            text_key=source.text_key,
            text_template=source.template,
            split=source.split,
        )
    return BuildOptions(
        source.kind,
        chat_template=source.chat_template,
        drop_bad=source.drop_bad,
        keys=KeyMap.of(source.keys),
        max_length=kind.max_length(config.seq_len, config.packing, reads),
    )
