"""`headway train data.train=FILE` without a recipe: the data comes in, a shipped recipe and the settings it still lacks go out.

    data          starts from            recipe
    text          nothing                laptop/pretrain, with a tokenizer trained on the data (kept in the cache)
    chat          init.from, small       laptop/sft
    chat          init.from, large       laptop/lora
    preference    init.from              laptop/dpo, with a LoRA adapter if the model is large

Everything else keeps the plain defaults: token stores, text with a tokenizer or with init.from (continued pretraining), generated data.
Invariant: the user's overrides are applied last, and each choice is one line on the screen.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from pathlib import Path
from typing import Any

from headway.config.load import read_plain, validate
from headway.config.shipped import find_shipped
from headway.data.config import DataConfig, default_cache_dir
from headway.errors import ConfigError, DataError, HeadwayError
from headway.prepare.detect import DetectedKind, detect, format_of, local_path
from headway.records.base import RecordKind, record_kind

LARGE_PARAMETERS = 100_000_000
"""From here on a model is fine-tuned with an adapter."""
VOCABULARIES = ((1 << 20, 4096), (200 << 10, 2048), (50 << 10, 1024), (0, 512))
"""Bytes of text from which a tokenizer gets this many ids."""
BYTES_PER_TOKEN = 3
MAX_EPOCHS, MIN_STEPS, MAX_STEPS, STEP_TOKENS = 10, 20, 500, 16384
"""Pretraining reads the data at most MAX_EPOCHS times; STEP_TOKENS is the batch of laptop/pretrain."""
ADAPTER = "adapter={kind: lora, rank: 16, alpha: 32.0, targets: [q_proj, k_proj, v_proj, o_proj]}"


@dataclass(frozen=True)
class FirstTokenizer:
    """A tokenizer that is trained on the user's text, once for the same files."""

    files: tuple[Path, ...]
    vocab_size: int
    folder: Path

    def make(self) -> None:
        """Train it if it is not in the cache; text that repeats too little gets a smaller one."""
        from headway.store.file_lock import file_lock
        from headway.text.read import read_documents
        from headway.tokenizer.train import SPECIAL_TOKENS, train_bpe

        def is_made() -> bool:
            return (self.folder / "tokenizer.json").is_file()

        if is_made():
            return
        with file_lock(self.folder.with_name(f"{self.folder.name}.lock"), until=is_made) as builds:
            size = self.vocab_size
            while builds:
                try:
                    train_bpe(
                        (one.text for one in read_documents(self.files)),
                        vocab_size=size,
                        out=self.folder,
                    )
                    return
                except DataError:
                    least = 256 + len(SPECIAL_TOKENS) + 1  # hardly more than the bytes
                    if size == least:
                        raise
                    size = max(least, size // 2)


@dataclass(frozen=True)
class FirstRun:
    """What was chosen for a command without a recipe."""

    recipe: Path | None = None
    overrides: list[str] = field(default_factory=list)
    """The chosen settings, then the user's."""
    lines: list[str] = field(default_factory=list)
    tokenizer: FirstTokenizer | None = None


def choose_recipe(overrides: Sequence[str]) -> FirstRun:
    """A recipe for overrides that name raw data and nothing else of weight; otherwise the overrides alone."""
    plain, given = FirstRun(None, list(overrides)), read_plain(None, overrides)
    data = given.get("data")
    if not isinstance(data, dict) or data.get("train") is None:
        return plain
    try:
        config = validate(DataConfig, data)
    except ConfigError:
        return plain  # the mistake is reported with the whole recipe
    found = _kinds(config)
    if len({one.kind for one in found}) != 1:
        return plain
    init: Any = given.get("init")
    source = init.get("from") if isinstance(init, dict) else None
    kind = record_kind(found[0].kind)
    names = ", ".join(one.path for one in config.train or ())
    if kind.is_text:
        if source is not None:
            return FirstRun(
                None,
                list(overrides),
                [f"no recipe is given: continued pretraining of {source} on {names}"],
            )
        return (
            plain
            if given.get("tokenizer") or given.get("model")
            else _pretrain(config, overrides, given, names)
        )
    if source is None and (given.get("tokenizer") or given.get("model")):
        return plain  # conversations from scratch, as the user describes them
    if source is None:
        raise ConfigError(
            f"data.train is {names}, which holds {kind.content}, and init.from is not given; such data fine-tunes a model. "
            "Add init.from: a run folder, a Hugging Face folder or a hub id such as Qwen/Qwen2.5-0.5B."
        )
    return _fine_tune(kind, str(source), overrides, given, names, config.cache_dir)


def _kinds(config: DataConfig) -> list[DetectedKind]:
    """The kinds of the sources; empty if one is a store, has a given kind or cannot be read, which the run explains."""
    found: list[DetectedKind] = []
    for one in config.train or ():
        try:
            path = local_path(one.path, config.cache_dir)
            if one.kind != "auto" or one.format is not None or format_of(path) != "raw":
                return []
        except HeadwayError:
            return []
        found.append(detect(path, one))
    return found


def _pretrain(
    config: DataConfig, overrides: Sequence[str], given: dict[str, Any], names: str
) -> FirstRun:
    from headway.store.checksums import Checksums
    from headway.text.expand import expand

    cache = config.cache_dir or default_cache_dir()
    files = expand([local_path(one.path, config.cache_dir) for one in config.train or ()])
    size = sum(path.stat().st_size for path in files)
    vocab = next(ids for least, ids in VOCABULARIES if size >= least)
    key = hashlib.sha256(repr((vocab, Checksums(cache).of_all(files))).encode()).hexdigest()[:32]
    tokenizer = FirstTokenizer(tuple(files), vocab, cache / "tokenizers" / key)
    steps = min(MAX_STEPS, max(MIN_STEPS, ceil(MAX_EPOCHS * size / BYTES_PER_TOKEN / STEP_TOKENS)))
    length = [] if "epochs" in given or "steps" in given else [f"steps={steps}"]
    chosen = [f"tokenizer={tokenizer.folder}", *length]
    lines = [
        f"no recipe is given and {names} is text: the recipe laptop/pretrain, {f'{steps} steps, ' if length else ''}with a tokenizer "
        f"of up to {vocab} ids trained on this text"
    ]
    return FirstRun(find_shipped("laptop/pretrain"), [*chosen, *overrides], lines, tokenizer)


def _fine_tune(
    kind: RecordKind,
    source: str,
    overrides: Sequence[str],
    given: dict[str, Any],
    names: str,
    cache_dir: Path | None,
) -> FirstRun:
    from headway.checkpoint.stored_model import find_model
    from headway.model.layout import param_specs

    try:
        size = sum(prod(spec.shape) for spec in param_specs(find_model(source, cache_dir).config))
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"init.from: {problem}") from None
    is_large = size >= LARGE_PARAMETERS
    name = kind.large_recipe if is_large else kind.recipe
    # A recipe for models of all sizes trains large ones with an adapter, too.
    is_for_all = kind.large_recipe == kind.recipe
    chosen = [ADAPTER] if is_for_all and is_large and "adapter" not in given else []
    how = "a LoRA adapter" if name == "lora" or chosen else "all weights"
    lines = [
        f"no recipe is given and {names} is {kind.name} data: the recipe laptop/{name}, training {how} ({size / 1e6:,.0f}M parameters)"
    ]
    return FirstRun(find_shipped(f"laptop/{name}"), [*chosen, *overrides], lines)
