"""Chat data to token stores with a loss mask. In: records in any shape `conversations` knows; out: a store, or `train` and `valid` in it.

Too long conversations follow a stated rule: `truncate_right` keeps their first tokens, `truncate_left` their last, `drop` leaves them
out. Each is counted in the report; a conversation with no target left is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from headway.errors import ConfigError
from headway.prepare.conversations import conversation_of
from headway.prepare.masked_build import SIDES, Build, Split, count_unread
from headway.store.convert import ConvertOptions, check_target, convert_built
from headway.store.source import Flags, Ids
from headway.text.document import Record
from headway.text.read import expand
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import ChatTemplate, Rendered, Segment

TooLong = Literal["truncate_right", "truncate_left", "drop"]
TARGETS = ("headway", "internlm", "zero2all", "mds")


@dataclass(frozen=True)
class ChatOptions:
    """How conversations are written down and where they go."""

    template: str = "chatml"
    """One of headway's templates, `tokenizer` for the tokenizer's own, or a .jinja file."""
    max_length: int | None = None
    """Most tokens of a conversation; None: any."""
    too_long: TooLong = "truncate_right"
    valid_fraction: float = 0.0
    """Share of the records that goes into a store of its own."""
    to: str = "headway"
    """Format of the result: headway, internlm, zero2all or mds."""
    seed: int = 0
    drop_bad: bool = False
    """Leave out records that cannot be read as conversations, counted, instead of refusing them."""
    workers: int | None = None
    keys: KeyMap = KeyMap()
    """The user's names for keys of records."""
    type: str = "en"
    """InternLM: the folder of the data type."""

    def check(self) -> None:
        """Refuse values that cannot be."""
        if self.to not in TARGETS:
            raise ConfigError(f"--to is {self.to!r}; chat data is written as one of {', '.join(TARGETS)}.")
        if self.too_long not in ("truncate_right", "truncate_left", "drop"):
            raise ConfigError(f"--too-long is {self.too_long!r}; it must be truncate_right, truncate_left or drop.")
        if self.max_length is not None and self.max_length < 2:
            raise ConfigError(f"--max-length is {self.max_length}; it must be at least 2.")
        if not 0 <= self.valid_fraction < 1:
            raise ConfigError(f"--valid-fraction is {self.valid_fraction}; it must be at least 0 and less than 1.")


@dataclass(frozen=True)
class ChatReport:
    """What was made; `records` = documents written + dropped + bad + without_targets."""

    out: str
    records: int
    train_documents: int
    valid_documents: int
    tokens: int
    targets: int
    truncated: int
    dropped: int
    """Left out because they were too long."""
    without_targets: int
    """Left out because truncation left no token to learn from."""
    bad: int
    """Left out because they are no conversations."""

    def describe(self) -> str:
        """One line for people."""
        written = f"{self.train_documents} conversations" + (f" and {self.valid_documents} for validation" if self.valid_documents else "")
        left_out = {"truncated": self.truncated, "too long": self.dropped, "without targets": self.without_targets, "bad": self.bad}
        notes = "".join(f", {number} {what}" for what, number in left_out.items() if number)
        share = self.targets / self.tokens if self.tokens else 0.0
        return f"{self.out}: {written} of {self.records} records, {self.tokens} tokens, {share:.1%} of them targets{notes}"


@dataclass(frozen=True)
class ChatEncoder:
    """One record becomes one document."""

    max_length: int | None
    too_long: TooLong
    keys: KeyMap = KeyMap()

    def segments(self, record: Record, template: ChatTemplate, counts: Counter[str]) -> list[list[Segment]]:
        """The conversation of a record."""
        conversation = conversation_of(record, self.keys)
        count_unread(conversation.unread, counts)
        return [template.segments(conversation.turns, conversation.tools)]

    def documents(self, rendered: list[Rendered], counts: Counter[str]) -> list[tuple[Ids, Flags]]:
        """The conversation as ids and loss mask, cut by the rule."""
        ids, mask = rendered[0]
        if self.max_length is not None and len(ids) > self.max_length:
            if self.too_long == "drop":
                counts["dropped"] += 1
                return []
            counts["truncated"] += 1
            kept = slice(self.max_length) if self.too_long == "truncate_right" else slice(-self.max_length, None)
            ids, mask = ids[kept], mask[kept]
        if not mask[1:].any():
            counts["without_targets"] += 1
            return []
        return [(ids, mask)]


def tokenize_chat(inputs: Sequence[Path | str], tokenizer: Path | str, out: Path | str, options: ChatOptions = ChatOptions()) -> ChatReport:
    """Build a masked store (two with `valid_fraction`) of conversations; killed and called again, it continues."""
    options.check()
    for folder in [Path(out)] if options.valid_fraction == 0 else [Path(out) / side for side in SIDES]:
        check_target(folder, options.to, ConvertOptions(type=options.type))
    build = _build(inputs, Path(tokenizer), options)
    counts = build.run_sides(Path(out), options.valid_fraction, options.seed, partial(_one_side, build, options))
    total = sum(counts, Counter[str]())
    valid = counts[1]["documents"] if len(counts) > 1 else 0
    return ChatReport(
        out=str(out),
        records=total["records"],
        train_documents=counts[0]["documents"],
        valid_documents=valid,
        tokens=total["tokens"],
        targets=total["targets"],
        truncated=total["truncated"],
        dropped=total["dropped"],
        without_targets=total["without_targets"],
        bad=total["bad"],
    )


def cached_chat(
    paths: Sequence[Path | str], tokenizer: Path | str, cache_dir: Path | None = None, options: ChatOptions = ChatOptions()
) -> Path:
    """The store of some raw chat data, built now if it is not in the cache yet."""
    options.check()
    return _build(paths, Path(tokenizer), options).cached(cache_dir)


def _build(inputs: Sequence[Path | str], tokenizer: Path, options: ChatOptions) -> Build:
    encoder = ChatEncoder(options.max_length, options.too_long, options.keys)
    sources = [f"kind=chat template={options.template}", *map(str, inputs)]
    return Build(expand(list(inputs)), tokenizer, options.template, encoder, options.drop_bad, options.workers, sources)


def _one_side(build: Build, options: ChatOptions, folder: Path, split: Split | None) -> Counter[str]:
    if options.to == "headway":
        return build.run(folder, split)
    built = folder.with_name(f".tmp-{folder.name}-tokens")
    counts = build.run(built, split)
    convert_built(built, folder, options.to, ConvertOptions(type=options.type))
    return counts
