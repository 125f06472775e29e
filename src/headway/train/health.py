"""The health of a run: losses that are not finite or that spike, and what the run does about them
(`heal`).

`LossMonitor` judges each loss on the device, without waiting for it, by a rule that is the same on
every rank and rerun. `Healer` reads the records that arrive later and chooses: alert, skip, or roll
back to the newest checkpoint before the bad step and skip its batch.

    The checkpoint of step 100 is loaded again. Batch 101, that of step 102, is never trained on:

    step   100   101   102 (bad)
    batch   99   100   101      ──▶   step 101: batch 100    step 102: batch 102    ...

RUN/heal.json lists the batches that are left out, so that every later start leaves them out too: a
run that heals resumes exactly.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from headway.checkpoint.load import newest_good
from headway.checkpoint.retention import set_aside_later
from headway.config.regular_file import regular_only
from headway.data.config import skipped_batches
from headway.data.loader import LoaderState
from headway.errors import HeadwayError
from headway.runtime.device import to_float64
from headway.runtime.storage import write_atomic
from headway.track.events import read_events
from headway.train.config import HealConfig, Recipe
from headway.train.run_folder import clear_save_record, write_save_record

if TYPE_CHECKING:
    from headway.train.run import Run

log = logging.getLogger("headway")

FILE = "heal.json"
RECENT_STEPS = 8
"""Steps whose cursors are remembered: more than the steps by which a record may be late."""
MAX_BYTES = 64 << 20
"""Of heal.json that are read."""
MIN_DEVIATION = 0.01
"""Least standard deviation of losses, as a share of their mean."""
SPIKE = 1
NOT_FINITE = 2
ANOMALIES = {SPIKE: "spike", NOT_FINITE: "nan"}
"""Verdicts on the device, and their names in records."""
Anomaly = Literal["nan", "spike"]


class LossMonitor:
    """The last good losses, on the device; part of a checkpoint.

    A loss is *not finite*, or a *spike*: above the mean of the last `window` good losses by more
    than `sigma` standard deviations. A deviation counts as at least 1 % of the mean, so that a flat
    curve has no spikes. Nothing is judged before the window is full.
    """

    def __init__(self, config: HealConfig, device: torch.device) -> None:
        self.config = config
        # Apple's GPUs have no float64.
        if device.type == "mps":
            device = torch.device("cpu")
        self.losses = torch.zeros(config.window, dtype=torch.float64, device=device)
        """A ring: the good loss number n is at n modulo window."""
        self.count = torch.zeros((), dtype=torch.int64, device=device)
        """Good losses so far."""

    def judge(self, loss: Tensor) -> Tensor:
        """The verdict on a loss: 0, SPIKE or NOT_FINITE.

        A good loss enters the window; a spike does too where heal.on_spike is alert.

        A spike: loss > mean + sigma * max(std, MIN_DEVIATION * |mean|), over the full window.
        All of it stays on the device: no branch below depends on a value.
        """
        config = self.config
        loss = to_float64(loss.detach())
        is_bad = loss.isfinite().logical_not()
        is_spike = torch.zeros_like(is_bad)
        if config.sigma is not None:
            mean = self.losses.mean()
            deviation = self.losses.std(correction=0).maximum(MIN_DEVIATION * mean.abs())
            is_spike = (self.count >= config.window) & (loss > mean + config.sigma * deviation)

        # A spike that is trained on belongs to the window: otherwise a loss that rises for good,
        # as with other data, would be a spike forever.
        if config.on_spike == "alert":
            enters = ~is_bad
        else:
            enters = ~(is_bad | is_spike)
        index = (self.count % config.window).reshape(1)
        present = self.losses.gather(0, index).squeeze(0)
        self.losses.scatter_(0, index, torch.where(enters, loss, present).reshape(1))
        self.count += enters
        return torch.where(is_bad, NOT_FINITE, is_spike.to(torch.int64) * SPIKE)

    def skips(self, verdict: Tensor) -> Tensor | None:
        """1 where the update must change nothing.

        A step that is not finite changes nothing in any case.
        """
        if self.config.on_spike == "skip":
            return (verdict == SPIKE).float()
        return None

    def scalars(self) -> dict[str, Any]:
        """Numbers for a checkpoint: the window and how many losses were seen."""
        return {"count": int(self.count), "losses": self.losses.tolist()}

    def load(self, scalars: dict[str, Any] | None) -> None:
        """Take back what `scalars` gave; a window of another length starts empty."""
        if scalars is None or len(scalars["losses"]) != self.config.window:
            self.losses.zero_()
            self.count.zero_()
            return
        self.losses.copy_(torch.tensor(scalars["losses"], dtype=torch.float64))
        self.count.fill_(scalars["count"])


@dataclass(frozen=True)
class BadStep:
    """A step to roll back, and why."""

    step: int
    kind: Anomaly
    description: str

    @property
    def reason(self) -> str:
        """As heal.json stores it."""
        return f"{self.kind}: {self.description}"


class Healer:
    """Sees every record of this rank and decides.

    Records are the same on all ranks, but may arrive a step earlier on one.
    """

    def __init__(self, config: HealConfig, *, scales_loss: bool) -> None:
        self.config = config
        self.scales_loss = scales_loss
        self.bad: BadStep | None = None
        """The first step to roll back."""
        self.gave_up: str | None = None
        """Why the run should end."""
        self.healed: list[dict[str, Any]] | None = None
        """The entries of heal.json once they were needed: on a full disk the file itself may be
        late.
        """
        self._skipped_in_a_row = 0
        self._cursors: deque[tuple[int, LoaderState, LoaderState]] = deque(
            maxlen=RECENT_STEPS + config.skip_before
        )
        """Of recent steps: the step, and the cursors before and after its batch."""

    def remember(self, step: int, before: LoaderState, after: LoaderState) -> None:
        """Remember which batch a step trains on."""
        self._cursors.append((step, before, after))

    def batch_of(self, step: int) -> int:
        """The number of the batch a recent step trained on."""
        # A cursor names the batch that comes next.
        return next(after.batch for number, _, after in self._cursors if number == step) - 1

    def step_of(self, batch: int, bad_step: int) -> int:
        """The first recent step that trained on this batch or a later one."""
        return min(
            [step for step, _, after in self._cursors if after.batch > batch and step <= bad_step],
            default=bad_step,
        )

    def before(self, batch: int) -> LoaderState:
        """The latest known cursor at or before this batch, or the earliest one known."""
        return next(
            (before for _, before, _ in reversed(self._cursors) if before.batch <= batch),
            self._cursors[0][1],
        )

    def rolled_back(self, step: int) -> None:
        """Forget what came after this step."""
        self.bad = None
        while self._cursors and self._cursors[-1][0] > step:
            self._cursors.pop()

    def check(self, run: Run, record: dict[str, Any]) -> None:
        """Check a step's record; report it, or mark it to be rolled back."""
        kind = self._anomaly(record)
        if kind is None:
            self._skipped_in_a_row = 0
            return

        step = record["step"]
        action = self.config.on_spike
        if kind == "nan":
            action = self.config.on_nan
        description = (
            f"step {step} has loss {record['loss']:.4g} and gradient norm {record['grad_norm']:.4g}"
        )
        if action == "rollback":
            # The first bad step counts; later ones may follow from it.
            self.bad = self.bad or BadStep(step, kind, description)
            return
        if action == "alert":
            run.emit(kind, description)
            return

        # The device has skipped the step already; it is reported, with what it would have read.
        self._skipped_in_a_row += 1
        batch = self.batch_of(step)
        documents = {}
        if run.process.is_first:
            documents = run.loader.documents_of(self.before(batch), batch, batch)
        run.emit(
            kind,
            f"{description}; the step was skipped",
            batches=[batch, batch],
            documents=documents,
        )
        if self._skipped_in_a_row > self.config.limit:
            self.gave_up = (
                f"{self._skipped_in_a_row} steps in a row were skipped "
                f"(heal.limit is {self.config.limit}); the last: {description}"
            )

    def _anomaly(self, record: dict[str, Any]) -> Anomaly | None:
        if record.get("anomaly") is not None:
            return record["anomaly"]
        # With a loss scale an overflow is normal: the scale is searched for that way. Without one,
        # a gradient that is not finite is an anomaly even if the loss is finite.
        if not self.scales_loss and not math.isfinite(record["grad_norm"]):
            return "nan"
        return None


def plan_rollback(run: Run, bad: BadStep, batches: tuple[int, int]) -> dict[str, Any]:
    """Choose the checkpoint to go back to and write the skipped batches to heal.json.

    Runs on the first rank. Every later start reads heal.json. Returns the path of the checkpoint
    and the entry for the event, or why the run gives up.
    """
    last_step = run.healer.step_of(batches[0], bad.step) - 1
    # saved.json names the newest step. It is cleared first: if the run dies in between, the next
    # start must not take checkpoints that were set aside for missing ones.
    saved = clear_save_record(run.start.folder)
    set_aside_later(run.checkpoints, last_step)
    newest = newest_good(run.checkpoints)
    if run.saver.remote is not None:
        run.saver.remote.set_aside_later(last_step)
        if newest.reader is None:
            newest = newest_good(run.saver.remote.location)

    if newest.reader is None or newest.path is None:
        reason = f"{bad.reason}; there is no checkpoint before step {bad.step} to roll back to."
        return {"gave_up": reason}
    if run.healer.healed is None:
        run.healer.healed = read_healed(run.start.folder)
    healed = run.healer.healed
    to_step = newest.reader.step
    limit = run.recipe.heal.limit
    # A checkpoint that leads to bad steps with ever other batches is bad itself.
    if sum(earlier["to_step"] == to_step for earlier in healed) >= limit:
        reason = (
            f"{bad.reason}; the run was rolled back to step {to_step} {limit} times already "
            f"(heal.limit). See {FILE}."
        )
        return {"gave_up": reason}

    documents = run.loader.documents_of(run.healer.before(batches[0]), *batches)
    entry = {
        "batches": list(batches),
        "bad_step": bad.step,
        "to_step": to_step,
        "reason": bad.reason,
        "documents": documents,
    }
    healed.append(entry)
    run.writes.replace(
        run.start.folder / FILE, json.dumps(healed, indent=1, ensure_ascii=False) + "\n"
    )
    write_save_record(run.start.folder, replace(saved, step=to_step))
    return {"checkpoint": str(newest.path), "documents": documents, "healed": entry}


def read_healed(run_dir: Path) -> list[dict[str, Any]]:
    """The rollbacks of a run so far.

    Where heal.json is damaged, those in events.jsonl take their place, with a warning.
    """
    path = run_dir / FILE
    if not path.exists():
        return []
    entries = _entries_in(path)
    if entries is not None:
        return entries

    healed = _entries_in_events(run_dir)
    known = "events.jsonl lists no rollback"
    if healed:
        known = f"events.jsonl lists {len(healed)} rollbacks, whose batches stay skipped"
    log.warning("%s is damaged; %s. If there were more, set data.skip_batches.", path, known)
    return healed


def repair_healed(run_dir: Path) -> None:
    """Rewrite a damaged heal.json from events.jsonl; the damaged file becomes heal.json.damaged.

    For the first rank, at a start.
    """
    path = run_dir / FILE
    if not path.exists() or _entries_in(path) is not None:
        return
    try:
        healed = read_healed(run_dir)
        os.replace(path, path.with_name(FILE + ".damaged"))
        write_atomic(path, json.dumps(healed, indent=1, ensure_ascii=False) + "\n")
    except (OSError, HeadwayError) as problem:
        log.warning("%s cannot be repaired: %s", path, problem)


def _entries_in(path: Path) -> list[dict[str, Any]] | None:
    """The entries of a heal.json; None where it is damaged."""
    try:
        with open(path, "rb", opener=regular_only) as file:
            entries: Any = json.loads(file.read(MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(entries, list) or not all(map(_is_entry, entries)):
        return None
    return entries


def _is_entry(value: Any) -> bool:
    """Whether this is an entry as `plan_rollback` writes it."""
    if not isinstance(value, dict) or type(value.get("to_step")) is not int:
        return False
    batches: Any = value.get("batches")
    return (
        isinstance(batches, list)
        and [type(number) for number in batches] == [int, int]
        and 0 <= batches[0] <= batches[1]
    )


def _entries_in_events(run_dir: Path) -> list[dict[str, Any]]:
    """The entries that the rollback events carry."""
    entries: list[dict[str, Any]] = []
    for event in read_events(run_dir):
        entry: Any = event.get("healed")
        if _is_entry(entry) and entry not in entries:
            entries.append(entry)
    return entries


def with_healed(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe with the batches of all rollbacks skipped."""
    return add_skipped_batches(
        recipe,
        [(rollback["batches"][0], rollback["batches"][1]) for rollback in read_healed(run_dir)],
    )


def add_skipped_batches(recipe: Recipe, ranges: list[tuple[int, int]]) -> Recipe:
    """A recipe that skips these batches in addition to those it skips already."""
    if not ranges:
        return recipe
    # The setting takes ascending ranges that do not overlap.
    joined: list[list[int]] = []
    for first, last in sorted([*skipped_batches(recipe.data.skip_batches), *ranges]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    text = ",".join(f"{first}-{last}" for first, last in joined)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"skip_batches": text})})
