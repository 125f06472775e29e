"""What a run with rollouts has sampled, for the page: a run folder comes in; distributions for each
batch of prompts, and pages of answers beside what they earned, go out.

The journal is followed: each look reads the lines that were added, in bounded pieces. Of a batch a
few numbers are kept in memory, and where its lines are; answers are read again when somebody looks
at them. A journal may come from anybody, so nothing in it is taken for granted: a line of another
shape is left out and counted.
"""

from __future__ import annotations

import math
import threading
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from headway.board.details import MAX_TEXT, is_inside
from headway.board.follow import read_at
from headway.board.runs import read_recipe_file
from headway.config.regular_file import regular_only
from headway.rollout.journal import ANSWERS, FILE, REWARDS, read_line

RolloutOrder = Literal["sampled", "best", "worst", "best_of_run", "worst_of_run"]
ORDERS: tuple[RolloutOrder, ...] = ("sampled", "best", "worst", "best_of_run", "worst_of_run")
LOOK_BYTES = 64 << 20
"""Read in one look; the next one continues. Also the longest line that is read."""
MARK_BYTES = 9
"""Of a line: its checksum, which says whether it is still the same."""
MAX_BATCHES = 2000
"""Points of a distribution; of longer runs every n-th batch is shown, and the newest."""
PAGE_ANSWERS = 20
MAX_KEPT = 200
"""Best and worst answers of a run that are known without reading all of it."""
MAX_PARTS = 32
BINS = 20
"""Of a histogram."""
NOT_A_RECORD = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What a line of another shape raises while it is read."""

Ranked = tuple[float, int, int, int]
"""Reward, first step, batch, and index of an answer in its batch."""


@dataclass
class _Batch:
    """What is known of a batch without its texts."""

    first_step: int
    version: int
    num_prompts: int
    num_answers: int
    seconds: float
    answers_at: tuple[int, int]
    """Offset and length of the line of answers."""
    tokens: dict[str, float]
    cut: float
    rewards_at: tuple[int, int] | None = None
    reward: dict[str, float] | None = None
    no_signal: float | None = None
    failed: int = 0


@dataclass
class RolloutFollower:
    """The journal of one run, followed. Several threads may ask."""

    folder: Path
    _batches: dict[int, _Batch] = field(default_factory=dict)
    _best: list[Ranked] = field(default_factory=list[Ranked])
    """Ascending."""
    _worst: list[Ranked] = field(default_factory=list[Ranked])
    """Descending, by the negative reward."""
    _end: int = 0
    """Of the last whole line that was read."""
    _last: tuple[int, bytes] | None = None
    """Offset and checksum of that line."""
    _num_bad: int = 0
    _is_partial: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def path(self) -> Path:
        """The journal."""
        return self.folder / FILE

    def view(self, order: RolloutOrder, batch: int | None, first: int) -> dict[str, Any] | None:
        """Distributions of all batches, and answers from the `first` on; None where the run has
        no journal. `batch` None: the newest."""
        with self._lock:
            if not is_inside(self.path, self.folder):
                return None
            try:
                self._update()
                return {"figures": self._figures(), "page": self._page(order, batch, first)}
            except OSError:
                return None

    # ---- following

    def _update(self) -> None:
        """Read what was added since the last look."""
        if not self._is_same():
            self._batches.clear()
            self._best.clear()
            self._worst.clear()
            self._end = 0
            self._last = None
            self._num_bad = 0
        limit = self._end + LOOK_BYTES
        with open(self.path, "rb", opener=regular_only) as file:
            file.seek(self._end)
            while self._end < limit:
                line = file.readline(LOOK_BYTES)
                if not line:
                    break
                if not line.endswith(b"\n"):
                    if len(line) < LOOK_BYTES:
                        break  # it is being written
                    self._num_bad += 1
                    while line and not line.endswith(b"\n"):
                        self._end += len(line)
                        line = file.readline(LOOK_BYTES)
                    self._end += len(line)
                    continue
                self._take(line, self._end)
                self._last = (self._end, line[:MARK_BYTES])
                self._end += len(line)
        self._is_partial = self._end >= limit

    def _is_same(self) -> bool:
        """Whether the journal still has what was read: runs that resume remove lines."""
        if self._last is None:
            return True
        offset, mark = self._last
        return self.path.stat().st_size >= self._end and read_at(self.path, offset, 9) == mark

    def _take(self, line: bytes, offset: int) -> None:
        """Keep what is shown of a line."""
        try:
            record = read_line(line)
            if record is None:
                self._num_bad += 1
                return
            number = int(record["batch"])
            if record["kind"] == ANSWERS:
                self._forget(number)
                self._batches[number] = _batch_of(record, (offset, len(line)))
            elif record["kind"] == REWARDS and number in self._batches:
                self._forget(number)
                self._reward(number, record, (offset, len(line)))
        except NOT_A_RECORD:
            self._num_bad += 1

    def _reward(self, number: int, record: Mapping[str, Any], span: tuple[int, int]) -> None:
        batch = self._batches[number]
        totals = [float(total) for total in record["totals"]]
        if len(totals) != batch.num_answers:
            raise ValueError("rewards of other answers")
        samples = batch.num_answers // max(1, batch.num_prompts)
        groups = [totals[first : first + samples] for first in range(0, len(totals), samples)]
        batch.reward = _spread(totals)
        batch.no_signal = sum(max(group) == min(group) for group in groups) / len(groups)
        batch.failed = sum(1 for texts in record.get("problems", ()) if texts)
        batch.rewards_at = span
        for index, total in enumerate(totals):
            if math.isfinite(total):
                insort(self._best, (total, batch.first_step, number, index))
                insort(self._worst, (-total, batch.first_step, number, index))
        del self._best[:-MAX_KEPT]
        del self._worst[:-MAX_KEPT]

    def _forget(self, number: int) -> None:
        """Rewards of a batch that has others now."""
        if number in self._batches and self._batches[number].reward is not None:
            self._best = [ranked for ranked in self._best if ranked[2] != number]
            self._worst = [ranked for ranked in self._worst if ranked[2] != number]

    # ---- what goes out

    def _figures(self) -> dict[str, Any]:
        """Columns with a number for each batch, in order."""
        numbers = sorted(self._batches)
        stride = -(-len(numbers) // MAX_BATCHES) or 1
        # The newest is always there.
        numbers = numbers[::-1][::stride][::-1]
        batches = [self._batches[number] for number in numbers]
        return {
            "batch": numbers,
            "step": [batch.first_step for batch in batches],
            "version": [batch.version for batch in batches],
            "answers": [batch.num_answers for batch in batches],
            "seconds": [batch.seconds for batch in batches],
            "tokens": [batch.tokens for batch in batches],
            "cut": [batch.cut for batch in batches],
            "reward": [batch.reward for batch in batches],
            "no_signal": [batch.no_signal for batch in batches],
            "failed": [batch.failed for batch in batches],
            "updates": _updates_of(self.folder),
            "bad_lines": self._num_bad,
            "partial": self._is_partial,
        }

    def _page(self, order: RolloutOrder, number: int | None, first: int) -> dict[str, Any]:
        """Answers in an order, from the `first` on, at most PAGE_ANSWERS."""
        page: dict[str, Any] = {"order": order, "first": first, "total": 0, "answers": []}
        if order in ("best_of_run", "worst_of_run"):
            ranked = self._best if order == "best_of_run" else self._worst
            page["total"] = len(ranked)
            chosen = ranked[::-1][first : first + PAGE_ANSWERS]
            for _, _, batch, index in chosen:
                page["answers"] += self._answers(batch, [index])
            return page

        if number is None or number not in self._batches:
            number = max(self._batches, default=None)
        if number is None:
            return page
        batch = self._batches[number]
        order_of = list(range(batch.num_answers))
        totals = self._rewards_of(batch).get("totals")
        if totals is not None:
            page["rewards"] = _histogram([float(total) for total in totals])
            if order != "sampled":
                sign = -1 if order == "best" else 1
                order_of.sort(key=lambda index: (sign * float(totals[index]), index))
        page |= {"batch": number, "total": batch.num_answers}
        page["answers"] = self._answers(number, order_of[first : first + PAGE_ANSWERS])
        return page

    def _answers(self, number: int, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Some answers of a batch, as the page shows them."""
        batch = self._batches[number]
        record = self._record(batch.answers_at)
        rewards = self._rewards_of(batch)
        samples = batch.num_answers // max(1, batch.num_prompts)
        shown: list[dict[str, Any]] = []
        for index in indices:
            try:
                entry = record["answers"][index]
                questions = record.get("questions") or ()
                answer = {
                    "batch": number,
                    "step": batch.first_step,
                    "version": batch.version,
                    "prompt": int(entry["prompt"]),
                    "sample": int(entry["sample"]),
                    "question": str(questions[index // samples])[:MAX_TEXT] if questions else "",
                    "text": str(entry["text"])[:MAX_TEXT],
                    "finished": str(entry["finished"])[:40],
                    "tokens": _num_ids(entry),
                    "reward": None,
                    "parts": {},
                    "problems": [],
                }
                if rewards:
                    answer["reward"] = float(rewards["totals"][index])
                    parts = list(rewards["parts"][index].items())[:MAX_PARTS]
                    answer["parts"] = {str(name)[:80]: float(value) for name, value in parts}
                    problems = rewards.get("problems") or [()] * (index + 1)
                    answer["problems"] = [str(text)[:400] for text in problems[index]]
            except NOT_A_RECORD:
                continue
            shown.append(answer)
        return shown

    def _rewards_of(self, batch: _Batch) -> Mapping[str, Any]:
        """The line of rewards of a batch; empty where there is none yet."""
        if batch.rewards_at is None:
            return {}
        return self._record(batch.rewards_at)

    def _record(self, span: tuple[int, int]) -> Mapping[str, Any]:
        offset, length = span
        return read_line(read_at(self.path, offset, length)) or {}


def _batch_of(record: Mapping[str, Any], span: tuple[int, int]) -> _Batch:
    answers = record["answers"]
    version = int(record["version"])
    start = record.get("start")
    if start is None:
        start = version
    is_cut = [entry["finished"] in ("length", "context") for entry in answers]
    return _Batch(
        first_step=int(start) + 1,
        version=version,
        num_prompts=len(record["prompts"]),
        num_answers=len(answers),
        seconds=float(record["seconds"]),
        answers_at=span,
        tokens=_spread([_num_ids(entry) for entry in answers]),
        cut=sum(is_cut) / max(1, len(is_cut)),
    )


def _num_ids(entry: Mapping[str, Any]) -> int:
    """How many ids an answer has, from the length of their base64: 4 letters for 3 bytes."""
    text = entry["ids"]
    return (len(text) * 3 // 4 - text[-2:].count("=")) // 4


def _spread(values: Sequence[float]) -> dict[str, float]:
    """Where values lie; NaN and infinite ones are left out."""
    finite = np.array([value for value in values if math.isfinite(value)], np.float64)
    if not len(finite):
        finite = np.zeros(1)
    low, tenth, median, ninetieth, high = np.quantile(finite, [0, 0.1, 0.5, 0.9, 1]).tolist()
    return {
        "low": low,
        "p10": tenth,
        "median": median,
        "mean": float(finite.mean()),
        "p90": ninetieth,
        "high": high,
    }


def _histogram(values: Sequence[float]) -> dict[str, Any]:
    """Counts between the lowest and the highest value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return {"low": 0.0, "high": 0.0, "counts": []}
    counts, edges = np.histogram(finite, bins=BINS)
    return {"low": float(edges[0]), "high": float(edges[-1]), "counts": counts.tolist()}


def _updates_of(folder: Path) -> int:
    """Updates on the answers of a rollout; 1 where the recipe does not say so."""
    rollout = read_recipe_file(folder).get("rollout")
    if not isinstance(rollout, dict):
        return 1
    updates = 1
    for name in ("updates", "passes"):
        value = rollout.get(name, 1)
        if isinstance(value, int) and value > 0:
            updates *= value
    return updates
