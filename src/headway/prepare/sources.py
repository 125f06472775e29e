"""The sources of a recipe as token stores. In: the `data` section and a tokenizer; out: one store
per source.

A source of raw files becomes a store in the cache, built now if it is not there yet. A source that
is a store already is passed on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headway.data.config import DataConfig, SourceConfig
from headway.data.open import SourceStore, SourceStores
from headway.errors import ConfigError
from headway.prepare.detect import format_of, local_path, with_kind
from headway.records.base import record_kind
from headway.text.record_keys import KeyMap
from headway.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from headway.prepare.build import BuildOptions
    from headway.records.encode_media import MediaPositions

log = logging.getLogger("headway")


def prepare_sources(
    config: DataConfig,
    tokenizer: Path | None,
    *,
    reads: tuple[str, ...] = (),
    positions: MediaPositions | None = None,
    check_media: bool = False,
    workers: int | None = None,
    say: Callable[[str], object] = log.debug,
) -> SourceStores:
    """The store of every source of a recipe: downloaded from the hub and tokenized where needed.
    `reads`: the kinds of records that the task reads, the preferred one first. `positions`: how
    pictures and sounds stand in documents; `check_media`: look at their files even if the stores
    are known. `workers`: processes that tokenize, None: one per core. `say` receives a line for
    every source of records: how many there are, their chat template, what was dropped."""

    find = partial(
        prepare_source,
        config=config,
        tokenizer=tokenizer,
        positions=positions,
        check_media=check_media,
        workers=workers,
        reads=reads,
        say=say,
    )
    return SourceStores.of(config, find)


def prepare_source(
    source: SourceConfig,
    config: DataConfig,
    tokenizer: Path | None,
    positions: MediaPositions | None = None,
    check_media: bool = False,
    workers: int | None = None,
    reads: tuple[str, ...] = (),
    say: Callable[[str], object] = log.debug,
) -> SourceStore:
    """The store of one source."""
    path = local_path(source.path, config.cache_dir)
    if source.format is not None:
        from headway.prepare.own_format import read_own_format

        path = str(read_own_format(path, source.format, config.cache_dir))
    holds_media = source.kind != "auto" and record_kind(source.kind).holds_media
    # A folder of pictures has no format of files.
    if source.format is not None or holds_media:
        store_kind = "raw"
    else:
        store_kind = format_of(path)

    if store_kind != "raw":
        if source.raw_settings:
            raise ConfigError(
                f"data: {path} is a token store ({store_kind}), but {source.raw_settings[0]} is "
                "for raw files. Remove it."
            )
        return SourceStore(source, Path(path))

    # What is wrong with the source is reported before a missing tokenizer.
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    detected = with_kind(source, path, loaded, reads=reads)
    options = replace(_options(path, detected, config, reads, positions), workers=workers)
    if tokenizer is None:
        raise ConfigError(_no_tokenizer(path, holds_media))
    from headway.prepare.build import cached_store, describe_cached

    store = cached_store([path], tokenizer, config.cache_dir, options, check_media)
    if not record_kind(detected.kind).is_text:
        say(f"{source.path}: {describe_cached(store, detected, options.max_length)}")
    # The source as the recipe states it: the detected kind is for its store alone.
    return SourceStore(source, store, name=source.path)


def _no_tokenizer(path: str, holds_media: bool) -> str:
    if holds_media:
        return f"data: {path} needs a tokenizer. Set `tokenizer` in the recipe."
    return (
        f"data: {path} is raw text and needs a tokenizer. Set `tokenizer` in the recipe, or give a "
        "token store."
    )


def _options(
    path: str,
    source: SourceConfig,
    config: DataConfig,
    reads: tuple[str, ...],
    positions: MediaPositions | None,
) -> BuildOptions:
    """How a source is tokenized; its kind is known."""
    from headway.prepare.build import BuildOptions

    assert source.kind != "auto", "the kind of raw data is known before it is tokenized"
    kind = record_kind(source.kind)
    kind.check_positions(path, positions)
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
        positions=positions if kind.holds_media else None,
    )
