"""What was sampled and what it earned: the file that training and resuming read.

    RUN/rollouts.jsonl     CRC32 JSON      one line per record
        {"kind": "answers", "batch": 3, ...}    all answers to a batch of prompts
        {"kind": "rewards", "batch": 3, ...}    what they earned
        {"kind": "scores", "batch": 3, ...}     the trainer's log-probabilities of their tokens

Lines are only appended, and each is on the disk before training uses it. A kill may cut the last
line short: it is removed when the file is opened. A line that was damaged later ends what is known:
it and the lines after it move to rollouts.damaged. A run that resumes from an earlier checkpoint
finds the records of later batches here: nothing is sampled twice, no reward is asked twice. Only a
batch that other weights or settings answer removes lines, from the end.

Arrays are base64 of little-endian numbers: ids int32, log-probabilities float32, the loss mask a bit
per id (numpy.packbits). Kept ids are ascending for each token, so their differences are small
numbers: these are compressed with zlib. What the first journals did not have is read as absent.
"""

from __future__ import annotations

import base64
import json
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headway.config.regular_file import regular_only
from headway.errors import DataError
from headway.rollout.config import JOURNAL as FILE

log = logging.getLogger("headway")

DAMAGED_FILE = "rollouts.damaged"
"""Lines that were taken out of the journal, because they or one before them were damaged."""
ANSWERS = "answers"
REWARDS = "rewards"
SCORES = "scores"

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]
Routes = np.ndarray[Any, np.dtype[np.int16]]
"""Numbers of experts [tokens, layers with a mixture, experts of a token]."""
Flags = np.ndarray[Any, np.dtype[np.bool_]]


@dataclass(frozen=True)
class KeptIds:
    """What the tokens of an answer were drawn from, where top-k, top-p or min-p cut the
    distribution. The sampler's own choice: other logits, a rounding away, may keep others."""

    counts: Ints
    """Of every token: how many ids were kept."""
    ids: Ints
    """The kept ids of all tokens, one after the other; ascending for each token."""

    def of_tokens(self) -> list[Ints]:
        """The kept ids of every token."""
        # The last sum is the number of all ids; a split there would add an empty part.
        return np.split(self.ids, np.cumsum(self.counts)[:-1])


@dataclass(frozen=True)
class SampledAnswer:
    """One answer of the model."""

    prompt: int
    """The number of its prompt, over all sources."""
    sample: int
    """Its number among the answers to the prompt."""
    ids: tuple[int, ...]
    logprobs: Floats
    """Of every id, in the distribution that it was drawn from."""
    finished: str
    """Why it ended: eos, stop, length, context."""
    text: str
    kept: KeptIds | None = None
    """None: every token was drawn from the whole vocabulary."""
    mask: Flags | None = None
    """Of every id: whether the policy drew it, so that it may carry a loss. None: it drew all."""
    routes: Routes | None = None
    """The experts of the prompt's tokens and of the answer's but the last, in a mixture; None where
    they are not replayed."""

    @property
    def is_cut(self) -> bool:
        """Whether a limit ended it, not the model."""
        return self.finished in ("length", "context")


@dataclass(frozen=True)
class SampledBatch:
    """All answers to a batch of prompts."""

    batch: int
    version: int
    """Updates before it was sampled: the weights that drew every token."""
    digest: str
    """Of what decides the answers beside the weights: prompts, settings, tokenizer, seed."""
    prompts: tuple[str, ...]
    """Digests of the prompts, in the order of the batch."""
    answers: tuple[SampledAnswer, ...]
    seconds: float = 0.0
    questions: tuple[str, ...] = ()
    """The last turn of each prompt, for people who read the journal; in the order of the batch."""
    training: str = ""
    """Digest of the settings that the weights were trained with."""
    start: int | None = None
    """Updates before the first one on these answers; None: as many as `version`."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer that made the ids of the prompts."""
    templates: tuple[str, ...] = ()
    """Digests of the chat templates of the prompts, in the order of the batch."""
    seed: int | None = None
    """With the key of an answer and the position of a token, it decides every draw."""

    @property
    def first_step(self) -> int:
        """The number of the first update on these answers."""
        if self.start is None:
            return self.version + 1
        return self.start + 1


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


@dataclass(frozen=True)
class ScoredBatch:
    """The trainer's view of the answers of a batch, in their order, before the first update."""

    batch: int
    version: int
    old: tuple[Floats, ...] = ()
    """Log-probabilities of the ids of each answer; empty where one update needs none."""
    divergence: tuple[float, ...] = ()
    """The KL divergence from the reference summed over each answer; empty without one in the
    reward."""


@dataclass
class _Known:
    """Offset and length of the lines of a batch, by kind; a later line replaces earlier ones."""

    first: int
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class RolloutJournal:
    """The journal of a run, open for reading and appending; the first rank alone has one."""

    path: Path
    _known: dict[int, _Known] = field(default_factory=dict)

    @classmethod
    def open(cls, folder: Path) -> RolloutJournal:
        """The journal of a run folder. What a kill has left of a line is removed."""
        journal = cls(folder / FILE)
        if not journal.path.exists():
            return journal
        # Before the first line is appended: one behind half a line would be damaged, too.
        end = journal._scan()
        if end < journal.path.stat().st_size:
            journal._end_at(end)
        return journal

    def answers(self, batch: int) -> SampledBatch | None:
        """The answers of a batch; None if it was not sampled yet."""
        record = self._find(batch, ANSWERS)
        return None if record is None else _sampled(record)

    def rewards(self, batch: int) -> RewardedBatch | None:
        """The rewards of a batch; None if it has none yet."""
        record = self._find(batch, REWARDS)
        return None if record is None else _rewarded(record)

    def scores(self, batch: int) -> ScoredBatch | None:
        """The trainer's scores of a batch; None if there are none yet."""
        record = self._find(batch, SCORES)
        return None if record is None else _scored(record)

    def add(self, record: SampledBatch | RewardedBatch | ScoredBatch) -> None:
        """Append a record; it is on the disk when this returns."""
        self._append(_plain(record))

    def forget_from(self, batch: int) -> None:
        """Remove a batch and all later ones: other weights will answer them."""
        removed = [known.first for number, known in self._known.items() if number >= batch]
        if not removed:
            return
        # Cut at the end, never rewritten: whatever moment a kill hits, whole lines are left.
        os.truncate(self.path, min(removed))
        # Rewards of an earlier batch may have been asked again since then: those before count.
        self._scan()

    def _scan(self) -> int:
        """Read where all records are, up to the first line that is damaged; returns where the last
        whole line before it ends."""
        self._known = {}
        end = 0
        for offset, length, record in journal_lines(self.path):
            if record is None:
                # It may have been new answers, and the rewards behind it theirs: to read on could
                # give these rewards to the earlier answers of that batch.
                break
            self._remember(record, offset, length)
            end = offset + length
        return end

    def _end_at(self, end: int) -> None:
        """Remove what follows the last whole line; whole lines behind a damaged one are kept
        aside, because no other file has them."""
        rest = [
            (offset, record is not None)
            for offset, _, record in journal_lines(self.path)
            if offset >= end
        ]
        num_whole = sum(1 for _, is_whole in rest if is_whole)
        if not num_whole:
            log.warning(
                "%s: its last %d bytes are no whole line, as after a kill; they are removed",
                self.path,
                self.path.stat().st_size - end,
            )
            os.truncate(self.path, end)
            return
        with open(self.path, "rb", opener=regular_only) as file:
            number = file.read(end).count(b"\n") + 1
            lines = file.read()
        # On the disk there before they leave the journal: a kill in between keeps them in both.
        with open(self.path.parent / DAMAGED_FILE, "ab", opener=regular_only) as aside:
            aside.write(lines)
            os.fsync(aside.fileno())
        os.truncate(self.path, end)
        log.warning(
            "%s: line %d is damaged; it and what follows (%d whole lines) are moved to %s. "
            "The run continues from line %d: missing answers are sampled again",
            self.path,
            number,
            num_whole,
            DAMAGED_FILE,
            number - 1,
        )

    def _find(self, batch: int, kind: str) -> dict[str, Any] | None:
        known = self._known.get(batch)
        if known is None or kind not in known.spans:
            return None
        return self._read(known.spans[kind])

    def _append(self, record: dict[str, Any]) -> None:
        line = _line(record)
        # Without a buffer: closing one tries again to write what did not fit.
        with open(self.path, "ab", buffering=0, opener=regular_only) as file:
            offset = file.tell()
            try:
                written = 0
                while written < len(line):
                    written += file.write(line[written:])
                os.fsync(file.fileno())
            except OSError:
                # A full disk leaves a part of the line, after which nothing could be read.
                os.truncate(self.path, offset)
                raise
        self._remember(record, offset, len(line))

    def _remember(self, record: Mapping[str, Any], offset: int, length: int) -> None:
        known = self._known.setdefault(int(record["batch"]), _Known(first=offset))
        if record["kind"] == ANSWERS:
            # Rewards and scores of earlier answers do not belong to these.
            known.spans.clear()
        known.spans[record["kind"]] = (offset, length)

    def _read(self, span: tuple[int, int]) -> dict[str, Any]:
        offset, length = span
        with open(self.path, "rb", opener=regular_only) as file:
            file.seek(offset)
            record = read_line(file.read(length))
        if record is None:
            raise DataError(
                f"{self.path}: the line at byte {offset} was changed while the run was open. "
                "Restore the file, or remove it: answers are then sampled anew."
            )
        return record


def read_journal(folder: Path) -> Iterator[tuple[SampledBatch, RewardedBatch | None]]:
    """The batches of a run folder, in order; nothing where it has no journal. Reads only: a damaged
    line is left out, with a warning, and so is a line that is being written."""
    path = folder / FILE
    if not path.exists():
        return
    journal = RolloutJournal(path)
    for number, (offset, length, record) in enumerate(journal_lines(path), 1):
        # People and reports read on behind a gap, where `_scan` stops: nothing is trained on here.
        if record is not None:
            journal._remember(record, offset, length)
        elif not _is_last(path, offset + length):
            log.warning("%s: line %d is damaged and left out", path, number)
    for batch in sorted(journal._known):
        sampled = journal.answers(batch)
        if sampled is not None:
            yield sampled, journal.rewards(batch)


def _line(record: Mapping[str, Any]) -> bytes:
    # A record of a JSON file may hold half of a surrogate pair, which plain UTF-8 refuses.
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    data = text.encode("utf-8", "surrogatepass")
    return b"%08x " % zlib.crc32(data) + data + b"\n"


def read_line(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None where it is damaged or cut short."""
    # Eight hexadecimal digits, a space, JSON and the end of the line.
    if not line.endswith(b"\n") or len(line) < 10:
        return None
    data = line[9:-1]
    if line[:9] != b"%08x " % zlib.crc32(data):
        return None
    record = json.loads(data.decode("utf-8", "surrogatepass"))
    if not isinstance(record, dict):
        return None
    return record


def journal_lines(path: Path, offset: int = 0) -> Iterator[tuple[int, int, dict[str, Any] | None]]:
    """Offset, length and record of every line from an offset on; None for one that is damaged or
    cut short."""
    with open(path, "rb", opener=regular_only) as file:
        file.seek(offset)
        for line in file:
            yield offset, len(line), read_line(line)
            offset += len(line)


def _is_last(path: Path, end: int) -> bool:
    """Whether nothing follows a line: it may be on its way to the disk."""
    return end >= path.stat().st_size


def _packed(values: Sequence[float] | Floats | Ints, dtype: str) -> str:
    return base64.b64encode(np.asarray(values, dtype).tobytes()).decode("ascii")


def _unpacked(text: str, dtype: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype)


def _plain(record: SampledBatch | RewardedBatch | ScoredBatch) -> dict[str, Any]:
    """A record as JSON has it."""
    if isinstance(record, SampledBatch):
        answers = [_plain_answer(answer) for answer in record.answers]
        return {
            "kind": ANSWERS,
            "batch": record.batch,
            "version": record.version,
            "digest": record.digest,
            "training": record.training,
            "start": record.start,
            "seed": record.seed,
            "tokenizer": record.tokenizer,
            "templates": list(record.templates),
            "prompts": list(record.prompts),
            "seconds": record.seconds,
            "questions": list(record.questions),
            "answers": answers,
        }
    if isinstance(record, RewardedBatch):
        return {
            "kind": REWARDS,
            "batch": record.batch,
            "digest": record.digest,
            "totals": list(record.totals),
            "parts": [dict(parts) for parts in record.parts],
            "problems": [list(problems) for problems in record.problems],
            "seconds": record.seconds,
        }
    return {
        "kind": SCORES,
        "batch": record.batch,
        "version": record.version,
        "old": [_packed(values, "<f4") for values in record.old],
        "divergence": list(record.divergence),
    }


def _plain_answer(answer: SampledAnswer) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "prompt": answer.prompt,
        "sample": answer.sample,
        "ids": _packed(answer.ids, "<i4"),
        "logprobs": _packed(answer.logprobs, "<f4"),
        "finished": answer.finished,
        "text": answer.text,
    }
    mask = answer.mask
    if mask is None:
        # Written all the same, so that other readers of the file need no rule for its absence.
        mask = np.ones(len(answer.ids), np.bool_)
    entry["mask"] = base64.b64encode(np.packbits(mask).tobytes()).decode("ascii")
    if answer.kept is not None:
        # Over all tokens at once: only where a token begins is a difference negative.
        differences = np.diff(answer.kept.ids, prepend=np.int32(0)).astype("<i4")
        compressed = zlib.compress(differences.tobytes())
        entry["kept"] = base64.b64encode(compressed).decode("ascii")
        entry["kept_counts"] = _packed(answer.kept.counts, "<i4")
    if answer.routes is not None:
        compressed = zlib.compress(answer.routes.astype("<i2").tobytes())
        entry["routes"] = base64.b64encode(compressed).decode("ascii")
        entry["routes_shape"] = list(answer.routes.shape)
    return entry


def _kept(entry: Mapping[str, Any]) -> KeptIds | None:
    if "kept" not in entry:
        return None
    differences = np.frombuffer(zlib.decompress(base64.b64decode(entry["kept"])), "<i4")
    # Without the dtype numpy sums to 64 bits, twice the memory of what was written.
    ids = np.cumsum(differences, dtype=np.int32)
    return KeptIds(_unpacked(entry["kept_counts"], "<i4"), ids)


def _routes(entry: Mapping[str, Any]) -> Routes | None:
    if "routes" not in entry:
        return None
    numbers = np.frombuffer(zlib.decompress(base64.b64decode(entry["routes"])), "<i2")
    return numbers.reshape(entry["routes_shape"])


def _mask(entry: Mapping[str, Any], num_ids: int) -> Flags | None:
    if "mask" not in entry:
        return None
    bits = np.frombuffer(base64.b64decode(entry["mask"]), np.uint8)
    mask = np.unpackbits(bits, count=num_ids).astype(np.bool_)
    if mask.all():
        # As the answer was before it was written: None means that the policy drew every id.
        return None
    return mask


def _sampled_answer(entry: Mapping[str, Any]) -> SampledAnswer:
    ids = tuple(_unpacked(entry["ids"], "<i4").tolist())
    return SampledAnswer(
        prompt=entry["prompt"],
        sample=entry["sample"],
        ids=ids,
        logprobs=_unpacked(entry["logprobs"], "<f4"),
        finished=entry["finished"],
        text=entry["text"],
        kept=_kept(entry),
        mask=_mask(entry, len(ids)),
        routes=_routes(entry),
    )


def _sampled(record: Mapping[str, Any]) -> SampledBatch:
    answers = [_sampled_answer(entry) for entry in record["answers"]]
    return SampledBatch(
        batch=record["batch"],
        version=record["version"],
        digest=record["digest"],
        prompts=tuple(record["prompts"]),
        answers=tuple(answers),
        seconds=record["seconds"],
        questions=tuple(record.get("questions", ())),
        training=record["training"],
        # The first journals did not have these.
        start=record.get("start"),
        tokenizer=record.get("tokenizer", ""),
        templates=tuple(record.get("templates", ())),
        seed=record.get("seed"),
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


def _scored(record: Mapping[str, Any]) -> ScoredBatch:
    return ScoredBatch(
        batch=record["batch"],
        version=record["version"],
        old=tuple(_unpacked(values, "<f4") for values in record["old"]),
        divergence=tuple(record["divergence"]),
    )
