"""What raw data is: text, conversations, preference pairs or labelled answers. In: a source of a
recipe; out: the source with its kind.

The keys of the first records decide:

    chosen and rejected                                    preference
    label or kto_tag, with an answer; for objective kto    unpaired (elsewhere it is chat)
    a question or turns; for objective grpo                prompt (elsewhere it is one of these)
    messages, conversations, ... or a question and answer  chat
    text; or a text file                                   text

Invariant: nothing is guessed. Records that fit two kinds, records of different kinds and unknown
keys end in one line that lists the keys and asks for the kind. A source whose kind is given, or
that is a token store, is not read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.data.config import DataConfig, SourceConfig
from headway.data.open import sets_of
from headway.errors import ConfigError, DataError, HeadwayError
from headway.records import KINDS
from headway.records.base import FOR_RECORDS, FOR_TEXT, DetectContext, Fit, RecordKind, record_kind
from headway.store.open import StoreKind, detect_kind
from headway.text.document import Record
from headway.text.hub import is_hub_id, local_or_hub
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat_template import FALLBACK_TEMPLATE

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

SAMPLE_RECORDS = 2000
"""Records that are looked at."""
SHOWN_KEYS = 12
"""Keys of a record that a message lists."""


@dataclass(frozen=True)
class DetectedKind:
    """The kind of the data at a path, and why."""

    kind: str
    keys: tuple[str, ...]
    """The keys that decided; empty for text files."""
    records: int | None
    """How many records there are; None where there are more than were read."""

    def describe(self) -> str:
        """`chat (messages), 1,204 records`."""
        keys = ""
        if self.keys:
            keys = f" ({', '.join(self.keys)})"
        unit = "record" if self.keys else "file"
        if self.records is None:
            count = f"more than {SAMPLE_RECORDS:,} {unit}s"
        elif self.records == 1:
            count = f"1 {unit}"
        else:
            count = f"{self.records:,} {unit}s"
        return f"{self.kind}{keys}, {count}"


def detect(path: str, source: SourceConfig, reads: tuple[str, ...] = ()) -> DetectedKind:
    """What raw data at a path is; a ConfigError where that is not clear. `reads`: the kinds that
    the task reads."""
    from headway.text.read import read_anything

    context = DetectContext(
        KeyMap.of(source.keys).names, reads, source.raw_settings, source.text_key
    )
    # A setting for text says that it is text, one for records that it is not.
    stated = [name for name in context.settings if name in (*FOR_TEXT, *FOR_RECORDS)]
    all_kinds = [record_kind(name) for name in KINDS]
    kinds = [kind for kind in all_kinds if not kind.refused_settings(stated)]
    # A task that answers prompts itself reads nothing else: a text beside a prompt is a column.
    prompt_kinds = [kind for kind in map(record_kind, reads) if not kind.has_tokens]
    answers_prompts = len(prompt_kinds) == len(reads) > 0
    if answers_prompts:
        kinds = prompt_kinds

    # Kind -> the keys that decided, and where it was seen first.
    detected: dict[str, tuple[tuple[str, ...], str]] = {}
    count = 0
    try:
        for entry in islice(read_anything(path), SAMPLE_RECORDS + 1):
            count += 1
            if count > SAMPLE_RECORDS:
                break
            fits = _fits(entry, kinds, context)
            if answers_prompts and not fits:
                raise _no_prompt(path, entry)
            if len(fits) != 1:
                raise _not_clear(path, entry, list(fits))
            ((kind, keys),) = fits.items()
            location = entry.place if isinstance(entry, Record) else entry.name
            detected.setdefault(kind, (keys, location))
    except DataError:
        # Damage further on is for the build to report. At the beginning, the reader's message says
        # what is wrong with the file.
        if not detected:
            raise

    if len(detected) > 1:
        locations = "; ".join(f"{location} is {kind}" for kind, (_, location) in detected.items())
        raise ConfigError(
            f"data: {path} holds records of different kinds: {locations}. Put each kind into a "
            "file of its own."
        )
    if not detected:
        raise DataError(f"data: {path} is empty: it has no record and no text.")
    ((kind, (keys, _)),) = detected.items()
    return DetectedKind(kind, keys, None if count > SAMPLE_RECORDS else count)


def _fits(
    entry: Any, kinds: Sequence[RecordKind], context: DetectContext
) -> dict[str, tuple[str, ...]]:
    """The kinds an entry may be, the best first, each with the keys that say so."""
    # A text file has no keys.
    if not isinstance(entry, Record):
        return {kind.name: () for kind in kinds if kind.is_text}
    fits: dict[str, Fit] = {}
    for kind in kinds:
        fit = kind.detect(entry.data, context)
        if fit is not None:
            fits[kind.name] = fit
    # Of the fits above 0 the highest counts. One of 0, a text key, stands beside it, so that a
    # record with both is not clear.
    best = max((fit.score for fit in fits.values()), default=0)
    ordered = sorted(fits.items(), key=lambda pair: -pair[1].score)
    return {name: fit.keys for name, fit in ordered if fit.score in (0, best)}


def _no_prompt(path: str, entry: Any) -> ConfigError:
    if not isinstance(entry, Record):
        return ConfigError(
            f"data: {path} holds text, and the task answers prompts. Give records with a question "
            "or a list of turns, e.g. .jsonl (docs/rl.md)."
        )
    keys = list(map(str, entry.data))
    shown = ", ".join(keys[:SHOWN_KEYS]) or "none"
    if len(keys) > SHOWN_KEYS:
        shown += f" and {len(keys) - SHOWN_KEYS} more"
    return ConfigError(
        f"data: {entry.place}: the keys {shown} name no prompt. Name the key of the question, e.g. "
        f"{{path: {path}, keys: {{prompt: KEY}}}}."
    )


def _not_clear(path: str, entry: Any, kinds: list[str]) -> ConfigError:
    keys: list[str] = []
    if isinstance(entry, Record):
        keys = list(map(str, entry.data))
    shown = ", ".join(keys[:SHOWN_KEYS]) or "none"
    if len(keys) > SHOWN_KEYS:
        shown += f" and {len(keys) - SHOWN_KEYS} more"
    if kinds:
        candidates = " or ".join(kinds)
        return ConfigError(
            f"data: {path} could be {candidates}: its records have the keys {shown}. Say which, "
            f"e.g. {{path: {path}, kind: {kinds[0]}}}."
        )
    if not keys:
        return ConfigError(
            f"data: {path} holds text, and settings for records are given. Remove them."
        )

    # The longest value is most likely the text.
    def text_length(key: str) -> int:
        value = entry.data[key]
        return len(value) if isinstance(value, str) else -1

    longest = max(keys, key=text_length)
    return ConfigError(
        f"data: {path}: the keys {shown} do not say what the records are. Text: name its key, e.g. "
        f"{{path: {path}, text_key: {longest}}}. Conversations: kind: chat and keys; pairs: kind: "
        "preference and keys; labelled answers: kind: unpaired and keys (docs/data.md)."
    )


def local_path(path: str, cache_dir: Path | None) -> str:
    """The path of a source; a dataset of the hub, `ORG/NAME[@REVISION][:SPLIT]`, is downloaded."""
    name, colon, choice = path.partition(":")
    # A path that exists wins over a dataset of the hub with the same name.
    if Path(path).exists() or not is_hub_id(name):
        return path
    return f"{local_or_hub(name, dataset=True, cache_dir=cache_dir)}{colon}{choice}"


def format_of(path: str) -> StoreKind:
    """The format of the data at a path; a split of a dataset folder (`folder:test`) is raw data."""
    base, colon, _ = path.rpartition(":")
    # A path that exists is never divided: file names may hold colons.
    if colon and not Path(path).exists() and Path(base).is_dir():
        return "raw"
    return detect_kind(path)


def with_kind(
    source: SourceConfig,
    path: str,
    tokenizer: Tokenizer | None,
    say: Callable[[str], object] = log.debug,
    reads: tuple[str, ...] = (),
) -> SourceConfig:
    """A source of raw data with its kind, detected where it is `auto`, and with its chat template;
    `say` receives a line about it."""
    if source.kind != "auto":
        return with_template(source, tokenizer)
    detected = detect(path, source, reads)
    say(f"{source.path}: {detected.describe()}")
    return with_template(source.model_copy(update={"kind": detected.kind}), tokenizer)


def with_template(source: SourceConfig, tokenizer: Tokenizer | None) -> SourceConfig:
    """A source with its chat template: where it names none, the tokenizer's own if there is one."""
    if source.chat_template != "auto":
        return source
    # Also where no template applies: recipes of run folders state a value for every setting.
    template = FALLBACK_TEMPLATE
    if record_kind(source.kind).has_template:
        from headway.tokenizer.chat import default_template

        template = default_template(tokenizer)
    return source.model_copy(update={"chat_template": template})


def with_kinds(
    config: DataConfig,
    tokenizer: Tokenizer | None,
    say: Callable[[str], object] = log.debug,
    reads: tuple[str, ...] = (),
) -> DataConfig:
    """The `data` section with the kind of every source: detected for raw data, text for stores and
    for what cannot be found yet."""

    def with_known_kind(source: SourceConfig) -> SourceConfig:
        if source.kind != "auto":
            return with_template(source, tokenizer)
        as_text = with_template(source.model_copy(update={"kind": "text"}), tokenizer)
        try:
            path = local_path(source.path, config.cache_dir)
            if source.format is not None:
                from headway.prepare.own_format import read_own_format

                path = str(read_own_format(path, source.format, config.cache_dir))
            elif format_of(path) != "raw":
                return as_text
        except HeadwayError:
            # What is wrong with it is reported when it is opened.
            return as_text
        return with_kind(source, path, tokenizer, say, reads)

    changes: dict[str, Any] = {}
    if config.train is not None:
        changes["train"] = tuple(with_known_kind(source) for source in config.train)

    # A folder of sets stays a folder: its sources are listed when they are opened.
    sets = None if config.valid is None else config.valid.sets
    if isinstance(sets, str) and Path(sets).is_file():
        sets = sets_of(sets)
    if config.valid is not None and isinstance(sets, dict):
        sets = {
            name: tuple(with_known_kind(source) for source in sources)
            for name, sources in sets.items()
        }
        changes["valid"] = config.valid.model_copy(update={"sets": sets})
    return config.model_copy(update=changes)
