"""The sources of a recipe as token stores. In: the `data` section and a tokenizer; out: one store per source.

A source of raw files becomes a store in the cache, built now if it is not there yet. A source that is a store already is passed on.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from headway.data.config import DataConfig, SourceConfig
from headway.data.open import SourceStore, SourceStores, check_rows_of_pairs
from headway.errors import ConfigError
from headway.prepare.build import BuildOptions, cached_store
from headway.prepare.own_format import read_own_format
from headway.store.open import detect_kind
from headway.text.hub import is_hub_id, local_or_hub
from headway.text.record_keys import KeyMap


def prepare_sources(config: DataConfig, tokenizer: Path | None, *, pairs: bool = False) -> SourceStores:
    """The store of every source of a recipe: downloaded from the hub and tokenized where needed. `pairs`: the objective compares pairs."""
    if pairs:
        check_rows_of_pairs(config)
    return SourceStores.of(config, partial(prepare_source, config=config, tokenizer=tokenizer))


def prepare_source(one: SourceConfig, config: DataConfig, tokenizer: Path | None) -> SourceStore:
    """The store of one source."""
    path = _local(one.path, config)
    if one.format is not None:
        records = read_own_format(path, one.format, config.cache_dir)
        return SourceStore(one, _tokenized(str(records), one, config, tokenizer), name=one.path)
    kind = detect_kind(path)
    if kind == "raw":
        return SourceStore(one, _tokenized(path, one, config, tokenizer), name=one.path)
    if one.raw_settings:
        raise ConfigError(f"data: {path} is a token store ({kind}), but {one.raw_settings[0]} is for raw files. Remove it.")
    return SourceStore(one, Path(path))


def _local(path: str, config: DataConfig) -> str:
    """The path of a source; a dataset of the hub, `ORG/NAME[@REVISION][:SPLIT]`, is downloaded."""
    name, colon, choice = path.partition(":")
    if Path(path).exists() or not is_hub_id(name):
        return path
    return f"{local_or_hub(name, dataset=True, cache_dir=config.cache_dir)}{colon}{choice}"


def _tokenized(path: str, one: SourceConfig, config: DataConfig, tokenizer: Path | None) -> Path:
    if tokenizer is None:
        raise ConfigError(f"data: {path} is raw text and needs a tokenizer. Set `tokenizer` in the recipe, or give a token store.")
    options = BuildOptions(one.kind, text_key=one.text_key, text_template=one.template, split=one.split)
    if one.kind != "text":
        options = BuildOptions(one.kind, chat_template=one.chat_template, drop_bad=one.drop_bad, keys=KeyMap.of(one.keys))
    if one.kind == "chat" and config.packing in ("best_fit", "pad"):
        # A conversation truncated to a row keeps its beginning; the rest would be answers to questions that are not there.
        options = replace(options, max_length=config.seq_len)
    if one.kind == "preference":
        options = replace(options, max_length=config.seq_len // 2)
    return cached_store([path], tokenizer, config.cache_dir, options)
