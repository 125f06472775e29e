"""The `data` and `batch` sections of a recipe: which documents, how they become rows, how many rows a step has. Imports without torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import field_validator, model_validator

from headway.config.section import Section, setting
from headway.errors import ConfigError
from headway.runtime.paths import cache_home
from headway.text.record_keys import KeyMap

Packing = Literal["best_fit", "concat", "pad", "one_document"]
SUFFIX = re.compile(r"^(?P<path>.+?)(?:@(?P<weight>\d+(?:\.\d*)?(?:e-?\d+)?)|#(?P<repeat>\d+))?$")
MOST_TOKENS = 1 << 28
DEFAULT_ROWS = 8


def default_cache_dir() -> Path:
    """Where caches go unless a recipe says otherwise."""
    return cache_home() / "headway"


def split_suffix(text: str) -> dict[str, Any]:
    """`stores/code@0.3` -> path and weight, `stores/code#2` -> path and repeat."""
    found = SUFFIX.match(text)
    if found is None:
        return {"path": text}
    parts: dict[str, Any] = {"path": found["path"]}
    if found["weight"] is not None:
        parts["weight"] = float(found["weight"])
    if found["repeat"] is not None:
        parts["repeat"] = int(found["repeat"])
    return parts


class SourceConfig(Section):
    """One source of a mixture: a store, a foreign store or raw files. A text `path@0.3` or `path#2` is short for weight or repeat."""

    path: str = setting(..., "A token store, a foreign store, or raw files (built once into a cached store).", min_length=1)
    weight: float | None = setting(None, "Share of the tokens, relative to the other sources' weights; null = by size.", gt=0)
    repeat: int = setting(1, "How many times one epoch reads this source.", ge=1)
    limit: int | None = setting(None, "Use only the first documents, this many; null = all.", gt=0)
    min_length: int = setting(1, "Documents with fewer tokens are left out.", ge=1)
    kind: Literal["text", "chat", "preference"] = setting(
        "text", "Raw files: texts; conversations in any known shape, which learn the answers; or pairs of answers (objective dpo)."
    )
    chat_template: str = setting(
        "chatml", "Raw conversations and pairs: a template's name, `tokenizer` for the tokenizer's own, or a .jinja file."
    )
    keys: dict[str, str | None] | None = setting(
        None, "Raw conversations and pairs: which key of a record is what, e.g. {prompt: question, response: answer}; see docs/data.md."
    )
    drop_bad: bool = setting(
        False, "Raw conversations and pairs: leave out records that cannot be read (counted in the log) instead of refusing them."
    )
    text_key: str = setting("text", "Raw files: the key of a record that holds the text.", min_length=1)
    template: str | None = setting(None, "Raw files: text made of several keys, e.g. '{title}\\n{content}'; wins over text_key.")
    split: Literal["file", "line"] = setting("file", "Raw .txt files: whether a file or each line is a document.")

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        if isinstance(data, str):
            return split_suffix(data)
        if isinstance(data, dict) and isinstance(data.get("path"), str):
            return {**split_suffix(data["path"]), **data, "path": split_suffix(data["path"])["path"]}
        return data

    @property
    def raw_settings(self) -> list[str]:
        """The settings given that only make sense for raw files."""
        names = ("kind", "chat_template", "keys", "drop_bad", "text_key", "template", "split")
        return [name for name in names if getattr(self, name) != type(self).model_fields[name].default]

    @model_validator(mode="after")
    def _one_share(self) -> "SourceConfig":
        if self.weight is not None and self.repeat != 1:
            raise ValueError(f"has weight={self.weight:g} and repeat={self.repeat}; a source is drawn by weight or by repeats. Give one")
        for name in ("text_key", "template", "split") if self.kind != "text" else ("chat_template", "keys", "drop_bad"):
            if name in self.raw_settings:
                raise ValueError(f"has kind={self.kind} and {name}={getattr(self, name)}, which that kind does not know. Remove it")
        try:
            KeyMap.of(self.keys)
        except ConfigError as error:
            raise ValueError(f"has {str(error).removesuffix('.')}") from None
        return self


class ValidConfig(Section):
    """Validation data: a fraction of the training documents, or named sets of their own."""

    fraction: float | None = setting(None, "This share of the training documents, chosen by index, is kept for validation.", gt=0, lt=1)
    sets: dict[str, tuple[SourceConfig, ...]] | str | None = setting(
        None, "Named sets, each a path (or a list of sources), each reported apart; or a folder: each store, folder or file in it is a set."
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        return {"sets": data} if isinstance(data, str) else data

    @field_validator("sets", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, dict):
            return {name: tuple(one) if isinstance(one, (list, tuple)) else (one,) for name, one in value.items()}
        return value

    @model_validator(mode="after")
    def _one_form(self) -> "ValidConfig":
        if (self.fraction is None) == (not self.sets):
            raise ValueError("needs either fraction, e.g. {fraction: 0.01}, or sets, e.g. {sets: {wiki: stores/wiki}}")
        return self


class DataConfig(Section):
    """Which documents a run reads and how they become rows."""

    train: tuple[SourceConfig, ...] | None = setting(None, "Sources of the mixture; null = generated data.", on_resume="fixed")
    valid: ValidConfig | None = setting(None, "Validation data; a text is short for sets.", on_resume="fixed")
    by_type: bool = setting(
        True,
        "A folder of several types (InternLM's type folders, MDS domains, a store made of them) is one source per type, each with "
        "its own loss and rows; false = one source.",
        on_resume="free",
    )
    seq_len: int = setting(512, "Tokens in a row.", ge=2, on_resume="fixed")
    packing: Packing = setting(
        "best_fit",
        "best_fit: whole documents, cut only where longer than a row; concat: one after another, cut at the row's end; pad: one document "
        "(or piece) per row; one_document: as concat, but attention and positions run through the whole row.",
        on_resume="fixed",
    )
    max_documents: int | Literal["auto"] = setting(
        "auto", "Most documents in a row, its padding counted; auto = seq_len / 64, at least 8.", on_resume="fixed"
    )
    window_tokens: int | Literal["auto"] = setting(
        "auto",
        "Documents are packed with others from a stretch of the store of this many tokens; auto = 64 rows or more.",
        on_resume="fixed",
    )
    max_tokens: int | None = setting(
        None,
        "End a step before its documents hold more tokens than this; the batch is then its most rows. null = rows alone.",
        gt=0,
        on_resume="fixed",
    )
    balance: bool = setting(
        False, "Order the rows of a step so that ranks get equal attention work (squared document lengths).", on_resume="fixed"
    )
    skip_batches: str = setting("", "Batches to read but not train on, counted from 0, e.g. '3-5,9'.", on_resume="free")
    accept_changed: bool = setting(
        False,
        "Resume although a source holds other data than when the checkpoint was saved; the data is then read from its beginning.",
        on_resume="free",
    )
    tokenizer_unchecked: bool = setting(
        False, "Accept stores that do not say which tokenizer made them; only the highest id is checked.", on_resume="free"
    )
    workers: int = setting(1, "Threads that fill rows; 0 fills them in the training thread.", ge=0, le=1024, on_resume="free")
    prefetch: int = setting(4, "Steps prepared ahead.", ge=1, le=10_000, on_resume="free")
    pin_memory: bool | Literal["auto"] = setting("auto", "Put batches in pinned memory; auto = where there is a GPU.", on_resume="free")
    stage_to: Path | None = setting(None, "Copy stores to this folder (a local disk) first and read them there.", on_resume="free")
    cache_dir: Path | None = setting(
        None,
        "Where stores built from raw files, row indexes and what the hub gives are kept (the hub's own cache is looked into, too); "
        "null = $XDG_CACHE_HOME/headway (~/.cache/headway), and the hub's own cache for what the hub gives.",
        on_resume="free",
    )

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return (value,) if isinstance(value, (str, dict)) else tuple(value) if isinstance(value, list) else value

    @field_validator("max_documents")
    @classmethod
    def _room_for_padding(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError(f"is {value}; it must be at least 2, a document and its padding")
        return value

    @field_validator("skip_batches")
    @classmethod
    def _readable(cls, value: str) -> str:
        skipped_batches(value)
        return value

    @model_validator(mode="after")
    def _fits(self) -> "DataConfig":
        if self.train is not None and not self.train:
            raise ValueError("train is []; give at least one source, or null for generated data")
        weighted = [source.weight is not None for source in self.train or ()]
        if any(weighted) and not all(weighted):
            raise ValueError(f"train.{weighted.index(False)} has no weight, others have; give all sources a weight or none")
        if isinstance(self.window_tokens, int) and self.window_tokens < self.seq_len:
            raise ValueError(f"window_tokens is {self.window_tokens}; it must be at least seq_len={self.seq_len}, better 64 times that")
        return self

    @property
    def documents_per_row(self) -> int:
        """Most documents in a row, its padding counted."""
        return max(8, self.seq_len // 64) if self.max_documents == "auto" else self.max_documents

    @property
    def window(self) -> int:
        """Tokens of a window: a power of two, 64 rows or more and not under 2^18, unless given."""
        if isinstance(self.window_tokens, int):
            return self.window_tokens
        return 1 << (max(1 << 18, 64 * self.seq_len) - 1).bit_length()

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """The ranges of batches (first, last) that are read but not trained on."""
        return skipped_batches(self.skip_batches)


def skipped_batches(text: str) -> tuple[tuple[int, int], ...]:
    """`3-5,9` -> ((3, 5), (9, 9)): ascending, inclusive."""
    ranges: list[tuple[int, int]] = []
    for part in [p.strip() for p in text.split(",")] if text.strip() else []:
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first = int(found[1]) if found else 0
        last = int(found[2] or found[1]) if found else -1
        if last < first or (ranges and first <= ranges[-1][1]):
            raise ValueError(f"is {text!r}; it must be ascending numbers and ranges like '3-5,9'")
        ranges.append((first, last))
    return tuple(ranges)


class Rampup(Section):
    """A batch that grows: `start` rows, `add` more after every `every` batches, until the full batch."""

    start: int = setting(..., "Rows of the first batches.", gt=0)
    add: int = setting(..., "Rows added each time.", gt=0)
    every: int = setting(..., "Batches between two additions.", gt=0)


@dataclass(frozen=True)
class ResolvedBatch:
    """A batch in numbers, the same in whichever form the recipe gave it."""

    rows: int
    """Rows of one step over all ranks."""
    micro_rows: int
    accumulate: int
    """Microbatches of one step on one rank."""
    tokens: int

    def describe(self, ranks: int) -> str:
        """One line for the log."""
        return f"batch: {self.tokens} tokens = {self.rows} rows = {ranks} ranks x {self.accumulate} microbatches x {self.micro_rows} rows"


class BatchConfig(Section):
    """How much one optimizer step reads, in one of three forms: tokens, rows, or rows_per_rank (a microbatch) and accumulate."""

    tokens: int | None = setting(None, "Tokens of one step over all ranks.", gt=0, on_resume="fixed")
    rows: int | None = setting(None, "Rows of one step over all ranks.", gt=0, on_resume="fixed")
    rows_per_rank: int | None = setting(
        None, f"Rows of one microbatch on each rank; with no form given {DEFAULT_ROWS}.", gt=0, on_resume="fixed"
    )
    accumulate: int | None = setting(None, "Microbatches of one step, with rows_per_rank; null = 1.", gt=0, on_resume="fixed")
    micro_rows: int | Literal["auto"] | None = setting(
        None,
        f"Rows that go through the model at once; null = the most up to {DEFAULT_ROWS} that divides a rank's rows; "
        "auto = the most that fit into memory, with the same batch.",
        on_resume="free",
    )
    rampup: Rampup | None = setting(None, "Start with a smaller batch and let it grow.", on_resume="fixed")

    @model_validator(mode="after")
    def _one_form(self) -> "BatchConfig":
        given = [name for name in ("tokens", "rows", "rows_per_rank") if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"has {' and '.join(given)}; give one of tokens, rows, or rows_per_rank with accumulate")
        if self.accumulate is not None and (self.tokens is not None or self.rows is not None):
            raise ValueError(
                f"has accumulate={self.accumulate} and {given[0]}; accumulate follows from {given[0]} and micro_rows. Remove it"
            )
        if self.rows_per_rank is not None and self.micro_rows not in (None, self.rows_per_rank):
            raise ValueError(
                f"has micro_rows={self.micro_rows} and rows_per_rank={self.rows_per_rank}, which is the same thing. Remove one"
            )
        return self

    @field_validator("micro_rows")
    @classmethod
    def _positive(cls, value: int | str | None) -> int | str | None:
        if isinstance(value, int) and value < 1:
            raise ValueError(f"is {value}; it must be at least 1, or auto")
        return value

    @property
    def given_micro_rows(self) -> int | None:
        """The rows of a microbatch, where they are given as a number."""
        return self.micro_rows if isinstance(self.micro_rows, int) else None

    def resolve(self, seq_len: int, ranks: int) -> ResolvedBatch:
        """The batch in numbers for this many data-parallel ranks, or a ConfigError that names numbers that would do.

        With micro_rows=auto microbatches are of one row until it is known how many fit.
        """
        if self.tokens is not None:
            rows = self._rows_of("tokens", self.tokens, seq_len, ranks)
        elif self.rows is not None:
            rows = self._rows_of("rows", self.rows, 1, ranks)
        else:
            rows = (self.rows_per_rank or self.given_micro_rows or DEFAULT_ROWS) * (self.accumulate or 1) * ranks
        each = rows // ranks
        wanted = 1 if self.micro_rows == "auto" else self.micro_rows or self.rows_per_rank
        micro_rows = wanted or max(n for n in range(1, min(DEFAULT_ROWS, each) + 1) if each % n == 0)
        if self.tokens is None and self.rows is None and wanted is None:
            micro_rows = DEFAULT_ROWS
        if self.rampup is not None and self.rampup.start > rows:
            raise ConfigError(f"batch.rampup.start is {self.rampup.start}; it must not exceed the full batch of {rows} rows.")
        if rows * seq_len > MOST_TOKENS:
            raise ConfigError(
                f"batch is {rows} rows of {seq_len} tokens in one step; more than {MOST_TOKENS:,} tokens are no step. Lower it."
            )
        return ResolvedBatch(rows, micro_rows, each // micro_rows, rows * seq_len)

    def _rows_of(self, key: str, value: int, unit: int, ranks: int) -> int:
        micro_rows = self.given_micro_rows
        step = unit * (micro_rows or 1) * ranks
        if value % step == 0:
            return value // unit
        parts = ([f"seq_len={unit}"] if unit > 1 else []) + ([f"micro_rows={micro_rows}"] if micro_rows else []) + [f"ranks={ranks}"]
        near = sorted({n for n in (value // step * step, -(-value // step) * step) if n})
        raise ConfigError(
            f"batch.{key} is {value}; it must be a multiple of {' * '.join(parts)}, which is {step}. Try {' or '.join(map(str, near))}."
        )


def batch_rows(rows: int, rampup: Rampup | None, batch: int) -> int:
    """Rows of batch number `batch` (from 0)."""
    return rows if rampup is None else min(rows, rampup.start + rampup.add * (batch // rampup.every))


def rows_before(rows: int, rampup: Rampup | None, batch: int) -> int:
    """Rows of all batches before number `batch`."""
    if rampup is None:
        return rows * batch
    growing = max(0, -(-(rows - rampup.start) // rampup.add)) * rampup.every
    grown = min(batch, growing)
    whole, rest = divmod(grown, rampup.every)
    before = rampup.every * (whole * rampup.start + rampup.add * (whole * (whole - 1) // 2)) + rest * (rampup.start + rampup.add * whole)
    return before + rows * (batch - grown)
