"""What was sampled and what it earned: the file that training and resuming read.

    RUN/rollouts.jsonl     CRC32 JSON      one line per record, in the order of batches
        {"kind": "answers", "batch": 3, ...}    all answers of a batch of prompts, in one line
        {"kind": "rewards", "batch": 3, ...}    what they earned

Lines are only appended, and each is on disk before training uses it. A kill may cut the last line
short: it is removed when the file is opened. A run that resumes from an earlier checkpoint finds
the answers and rewards of later batches here: nothing is sampled twice, no reward is asked twice.
Only a rollback, which changes what follows, removes lines from the end.
"""

from __future__ import annotations

import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from headway.errors import DataError

log = logging.getLogger("headway")

FILE = "rollouts.jsonl"
ANSWERS = "answers"
REWARDS = "rewards"


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of the model."""

    prompt: int
    """The number of its prompt, over all sources."""
    sample: int
    """Its number among the answers of the prompt."""
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of every id, in the distribution that it was drawn from."""
    finished: str
    """Why it ended: eos, stop, length, context."""
    text: str

    @property
    def is_cut(self) -> bool:
        """Whether it was ended by a limit, not by the model."""
        return self.finished in ("length", "context")


@dataclass(frozen=True)
class SampledBatch:
    """All answers of a batch of prompts."""

    batch: int
    step: int
    """Updates before it was sampled: the version of the weights."""
    digest: str
    """Of what decides the answers beside the weights: prompts, settings, tokenizer, seed."""
    prompts: tuple[str, ...]
    """Digests of the prompts, in the order of the batch."""
    answers: tuple[SampledAnswer, ...]
    seconds: float = 0.0


@dataclass(frozen=True)
class RewardedBatch:
    """What the answers of a batch earned, in their order."""

    batch: int
    digest: str
    """Of the rewards."""
    totals: tuple[float, ...]
    parts: tuple[Mapping[str, float], ...]
    problems: tuple[tuple[str, ...], ...] = ()
    seconds: float = 0.0


@dataclass
class _Known:
    """Where the lines of a batch are."""

    answers: tuple[int, int] | None = None
    """Offset and length of a line."""
    rewards: tuple[int, int] | None = None
    first: int = 0
    """Offset of the first of them."""


@dataclass
class Journal:
    """The journal of a run, open for reading and appending; the first rank alone has one."""

    path: Path
    _known: dict[int, _Known] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> Journal:
        """The journal of a run folder. What a kill has left of a line is removed."""
        journal = cls(folder / FILE)
        if not journal.path.exists():
            return journal
        end = 0
        for offset, length, record in _lines(journal.path):
            journal._remember(record, offset, length)
            end = offset + length
        size = journal.path.stat().st_size
        if end < size:
            log.warning(
                "%s: its last %d bytes are no whole line, as after a kill; they are removed",
                journal.path,
                size - end,
            )
            os.truncate(journal.path, end)
        return journal

    def answers(self, batch: int) -> SampledBatch | None:
        """The answers of a batch; None if it was not sampled yet."""
        known = self._known.get(batch)
        if known is None or known.answers is None:
            return None
        return _sampled(self._read(known.answers))

    def rewards(self, batch: int) -> RewardedBatch | None:
        """The rewards of a batch; None if it has none yet."""
        known = self._known.get(batch)
        if known is None or known.rewards is None:
            return None
        return _rewarded(self._read(known.rewards))

    def add_answers(self, sampled: SampledBatch) -> None:
        """Append the answers of a batch."""
        self._append({"kind": ANSWERS, **asdict(sampled)})

    def add_rewards(self, rewarded: RewardedBatch) -> None:
        """Append the rewards of a batch."""
        self._append({"kind": REWARDS, **asdict(rewarded)})

    def forget_from(self, batch: int) -> None:
        """Remove a batch and all later ones: other weights will answer them."""
        removed = [known.first for number, known in self._known.items() if number >= batch]
        if not removed:
            return
        os.truncate(self.path, min(removed))
        self._known = {number: known for number, known in self._known.items() if number < batch}

    def _append(self, record: dict[str, Any]) -> None:
        line = _line(record)
        with self.path.open("ab") as file:
            offset = file.tell()
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._remember(record, offset, len(line))

    def _remember(self, record: Mapping[str, Any], offset: int, length: int) -> None:
        # A batch that is sampled again has a later line, which counts.
        known = self._known.setdefault(int(record["batch"]), _Known(first=offset))
        if record["kind"] == ANSWERS:
            known.answers = (offset, length)
            known.rewards = None
        else:
            known.rewards = (offset, length)

    def _read(self, span: tuple[int, int]) -> dict[str, Any]:
        offset, length = span
        with self.path.open("rb") as file:
            file.seek(offset)
            record = _parsed(file.read(length))
        if record is None:
            raise DataError(
                f"{self.path}: the line at byte {offset} was changed while the run was open. "
                "Restore the file, or remove it: answers are then sampled anew."
            )
        return record


def read_journal(folder: Path) -> Iterator[tuple[SampledBatch, RewardedBatch | None]]:
    """The batches of a run folder, in order; nothing where it has no journal."""
    path = folder / FILE
    if not path.exists():
        return
    journal = Journal(path)
    for offset, length, record in _lines(path):
        journal._remember(record, offset, length)
    for batch in sorted(journal._known):
        sampled = journal.answers(batch)
        if sampled is not None:
            yield sampled, journal.rewards(batch)


def _line(record: Mapping[str, Any]) -> bytes:
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    return b"%08x " % zlib.crc32(data) + data + b"\n"


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None where it is damaged or cut short."""
    if not line.endswith(b"\n") or len(line) < 10:
        return None
    data = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(data):
        return None
    record = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(record, dict):
        return None
    return record


def _lines(path: Path) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Offset, length and record of every whole line, up to the first that is damaged."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            record = _parsed(line)
            if record is None:
                return
            yield offset, len(line), record
            offset += len(line)


def _sampled(record: Mapping[str, Any]) -> SampledBatch:
    answers = [
        SampledAnswer(
            prompt=entry["prompt"],
            sample=entry["sample"],
            ids=tuple(entry["ids"]),
            logprobs=tuple(entry["logprobs"]),
            finished=entry["finished"],
            text=entry["text"],
        )
        for entry in record["answers"]
    ]
    return SampledBatch(
        batch=record["batch"],
        step=record["step"],
        digest=record["digest"],
        prompts=tuple(record["prompts"]),
        answers=tuple(answers),
        seconds=record["seconds"],
    )


def _rewarded(record: Mapping[str, Any]) -> RewardedBatch:
    problems: Sequence[Sequence[str]] = record["problems"]
    return RewardedBatch(
        batch=record["batch"],
        digest=record["digest"],
        totals=tuple(record["totals"]),
        parts=tuple(record["parts"]),
        problems=tuple(tuple(texts) for texts in problems),
        seconds=record["seconds"],
    )
