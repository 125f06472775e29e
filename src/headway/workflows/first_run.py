"""`headway train data.train=FILE` without a recipe: the data comes in, a shipped recipe and the
settings it still lacks go out.

    data         starts from        recipe
    text         nothing            laptop/pretrain, with a tokenizer trained on the data, which is
                                    kept in the cache
    chat         init.from, small   laptop/sft
    chat         init.from, large   laptop/lora
    preference   init.from          laptop/dpo, with a LoRA adapter if the model is large

Everything else keeps the plain defaults: token stores, text with a tokenizer or with init.from
(continued pretraining), generated data. Invariant: the user's overrides are applied last, and each
choice is one line on the screen.
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
"""(Bytes of text, ids of its tokenizer): the first pair counts whose bytes the text reaches."""
BYTES_PER_TOKEN = 3
"""A guess for text under a tokenizer of these sizes, before there is one."""
MAX_EPOCHS = 10
"""Pretraining reads the data about this often, within MIN_STEPS and MAX_STEPS."""
MIN_STEPS = 20
MAX_STEPS = 500
STEP_TOKENS = 16384
"""The batch of laptop/pretrain: must follow that recipe."""
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
        # Several processes of a run may come here. One trains it, the others wait for it.
        with file_lock(self.folder.with_name(f"{self.folder.name}.lock"), until=is_made) as builds:
            vocab_size = self.vocab_size
            # `builds` is False where another process has trained it. The loop ends by its return.
            while builds:
                texts = (document.text for document in read_documents(self.files))
                try:
                    train_bpe(texts, vocab_size=vocab_size, out=self.folder)
                    return
                except DataError:
                    # The text has too few repeated pairs for so many ids. The least tokenizer has
                    # the bytes, the special tokens and one merge.
                    least_size = 256 + len(SPECIAL_TOKENS) + 1
                    if vocab_size == least_size:
                        raise
                    vocab_size = max(least_size, vocab_size // 2)


@dataclass(frozen=True)
class FirstRun:
    """What was chosen for a command without a recipe."""

    recipe: Path | None = None
    """The file of a shipped recipe; None: the plain defaults."""
    overrides: list[str] = field(default_factory=list)
    """The chosen settings, then the user's: the last one counts."""
    lines: list[str] = field(default_factory=list)
    """What was chosen and why, for the screen."""
    tokenizer: FirstTokenizer | None = None
    """One that the overrides name and that may not exist yet: the caller has it trained."""


def choose_recipe(overrides: Sequence[str]) -> FirstRun:
    """A recipe for overrides that name raw data and nothing else of weight; otherwise the overrides
    alone.
    """
    plain = FirstRun(None, list(overrides))
    settings = read_plain(None, overrides)
    data = settings.get("data")
    if not isinstance(data, dict) or data.get("train") is None:
        return plain
    try:
        config = validate(DataConfig, data)
    except ConfigError:
        return plain  # the mistake is reported with the whole recipe

    # No shipped recipe is for a mixture of kinds; none at all means that the defaults serve.
    kinds = {detected.kind for detected in _kinds(config)}
    if len(kinds) != 1:
        return plain
    kind = record_kind(kinds.pop())

    init: Any = settings.get("init")
    start = None
    if isinstance(init, dict):
        start = init.get("from")
    # With a tokenizer or a model, the user describes a run from scratch: the defaults serve it.
    describes_model = settings.get("tokenizer") or settings.get("model")
    names = ", ".join(source.path for source in config.train or ())
    if kind.is_text:
        if start is not None:
            return FirstRun(
                None,
                list(overrides),
                [f"no recipe is given: continued pretraining of {start} on {names}"],
            )
        if describes_model:
            return plain
        return _pretrain(config, overrides, settings, names)
    if start is None and describes_model:
        return plain
    if start is None:
        raise ConfigError(
            f"data.train is {names}, which holds {kind.content}, and init.from is not given; such "
            "data fine-tunes a model. "
            "Add init.from: a run folder, a Hugging Face folder or a hub id such as "
            "Qwen/Qwen2.5-0.5B."
        )
    return _fine_tune(kind, str(start), overrides, settings, names, config.cache_dir)


def _kinds(config: DataConfig) -> list[DetectedKind]:
    """The kind of each source. Empty if one of them is a store, names its kind or format itself, or
    has no readable path: the run reports that.
    """
    kinds: list[DetectedKind] = []
    for source in config.train or ():
        try:
            path = local_path(source.path, config.cache_dir)
            if source.kind != "auto" or source.format is not None or format_of(path) != "raw":
                return []
        except HeadwayError:
            return []
        kinds.append(detect(path, source))
    return kinds


def _pretrain(
    config: DataConfig, overrides: Sequence[str], settings: dict[str, Any], names: str
) -> FirstRun:
    """laptop/pretrain, with a tokenizer and a length that suit the amount of text."""
    from headway.store.checksums import Checksums
    from headway.text.expand import expand

    cache = config.cache_dir or default_cache_dir()
    files = expand([local_path(source.path, config.cache_dir) for source in config.train or ()])
    text_bytes = sum(path.stat().st_size for path in files)
    vocab_size = next(ids for least_bytes, ids in VOCABULARIES if text_bytes >= least_bytes)
    # The folder is named by content, so that a second run of the same files finds it.
    content = repr((vocab_size, Checksums(cache).of_all(files)))
    key = hashlib.sha256(content.encode()).hexdigest()[:32]
    tokenizer = FirstTokenizer(tuple(files), vocab_size, cache / "tokenizers" / key)

    chosen = [f"tokenizer={tokenizer.folder}"]
    length = ""
    if "epochs" not in settings and "steps" not in settings:
        steps_of_epochs = ceil(MAX_EPOCHS * text_bytes / BYTES_PER_TOKEN / STEP_TOKENS)
        steps = min(MAX_STEPS, max(MIN_STEPS, steps_of_epochs))
        chosen.append(f"steps={steps}")
        length = f"{steps} steps, "
    lines = [
        f"no recipe is given and {names} is text: the recipe laptop/pretrain, {length}with a "
        f"tokenizer of up to {vocab_size} ids trained on this text"
    ]
    return FirstRun(find_shipped("laptop/pretrain"), [*chosen, *overrides], lines, tokenizer)


def _fine_tune(
    kind: RecordKind,
    source: str,
    overrides: Sequence[str],
    settings: dict[str, Any],
    names: str,
    cache_dir: Path | None,
) -> FirstRun:
    """The recipe of a kind of records, for a model of the size that init.from names."""
    from headway.checkpoint.stored_model import find_model
    from headway.model.layout import param_specs

    try:
        model = find_model(source, cache_dir).config
        num_parameters = sum(prod(spec.shape) for spec in param_specs(model))
    except (ConfigError, DataError) as problem:
        raise ConfigError(f"init.from: {problem}") from None

    is_large = num_parameters >= LARGE_PARAMETERS
    name = kind.recipe
    if is_large:
        name = kind.large_recipe
    # A recipe for all sizes has no adapter of its own, as laptop/lora has: a large model gets one
    # here, unless the user describes it.
    is_for_all = kind.large_recipe == kind.recipe
    chosen = []
    if is_for_all and is_large and "adapter" not in settings:
        chosen = [ADAPTER]

    trained = "all weights"
    if name == "lora" or chosen:
        trained = "a LoRA adapter"
    lines = [
        f"no recipe is given and {names} is {kind.name} data: the recipe laptop/{name}, training "
        f"{trained} ({num_parameters / 1e6:,.0f}M parameters)"
    ]
    return FirstRun(find_shipped(f"laptop/{name}"), [*chosen, *overrides], lines)
