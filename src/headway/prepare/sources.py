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
    """The store of every source of a recipe: downloaded from the hub and tokenized where needed. `reads`: the kinds of records that
    the task reads, the preferred one first.
    `media` makes the stores of sources with pictures and sounds; `workers`: processes that tokenize the others, None: one per core.
    `say` receives a line for every source of records: how many there are, their chat template, what was dropped."""
    find = partial(
        prepare_source,
        config=config,
        tokenizer=tokenizer,
        media=media,
        workers=workers,
        unpaired="unpaired" in reads,
        say=say,
    )
    return SourceStores.of(config, find)


def prepare_source(
    one: SourceConfig,
    config: DataConfig,
    tokenizer: Path | None,
    media: MakeStore | None = None,
    workers: int | None = None,
    unpaired: bool = False,
    say: Callable[[str], object] = log.debug,
) -> SourceStore:
    """The store of one source."""
    if one.kind == "multimodal" and media is not None:
        made = media(one)
        say(f"{one.path}: {describe_cached(made.path, one, config.seq_len)}")
        return made
    path = local_path(one.path, config.cache_dir)
    if one.format is not None:
        path = str(read_own_format(path, one.format, config.cache_dir))
    kind = "raw" if one.format is not None else format_of(path)
    if kind == "raw":
        known = with_kind(
            one, path, None if tokenizer is None else load_tokenizer(tokenizer), unpaired=unpaired
        )
        options = replace(_options(path, known, config, unpaired), workers=workers)
        store = _tokenized(path, config, tokenizer, options)
        if known.kind != "text":
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


def _options(path: str, one: SourceConfig, config: DataConfig, unpaired: bool) -> BuildOptions:
    """How a source is tokenized; its kind is known."""
    if one.kind == "multimodal":
        raise ConfigError(
            f"data: {path} has kind multimodal, and the recipe has no `multimodal` section. Set it, or another kind."
        )
    if one.kind == "captions":
        raise ConfigError(
            f"data: {path} has kind captions, which objective contrastive reads (model.aligner). Set another kind."
        )
    assert one.kind != "auto", "the kind of raw data is known before it is tokenized"
    options = BuildOptions(
        one.kind, text_key=one.text_key, text_template=one.template, split=one.split
    )
    if one.kind != "text":
        options = BuildOptions(
            one.kind,
            chat_template=one.chat_template,
            drop_bad=one.drop_bad,
            keys=KeyMap.of(one.keys),
        )
    if one.kind == "chat" and config.packing in ("best_fit", "pad"):
        # A conversation truncated to a row keeps its beginning; the rest would be answers to questions that are not there.
        options = replace(options, max_length=config.seq_len)
    if one.kind in ("preference", "unpaired"):
        # a row holds both answers of a pair, unless each is learned by itself
        options = replace(
            options,
            max_length=config.seq_len
            if unpaired or one.kind == "unpaired"
            else config.seq_len // 2,
        )
    return options
