"""Preference pairs to a paired store: document 2i is the chosen, 2i + 1 the rejected conversation of pair i, both with a loss mask.

The prompt (every turn of it, the assistant's too) carries no loss; the answers do, with the token that ends them. Where a pair is longer
than `max_length`, first the prompt loses its beginning, as much as is needed but not below `max_prompt_length` tokens, then the answers
lose their ends. Both documents of a pair keep the same prompt. Truncated pairs are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headway.data.pairs import PREFERENCE_MARK
from headway.errors import ConfigError, DataError
from headway.prepare.conversations import PreferencePair, preference_of
from headway.prepare.masked_build import Build, count_unread
from headway.store.source import Flags, Ids
from headway.text.document import Record
from headway.text.read import expand
from headway.text.record_keys import KeyMap
from headway.tokenizer.chat import ChatTemplate, Rendered, Segment


@dataclass(frozen=True)
class PreferenceOptions:
    """How pairs are written down."""

    template: str = "chatml"
    """One of headway's templates, `tokenizer` for the tokenizer's own, or a .jinja file."""
    max_length: int | None = None
    """Most tokens of a prompt with an answer; None: any."""
    max_prompt_length: int | None = None
    """Tokens of the prompt that are kept in any case; None: half of max_length."""
    valid_fraction: float = 0.0
    """Share of the pairs that goes into a store of its own."""
    to: str = "headway"
    """Format of the result; pairs have no place in the other formats."""
    seed: int = 0
    drop_bad: bool = False
    """Leave out records that are no pairs, counted, instead of refusing them."""
    workers: int | None = None
    keys: KeyMap = KeyMap()
    """The user's names for keys of records."""

    def check(self) -> None:
        """Refuse values that cannot be."""
        if self.to != "headway":
            raise ConfigError(f"--to is {self.to!r}; preference pairs are written as headway stores only.")
        if self.max_length is not None and self.max_length < 4:
            raise ConfigError(f"--max-length is {self.max_length}; it must be at least 4.")
        if self.max_prompt_length is not None and not 1 <= self.max_prompt_length < (self.max_length or 1 << 62):
            raise ConfigError(f"--max-prompt-length is {self.max_prompt_length}; it must be at least 1 and less than --max-length.")
        if not 0 <= self.valid_fraction < 1:
            raise ConfigError(f"--valid-fraction is {self.valid_fraction}; it must be at least 0 and less than 1.")


@dataclass(frozen=True)
class PreferenceReport:
    """What was made; `records` = pairs + bad."""

    out: str
    records: int
    train_pairs: int
    valid_pairs: int
    tokens: int
    targets: int
    prompts_truncated: int
    answers_truncated: int
    """Pairs of which at least one answer was cut."""
    bad: int
    """Left out because they are no pairs."""

    def describe(self) -> str:
        """One line for people."""
        written = f"{self.train_pairs} pairs" + (f" and {self.valid_pairs} for validation" if self.valid_pairs else "")
        cut = {"prompts truncated": self.prompts_truncated, "answers truncated": self.answers_truncated, "bad": self.bad}
        notes = "".join(f", {number} {what}" for what, number in cut.items() if number)
        return f"{self.out}: {written} of {self.records} records, {self.tokens} tokens, {self.targets} of them targets{notes}"


@dataclass(frozen=True)
class PairEncoder:
    """One record becomes two documents."""

    max_length: int | None
    max_prompt_length: int
    keys: KeyMap = KeyMap()

    def segments(self, record: Record, template: ChatTemplate, counts: Counter[str]) -> list[list[Segment]]:
        """The chosen and the rejected conversation of a record."""
        pair = preference_of(record, self.keys)
        count_unread(pair.unread, counts)
        return pair_segments(pair, template)

    def documents(self, rendered: list[Rendered], counts: Counter[str]) -> list[tuple[Ids, Flags]]:
        """The chosen and the rejected conversation, cut by the rule."""
        prompt, chosen, rejected = cut_pair(*rendered)
        longest = max(len(chosen.ids), len(rejected.ids))
        start, room = 0, longest
        if self.max_length is not None and len(prompt) + longest > self.max_length:
            kept = min(len(prompt), max(self.max_prompt_length, self.max_length - longest))
            start, room = len(prompt) - kept, self.max_length - kept
            counts["prompts_truncated"] += start > 0
            counts["answers_truncated"] += longest > room
        return [
            (
                np.concatenate([prompt[start:], answer.ids[:room]]),
                np.concatenate([np.zeros(len(prompt) - start, np.bool_), answer.mask[:room]]),
            )
            for answer in (chosen, rejected)
        ]


def pair_segments(pair: PreferencePair, template: ChatTemplate) -> list[list[Segment]]:
    """The chosen and the rejected conversation, with loss on the answers alone."""
    context = [replace(turn, learn=False) for turn in pair.prompt]
    answers = [[replace(turn, learn=True) for turn in answer] for answer in (pair.chosen, pair.rejected)]
    return [template.segments([*context, *answer], pair.tools) for answer in answers]


def cut_pair(chosen: Rendered, rejected: Rendered) -> tuple[Ids, Rendered, Rendered]:
    """The prompt both share (with the header of the answer), and the two answers up to their last target."""
    first = int(np.argmax(chosen.mask))
    if first != int(np.argmax(rejected.mask)) or not np.array_equal(chosen.ids[:first], rejected.ids[:first]):
        raise DataError("the template writes the prompt differently before the two answers, so they cannot be compared.")
    ends = [len(one.mask) - int(np.argmax(one.mask[::-1])) for one in (chosen, rejected)]
    answers = [Rendered(one.ids[first:end], one.mask[first:end]) for one, end in zip((chosen, rejected), ends, strict=True)]
    return chosen.ids[:first], answers[0], answers[1]


def tokenize_preference(
    inputs: Sequence[Path | str], tokenizer: Path | str, out: Path | str, options: PreferenceOptions = PreferenceOptions()
) -> PreferenceReport:
    """Build a paired store (two with `valid_fraction`) of preference data; killed and called again, it continues."""
    options.check()
    build = _build(inputs, Path(tokenizer), options)
    counts = build.run_sides(Path(out), options.valid_fraction, options.seed, build.run)
    total = sum(counts, Counter[str]())
    pairs = [one["documents"] // 2 for one in counts]
    return PreferenceReport(
        out=str(out),
        records=total["records"],
        train_pairs=pairs[0],
        valid_pairs=pairs[1] if len(pairs) > 1 else 0,
        tokens=total["tokens"],
        targets=total["targets"],
        prompts_truncated=total["prompts_truncated"],
        answers_truncated=total["answers_truncated"],
        bad=total["bad"],
    )


def cached_preference(
    paths: Sequence[Path | str], tokenizer: Path | str, cache_dir: Path | None = None, options: PreferenceOptions = PreferenceOptions()
) -> Path:
    """The paired store of some raw preference data, built now if it is not in the cache yet."""
    options.check()
    return _build(paths, Path(tokenizer), options).cached(cache_dir)


def _build(inputs: Sequence[Path | str], tokenizer: Path, options: PreferenceOptions) -> Build:
    half = max(1, (options.max_length or 0) // 2)
    encoder = PairEncoder(options.max_length, options.max_prompt_length or half, options.keys)
    sources = [f"{PREFERENCE_MARK} template={options.template}", *map(str, inputs)]
    return Build(expand(list(inputs)), tokenizer, options.template, encoder, options.drop_bad, options.workers, sources)
