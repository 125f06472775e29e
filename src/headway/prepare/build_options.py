"""How raw files become a store: what `prepare/build.py` takes, and options of `headway data
tokenize`.

A module of its own, because the command line imports it for every help, without numpy and pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, get_args

from headway.config.options import option, parse_shard
from headway.errors import ConfigError
from headway.store.convert_options import ConvertOptions
from headway.text.clean_rules import CleanRules
from headway.text.record_keys import KEYS_HELP, KEYS_METAVAR, KeyMap

if TYPE_CHECKING:
    from headway.records.base import TooLong
    from headway.records.encode_media import MediaPositions
    from headway.runtime.executor.work import Placement
    from headway.text.document import TextSplit


def _clean_rules(is_wanted: bool) -> CleanRules | None:
    if not is_wanted:
        return None
    return CleanRules()


@dataclass(frozen=True)
class BuildOptions:
    """How raw files become a store.

    Help begins with the kinds of records that an option is for; with others it is refused. So that
    a given value is known as such, the command line has no default where the field has one
    (`written=None`).
    """

    kind: str = option(
        "text",
        "What the records are: text, chat, preference (pairs) or unpaired (labelled answers).",
    )
    """Of the records (headway/records)."""
    workers: int | None = option(
        None, "Worker processes; default: one per core. With --on: tasks at a time.", min=1
    )
    """None: one per core, or none for a few megabytes."""
    to: str = option("headway", "Format of the result: headway, internlm, zero2all, mds.")
    """Preference pairs: headway only."""
    layout: ConvertOptions = ConvertOptions()
    """Options of the other formats."""

    text_key: str = option(
        "text",
        "Text: key that holds the text of a record; default: text.",
        written=None,
        read=lambda key: key or "text",
    )
    text_template: str | None = None
    """Text: several keys, as in `{title}\\n{content}`."""
    split: TextSplit = "file"
    append_eos: bool | None = option(
        None,
        "Text: end documents with the end token; default: if there is one.",
        "--append-eos/--no-eos",
    )
    bos: bool = option(False, "Text: begin each document with the begin token.", "--bos")
    shard: tuple[int, int] | None = option(
        None,
        "Text: do only part I (from 0) of N; `headway data merge` joins the parts.",
        metavar="I/N",
        read=lambda text: None if text is None else parse_shard(text),
    )
    clean: CleanRules | None = option(
        None,
        "Text: drop bad texts and (near) duplicates, as `data clean` does.",
        "--clean",
        written=False,
        read=_clean_rules,
    )

    chat_template: str = "chatml"
    """Chat, preference: a built-in template, `tokenizer` for the tokenizer's own, or a .jinja file.
    """
    max_length: int | None = option(None, "All but text: maximum tokens of a conversation.")
    too_long: TooLong = option(
        "truncate_right",
        "Chat: what to do with longer ones: truncate_right (default), truncate_left, drop.",
        written=None,
        read=lambda name: name or "truncate_right",
    )
    max_prompt_length: int | None = None
    """Preference: tokens of the prompt that truncation leaves in any case; None: half of
    max_length."""
    valid_fraction: float = option(
        0.0,
        "All but text: share of the records for validation (OUT/valid); the rest is in OUT/train.",
        written=None,
        written_type=float | None,
        read=lambda share: share or 0.0,
    )
    seed: int = option(
        0,
        "All but text: chooses the records for validation.",
        written=None,
        written_type=int | None,
        read=lambda seed: seed or 0,
    )
    drop_bad: bool = option(
        False,
        "All but text: drop and count bad records instead of refusing them.",
        "--drop-bad",
    )
    keys: KeyMap = option(
        KeyMap(), KEYS_HELP, written=None, read=KeyMap.parse, metavar=KEYS_METAVAR
    )

    positions: MediaPositions | None = field(default=None, repr=False)
    """Media: how items stand in a document. Not in the repr, as `placement`."""
    placement: Placement | None = field(default=None, repr=False)
    """Run the work as tasks, perhaps on many machines; None: in this process and its workers. Not
    in the repr, which is part of keys."""

    def check(self) -> None:
        """Refuse impossible values."""
        from headway.records.base import TooLong, check_tokenized, record_kind

        if self.placement is not None and self.shard is not None:
            raise ConfigError(
                f"--shard is {self.shard[0]}/{self.shard[1]} and --on is {self.placement.on}; --on "
                "divides the work itself."
            )
        if self.positions is not None:
            kind = record_kind(self.kind)
        else:
            kind = check_tokenized(self.kind)
        if kind.targets is not None and self.to not in kind.targets:
            formats = "headway stores only"
            if len(kind.targets) > 1:
                formats = f"one of {', '.join(kind.targets)}"
            raise ConfigError(f"--to is {self.to!r}; {self.kind} data is written as {formats}.")
        if self.too_long not in get_args(TooLong):
            raise ConfigError(
                f"--too-long is {self.too_long!r}; it must be truncate_right, truncate_left or "
                "drop."
            )
        if self.max_length is not None and self.max_length < kind.least_length:
            raise ConfigError(
                f"--max-length is {self.max_length}; it must be at least {kind.least_length}."
            )
        if self.max_prompt_length is not None and not 1 <= self.max_prompt_length < (
            self.max_length or 1 << 62
        ):
            raise ConfigError(
                f"--max-prompt-length is {self.max_prompt_length}; it must be at least 1 and less "
                "than --max-length."
            )
        if not 0 <= self.valid_fraction < 1:
            raise ConfigError(
                f"--valid-fraction is {self.valid_fraction}; it must be at least 0 and less than 1."
            )
        if self.shard is not None and not 0 <= self.shard[0] < self.shard[1]:
            raise ConfigError(
                f"shard is {self.shard[0]}/{self.shard[1]}; it must be i/n with i from 0 to n - 1."
            )
