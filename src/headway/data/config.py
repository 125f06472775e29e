"""The `data` and `batch` sections of a recipe: which documents a run reads, how they become rows,
the batch size. Imports no torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import field_validator, model_validator

from headway.config.section import Section, setting
from headway.data.rampup import Rampup
from headway.errors import ConfigError
from headway.records.base import FOR_RECORDS, FOR_TEXT, KindName, record_kind
from headway.runtime.paths import cache_home
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat_template import FALLBACK_TEMPLATE

Packing = Literal["best_fit", "concat", "pad", "one_document"]
SUFFIX = re.compile(r"^(?P<path>.+?)(?:@(?P<weight>\d+(?:\.\d*)?(?:e-?\d+)?)|#(?P<repeat>\d+))?$")
"""`PATH`, `PATH@WEIGHT` or `PATH#REPEAT`: the short form of a source."""
MAX_STEP_TOKENS = 1 << 28
"""Only a typing error gives a larger step."""
MAX_DOCUMENTS = 1 << 20
"""Of one row. More is a typing error: every row of a batch has a bound for each."""
DEFAULT_ROWS = 8
"""Rows of a microbatch where the recipe says nothing."""

# What `auto` stands for.
AUTO_TOKENS_PER_DOCUMENT = 64
AUTO_MIN_DOCUMENTS = 8
AUTO_WINDOW_ROWS = 64
AUTO_MIN_WINDOW_TOKENS = 1 << 18


def default_cache_dir() -> Path:
    """The cache folder, unless `data.cache_dir` is set."""
    return cache_home() / "headway"


def split_suffix(text: str) -> dict[str, Any]:
    """`stores/code@0.3` -> path and weight, `stores/code#2` -> path and repeat."""
    matched = SUFFIX.match(text)
    if matched is None:
        return {"path": text}
    parts: dict[str, Any] = {"path": matched["path"]}
    if matched["weight"] is not None:
        parts["weight"] = float(matched["weight"])
    if matched["repeat"] is not None:
        parts["repeat"] = int(matched["repeat"])
    return parts


class SourceConfig(Section):
    """One source of a mixture. The short form is a string: `path`, `path@0.3` (weight) or `path#2`
    (repeat)."""

    path: str = setting(
        ...,
        "A token store, a token store of another framework, raw files (a file, folder or glob) or "
        "a dataset of the hub. Raw files are tokenized once into a cached store.",
        min_length=1,
    )
    weight: float | None = setting(
        None,
        "Share of the tokens, relative to the weights of the other sources. null = by size.",
        gt=0,
    )
    repeat: int = setting(1, "How often one epoch reads this source.", ge=1)
    limit: int | None = setting(
        None, "Use only this many documents, the first ones. null = all.", gt=0
    )
    min_length: int = setting(1, "Skip documents with fewer tokens.", ge=1)
    kind: Annotated[str, KindName()] = setting(
        "auto",
        "Raw files: text; chat (conversations, trained on the answers only); preference (pairs of "
        "answers, for objective dpo); unpaired (answers labelled good or bad, for objective kto); "
        "multimodal (conversations with media, see multimodal); captions (for objective "
        "contrastive); retrieval (documents that are generated, docs/long-data.md); or auto: by the "
        "keys, refused if not clear. A kind of your own: your module, or its file, e.g. ./my_kind.py (docs/extend.md).",
    )
    chat_template: str = setting(
        "auto",
        "Raw chat and preference data: the name of a chat template, `tokenizer` for the "
        "tokenizer's own template, or a .jinja file. "
        "auto = the tokenizer's own if it has one, otherwise chatml.",
    )
    keys: dict[str, str | None] | None = setting(
        None,
        "Raw chat and preference data: the keys of a record, e.g. {prompt: question, response: "
        "answer}. See docs/data.md.",
    )
    drop_bad: bool = setting(
        False,
        "Raw records of any kind: skip those that cannot be read and log their number. false = "
        "such a record is an error.",
    )
    text_key: str = setting(
        "text", "Raw text: the key of a record that holds the text.", min_length=1
    )
    template: str | None = setting(
        None,
        "Raw text: build the text from several keys, e.g. '{title}\\n{content}'. Overrides "
        "text_key.",
    )
    split: Literal["file", "line"] = setting(
        "file", "Raw .txt files: one document per file, or one per line."
    )
    format: str | None = setting(
        None,
        "Raw files in a format of your own: your module that reads them, or its file, e.g. "
        "./my_format.py (docs/extend.md).",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        if isinstance(data, str):
            return split_suffix(data)
        if isinstance(data, dict) and isinstance(data.get("path"), str):
            # A mapping may use the short form in `path`; its own keys win over the suffix.
            short_form = split_suffix(data["path"])
            return {**short_form, **data, "path": short_form["path"]}
        return data

    @property
    def raw_settings(self) -> list[str]:
        """The settings that were given and apply to raw files only."""
        fields = type(self).model_fields
        names = ("kind", *FOR_RECORDS, *FOR_TEXT, "format")
        changed = [name for name in names if getattr(self, name) != fields[name].default]
        # Recipes of run folders state the template for every source, also where nobody set it.
        if self.chat_template == FALLBACK_TEMPLATE and "chat_template" in changed:
            changed.remove("chat_template")
        # `kind: text` says nothing that a store would contradict.
        if "kind" in changed and record_kind(self.kind).is_text:
            changed.remove("kind")
        return changed

    @model_validator(mode="after")
    def _consistent(self) -> "SourceConfig":
        if self.weight is not None and self.repeat != 1:
            raise ValueError(
                f"has weight={self.weight:g} and repeat={self.repeat}; a source is mixed by weight "
                "or by repeat. Set one of them"
            )

        settings = self.raw_settings
        refused: list[str] = []
        if self.kind != "auto":
            refused = record_kind(self.kind).refused_settings(settings)
        if refused:
            value = getattr(self, refused[0])
            raise ValueError(
                f"has kind={self.kind} and {refused[0]}={value}, which does not apply to that "
                "kind. Remove it"
            )

        for_text = [name for name in FOR_TEXT if name in settings]
        for_records = [name for name in FOR_RECORDS if name in settings]
        if for_text and for_records:
            raise ValueError(
                f"has {for_text[0]}, which is for text, and {for_records[0]}, which is for chat "
                "and preference. Remove one"
            )
        try:
            # The map is made where records are read; here it is only checked, so that a wrong key
            # is reported with its recipe.
            KeyMap.of(self.keys)
        except ConfigError as error:
            raise ValueError(f"has {str(error).removesuffix('.')}") from None
        return self


class ValidConfig(Section):
    """Validation data: a fraction of the training documents, or separate named sets."""

    fraction: float | None = setting(
        None,
        "Hold out this share of the training documents for validation. The choice depends on the "
        "document index alone.",
        gt=0,
        lt=1,
    )
    sets: dict[str, tuple[SourceConfig, ...]] | str | None = setting(
        None,
        "Named sets, each a path or a list of sources, each reported separately. Or a folder: each "
        "store, folder or file in it is a set. Or one file.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"sets": data}
        return data

    @field_validator("sets", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        sets: dict[Any, Any] = {}
        for name, sources in value.items():
            if isinstance(sources, (list, tuple)):
                sets[name] = tuple(sources)
            else:
                sets[name] = (sources,)
        return sets

    @model_validator(mode="after")
    def _one_form(self) -> "ValidConfig":
        if (self.fraction is None) == (not self.sets):
            raise ValueError(
                "needs either fraction, e.g. {fraction: 0.01}, or sets, e.g. {sets: {wiki: "
                "stores/wiki}}"
            )
        return self


class DataConfig(Section):
    """Which documents a run reads, and how they become rows."""

    train: tuple[SourceConfig, ...] | None = setting(
        None, "Sources of the training mixture. null = generated data.", on_resume="fixed"
    )
    valid: ValidConfig | None = setting(
        None, "Validation data. A string is short for sets.", on_resume="fixed"
    )
    by_type: bool = setting(
        True,
        "Read a folder of several types (InternLM type folders, MDS domains, a store made from "
        "them) as one source per type, each with "
        "its own rows and reported loss. false = one source.",
        on_resume="free",
    )
    seq_len: int = setting(512, "Tokens per row.", ge=2, on_resume="fixed")
    packing: Packing = setting(
        "best_fit",
        "How documents become rows. best_fit: whole documents, only those longer than a row are "
        "cut. concat: documents one after another, cut at the end of the row. pad: one document "
        "(or piece) per row. one_document: like concat, but attention and positions span the whole "
        "row.",
        on_resume="fixed",
    )
    max_documents: int | Literal["auto"] = setting(
        "auto",
        "Maximum number of documents per row; padding counts as one. auto = seq_len / 64, at least "
        "8.",
        on_resume="fixed",
    )
    window_tokens: int | Literal["auto"] = setting(
        "auto",
        "Documents are shuffled and packed within windows of this many tokens of the store. auto = "
        "64 rows or more.",
        on_resume="fixed",
    )
    max_tokens: int | None = setting(
        None,
        "Maximum number of document tokens per step; the batch size in rows becomes an upper "
        "bound. null = no limit.",
        gt=0,
        on_resume="fixed",
    )
    balance: bool = setting(
        False,
        "Order the rows of a step so that all ranks have about the same attention work (squared "
        "document lengths).",
        on_resume="fixed",
    )
    skip_batches: str = setting(
        "",
        "Batches to skip: they are read but not trained on. Counted from 0, e.g. '3-5,9'.",
        on_resume="free",
    )
    accept_changed: bool = setting(
        False,
        "Resume even if the data has changed since the checkpoint was saved; reading then starts "
        "at the beginning of the data.",
        on_resume="free",
    )
    tokenizer_unchecked: bool = setting(
        False,
        "Accept stores that do not record their tokenizer; only the highest id is checked.",
        on_resume="free",
    )
    workers: int = setting(
        1,
        "Threads that read rows. 0 = read in the training thread.",
        ge=0,
        le=1024,
        on_resume="free",
    )
    prefetch: int = setting(
        4, "Number of steps to prepare in advance.", ge=1, le=10_000, on_resume="free"
    )
    pin_memory: bool | Literal["auto"] = setting(
        "auto", "Put batches into pinned memory. auto = if there is a GPU.", on_resume="free"
    )
    stage_to: Path | None = setting(
        None,
        "Copy stores to this folder, usually on a local disk, and read them there.",
        on_resume="free",
    )
    cache_dir: Path | None = setting(
        None,
        "Folder for stores built from raw files, row counts and Hugging Face downloads (the "
        "Hugging Face cache is searched, too). null = $XDG_CACHE_HOME/headway (~/.cache/headway); "
        "downloads then go to the Hugging Face cache.",
        on_resume="free",
    )

    @field_validator("train", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        if isinstance(value, (str, dict)):
            return (value,)
        if isinstance(value, list):
            return tuple(value)
        return value

    @field_validator("max_documents")
    @classmethod
    def _room_for_padding(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 2:
            raise ValueError(f"is {value}; it must be at least 2: a document and the padding")
        if isinstance(value, int) and value > MAX_DOCUMENTS:
            raise ValueError(f"is {value}; it must be at most {MAX_DOCUMENTS}")
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
        # A weight is a share among weights; a source that is mixed by size has none to compare.
        weighted = [source.weight is not None for source in self.train or ()]
        if any(weighted) and not all(weighted):
            raise ValueError(
                f"train.{weighted.index(False)} has no weight, other sources have one; set a "
                "weight for all sources or for none"
            )
        if isinstance(self.window_tokens, int) and self.window_tokens < self.seq_len:
            raise ValueError(
                f"window_tokens is {self.window_tokens}; it must be at least "
                f"seq_len={self.seq_len}; 64 times seq_len or more is better"
            )
        return self

    @property
    def documents_per_row(self) -> int:
        """Maximum number of documents per row; padding counts as one."""
        if self.max_documents == "auto":
            return max(AUTO_MIN_DOCUMENTS, self.seq_len // AUTO_TOKENS_PER_DOCUMENT)
        return self.max_documents

    @property
    def window(self) -> int:
        """Tokens of a window; if not set, a power of two, at least 64 rows and at least 2^18."""
        if isinstance(self.window_tokens, int):
            return self.window_tokens
        min_tokens = max(AUTO_MIN_WINDOW_TOKENS, AUTO_WINDOW_ROWS * self.seq_len)
        return 1 << (min_tokens - 1).bit_length()

    @property
    def skipped(self) -> tuple[tuple[int, int], ...]:
        """The ranges of batches (first, last) to skip."""
        return skipped_batches(self.skip_batches)


def skipped_batches(text: str) -> tuple[tuple[int, int], ...]:
    """`3-5,9` -> ((3, 5), (9, 9)): ascending, inclusive."""
    if not text.strip():
        return ()
    problem = f"is {text!r}; it must be ascending numbers and ranges like '3-5,9'"
    ranges: list[tuple[int, int]] = []
    for part in text.split(","):
        matched = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if matched is None:
            raise ValueError(problem)
        first = int(matched[1])
        last = int(matched[2] or matched[1])
        if last < first or (ranges and first <= ranges[-1][1]):
            raise ValueError(problem)
        ranges.append((first, last))
    return tuple(ranges)


@dataclass(frozen=True)
class ResolvedBatch:
    """The batch in numbers."""

    rows: int
    """Rows of one step over all ranks."""
    micro_rows: int
    accumulate: int
    """Microbatches of one step on one rank."""
    tokens: int

    def describe(self, ranks: int) -> str:
        """One line for the log."""
        return (
            f"batch: {self.tokens} tokens = {self.rows} rows = {ranks} ranks x "
            f"{self.accumulate} microbatches x {self.micro_rows} rows"
        )


class BatchConfig(Section):
    """The batch of one optimizer step, in one of three forms: tokens; rows; or rows_per_rank (one
    microbatch) and accumulate."""

    tokens: int | None = setting(
        None, "Tokens of one step over all ranks.", gt=0, on_resume="fixed"
    )
    rows: int | None = setting(None, "Rows of one step over all ranks.", gt=0, on_resume="fixed")
    rows_per_rank: int | None = setting(
        None,
        f"Rows of one microbatch on each rank; {DEFAULT_ROWS} if no form is given.",
        gt=0,
        on_resume="fixed",
    )
    accumulate: int | None = setting(
        None, "Microbatches per step, with rows_per_rank. null = 1.", gt=0, on_resume="fixed"
    )
    micro_rows: int | Literal["auto"] | None = setting(
        None,
        f"Rows per microbatch. null = the largest number up to {DEFAULT_ROWS} that divides a "
        "rank's rows. auto = as many as fit into memory; the batch stays the same.",
        on_resume="free",
    )
    rampup: Rampup | None = setting(
        None, "Start with a smaller batch that grows to the full batch.", on_resume="fixed"
    )
    lr_scaling: Literal["none", "sqrt", "linear"] = setting(
        "none",
        "Multiply all learning rates by (rows of a step / reference_rows): not at all, by its "
        "square root (suits Adam), or linearly.",
        on_resume="free",
    )
    reference_rows: int | None = setting(
        None, "With lr_scaling: the rows of a step for which the learning rates are meant.", gt=0
    )

    @model_validator(mode="after")
    def _has_reference(self) -> "BatchConfig":
        if (self.lr_scaling == "none") == (self.reference_rows is None):
            return self
        if self.reference_rows is None:
            present = f"lr_scaling={self.lr_scaling}"
            missing = "reference_rows"
        else:
            present = f"reference_rows={self.reference_rows}"
            missing = "lr_scaling: sqrt or linear"
        raise ValueError(
            f"has {present} alone; learning rates scale from a reference. Add {missing}"
        )

    def lr_factor(self, rows: int) -> float:
        """The factor of all learning rates for a step of this many rows: 1, sqrt(rows /
        reference_rows) or rows / reference_rows."""
        if self.lr_scaling == "none" or self.reference_rows is None:
            return 1.0
        ratio = rows / self.reference_rows
        if self.lr_scaling == "linear":
            return ratio
        return ratio**0.5

    @model_validator(mode="after")
    def _one_form(self) -> "BatchConfig":
        forms = [
            name for name in ("tokens", "rows", "rows_per_rank") if getattr(self, name) is not None
        ]
        if len(forms) > 1:
            raise ValueError(
                f"has {' and '.join(forms)}; set one of tokens, rows, or rows_per_rank with "
                "accumulate"
            )
        if self.accumulate is not None and (self.tokens is not None or self.rows is not None):
            raise ValueError(
                f"has accumulate={self.accumulate} and {forms[0]}; accumulate follows from "
                f"{forms[0]} and micro_rows. Remove it"
            )
        if self.rows_per_rank is not None and self.micro_rows not in (None, self.rows_per_rank):
            raise ValueError(
                f"has micro_rows={self.micro_rows} and rows_per_rank={self.rows_per_rank}, which "
                "mean the same. Remove one"
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
        """micro_rows if it is a number."""
        if isinstance(self.micro_rows, int):
            return self.micro_rows
        return None

    def resolve(self, seq_len: int, ranks: int) -> ResolvedBatch:
        """The batch in numbers for this many data-parallel ranks, or a ConfigError that suggests
        valid numbers.

        With micro_rows=auto a microbatch has one row until it is known how many fit.
        """
        if self.tokens is not None:
            rows = self._rows_of("tokens", self.tokens, seq_len, ranks)
        elif self.rows is not None:
            rows = self._rows_of("rows", self.rows, 1, ranks)
        else:
            micro_rows = self.rows_per_rank or self.given_micro_rows or DEFAULT_ROWS
            rows = micro_rows * (self.accumulate or 1) * ranks
        rows_per_rank = rows // ranks

        if self.micro_rows == "auto":
            micro_rows = 1
        else:
            micro_rows = self.micro_rows or self.rows_per_rank
        if micro_rows is None:
            candidates = range(1, min(DEFAULT_ROWS, rows_per_rank) + 1)
            micro_rows = max(number for number in candidates if rows_per_rank % number == 0)

        if self.rampup is not None and (first := self.rampup.over(ranks).start) > rows:
            raise ConfigError(
                f"batch.rampup.start is {first} rows; it must not exceed the full batch of {rows} "
                "rows."
            )

        if rows * seq_len > MAX_STEP_TOKENS:
            raise ConfigError(
                f"batch is {rows} rows of {seq_len} tokens in one step; the maximum is "
                f"{MAX_STEP_TOKENS:,} tokens. Lower it."
            )
        return ResolvedBatch(rows, micro_rows, rows_per_rank // micro_rows, rows * seq_len)

    def _rows_of(self, key: str, value: int, unit: int, ranks: int) -> int:
        """The rows that a setting stands for, `unit` of it per row; every rank must get whole
        microbatches."""
        micro_rows = self.given_micro_rows
        step = unit * (micro_rows or 1) * ranks
        if value % step == 0:
            return value // unit

        factors: list[str] = []
        if unit > 1:
            factors.append(f"seq_len={unit}")
        if micro_rows:
            factors.append(f"micro_rows={micro_rows}")
        factors.append(f"ranks={ranks}")

        below = value // step * step
        above = -(-value // step) * step
        near = sorted({multiple for multiple in (below, above) if multiple})
        raise ConfigError(
            f"batch.{key} is {value}; it must be a multiple of {' * '.join(factors)}, which is "
            f"{step}. Try {' or '.join(map(str, near))}."
        )
