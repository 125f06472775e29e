"""Healing: what a run does about steps whose loss is not finite or jumps. It is told; or the step was skipped; or the run goes back to the
newest checkpoint before it and leaves out exactly its batch.

    step   100   101   102 (bad)            checkpoint of 100 is read again, batch 101 (that of step 102) is never trained on
    batch   99   100   101      ──▶   step 101: batch 100    step 102: batch 102    ...

Which batches are left out stands in RUN/heal.json, so that every later start leaves them out too: a run that heals resumes exactly.
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

from headway.checkpoint.load import newest_good, open_checkpoint
from headway.checkpoint.retention import set_aside_later
from headway.data.config import skipped_batches
from headway.data.loader import LoaderState
from headway.errors import GaveUpError, HeadwayError
from headway.runtime.storage import write_atomic
from headway.track.outside import read_events
from headway.train.config import Recipe
from headway.train.report import report
from headway.train.saved import forget_saved, write_saved
from headway.train.watch import HealConfig

if TYPE_CHECKING:
    from headway.train.build import Run

log = logging.getLogger("headway")

FILE = "heal.json"
KEPT_CURSORS = 8
MOST_BYTES = 64 << 20
Anomaly = Literal["nan", "spike"]


@dataclass(frozen=True)
class BadStep:
    """A step to roll back, and why."""

    step: int
    kind: Anomaly
    description: str

    @property
    def reason(self) -> str:
        """As heal.json keeps it."""
        return f"{self.kind}: {self.description}"


class Healer:
    """Sees every record of this rank and says what is to be done. Records are the same on all ranks, but may come a step earlier on one."""

    def __init__(self, config: HealConfig, *, scales_loss: bool) -> None:
        self.config, self.scales_loss = config, scales_loss
        self.bad: BadStep | None = None
        """The first step to roll back."""
        self.hopeless: str | None = None
        """Why the run should end."""
        self.healed: list[dict[str, Any]] | None = None
        """What heal.json says, once it was needed: the file itself may be late, on a full disk."""
        self._in_a_row = 0
        self._cursors: deque[tuple[int, LoaderState, LoaderState]] = deque(maxlen=KEPT_CURSORS + config.skip_before)

    def remember(self, step: int, before: LoaderState, after: LoaderState) -> None:
        """Which batch a step trains on."""
        self._cursors.append((step, before, after))

    def batch_of(self, step: int) -> int:
        """The number of the batch a recent step trained on."""
        return next(after.batch for number, _, after in self._cursors if number == step) - 1

    def step_of(self, batch: int, bad_step: int) -> int:
        """The first recent step that trained on this batch or a later one."""
        return min([step for step, _, after in self._cursors if after.batch > batch and step <= bad_step], default=bad_step)

    def before(self, batch: int) -> LoaderState:
        """The latest cursor that still has this batch before it, or the earliest that is known."""
        return next((before for _, before, _ in reversed(self._cursors) if before.batch <= batch), self._cursors[0][1])

    def went_back(self, step: int) -> None:
        """What came after this step never happened."""
        self.bad = None
        while self._cursors and self._cursors[-1][0] > step:
            self._cursors.pop()

    def see(self, run: Run, record: dict[str, Any]) -> None:
        """Look at a step's record."""
        kind = self._kind(record)
        if kind is None:
            self._in_a_row = 0
            return
        step = record["step"]
        action = self.config.on_nan if kind == "nan" else self.config.on_spike
        what = f"the loss of step {step} is {record['loss']:.4g}, the norm of its gradients {record['grad_norm']:.4g}"
        if action == "rollback":
            self.bad = self.bad or BadStep(step, kind, what)
            return
        if action == "alert":
            run.tell(kind, what)
            return
        self._in_a_row += 1
        batch = self.batch_of(step)
        documents = run.loader.documents_of(self.before(batch), batch, batch) if run.process.is_first else {}
        run.tell(kind, f"{what}; the step was skipped", batches=[batch, batch], documents=documents)
        if self._in_a_row > self.config.limit:
            self.hopeless = f"{self._in_a_row} steps in a row were skipped, the last one {step} ({what}); heal.limit is {self.config.limit}"

    def _kind(self, record: dict[str, Any]) -> Anomaly | None:
        if record.get("anomaly") is not None:
            return record["anomaly"]
        # with a loss scale an overflow is business as usual; without one a gradient that is not finite is trouble though the loss is none
        return "nan" if not self.scales_loss and not math.isfinite(record["grad_norm"]) else None


def roll_back(run: Run, bad_step: int) -> None:
    """Go back before a bad step and leave out its batch; all ranks together."""
    from headway.train.build import count_steps, make_loader, make_meter

    report(run, everything=True)
    run.saver.wait()
    healer, config = run.healer, run.recipe.heal
    batch = healer.batch_of(bad_step)
    first = max(0, batch - config.skip_before)
    bad = healer.bad or BadStep(bad_step, "spike", "another rank saw it")
    plan = _decide(run, bad, (first, batch)) if run.process.is_first else {}
    plan = run.ranks.world.gather(plan)[0]
    if "gave_up" in plan:
        raise GaveUpError(plan["gave_up"])
    run.state.restore(open_checkpoint(plan["checkpoint"], verify=plan["checkpoint"].startswith("s3:")))
    run.state.valid = None
    run.recipe = leave_out(run.recipe, [(first, batch)])
    run.loader.close()
    run.loader = make_loader(run.recipe, run.data, run.batch, run.state, run.ranks)
    run.total_steps = count_steps(run.recipe, run.loader, run.batch)
    counts = (run.batch.micro_rows, run.total_steps, tuple(run.data.names))
    run.meter = make_meter(run.recipe, run.model, run.compute, run.state, counts)
    run.saver.saved_step = run.saver.started_step = run.state.step
    run.metrics.cut_to(run.state.step)
    run.heart.beat("step", run.state.step)
    healer.went_back(run.state.step)
    text = f"{bad.reason}; back to step {run.state.step}, without batches {first} to {batch}"
    run.tell(bad.kind, text, batches=[first, batch], documents=plan["documents"], healed=plan["healed"])


def _decide(run: Run, bad: BadStep, batches: tuple[int, int]) -> dict[str, Any]:
    """Where to go back to, written down for every later start; by the first rank."""
    before = run.healer.step_of(batches[0], bad.step) - 1
    saved = forget_saved(run.start.folder)
    set_aside_later(run.checkpoints, before)
    found = newest_good(run.checkpoints)
    if run.saver.remote is not None:
        run.saver.remote.set_aside_later(before)
        found = found if found.reader is not None else newest_good(run.saver.remote.place)
    if found.reader is None or found.path is None:
        return {"gave_up": f"{bad.reason}; there is no checkpoint before step {bad.step} to go back to."}
    healed = run.healer.healed = read_healed(run.start.folder) if run.healer.healed is None else run.healer.healed
    to_step, limit = found.reader.step, run.recipe.heal.limit
    if sum(one["to_step"] == to_step for one in healed) >= limit:
        return {"gave_up": f"{bad.reason}; the run went back to step {to_step} {limit} times already (heal.limit). See {FILE}."}
    documents = run.loader.documents_of(run.healer.before(batches[0]), *batches)
    entry = {"batches": list(batches), "bad_step": bad.step, "to_step": to_step, "reason": bad.reason, "documents": documents}
    healed.append(entry)
    run.writes.replace(run.start.folder / FILE, json.dumps(healed, indent=1, ensure_ascii=False) + "\n")
    write_saved(run.start.folder, replace(saved, step=to_step))
    return {"checkpoint": str(found.path), "documents": documents, "healed": entry}


def read_healed(run_dir: Path) -> list[dict[str, Any]]:
    """What a run was healed of so far. Where heal.json is damaged, what events.jsonl knows takes its place, with a warning."""
    path = run_dir / FILE
    if not path.exists():
        return []
    if (whole := _entries_in(path)) is not None:
        return whole
    healed = _healed_by_events(run_dir)
    known = f"events.jsonl names {len(healed)} rollbacks, whose batches stay left out" if healed else "events.jsonl names no rollback"
    log.warning("%s is damaged; %s. If there were more, set data.skip_batches.", path, known)
    return healed


def repair_healed(run_dir: Path) -> None:
    """Write a damaged heal.json anew from what is known; the damaged one is kept as heal.json.damaged. For the first rank, at a start."""
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
    """What a heal.json says; None where it is damaged."""
    try:
        with path.open("rb") as file:
            found: Any = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(map(_is_entry, found)) else None


def _is_entry(one: Any) -> bool:
    """Whether this is what `_decide` writes."""
    if not isinstance(one, dict) or type(one.get("to_step")) is not int:
        return False
    batches: Any = one.get("batches")
    return isinstance(batches, list) and [type(number) for number in batches] == [int, int] and 0 <= batches[0] <= batches[1]


def _healed_by_events(run_dir: Path) -> list[dict[str, Any]]:
    """The same entries, as the events of going back have them."""
    found: list[dict[str, Any]] = []
    for event in read_events(run_dir):
        entry: Any = event.get("healed")
        if _is_entry(entry) and entry not in found:
            found.append(entry)
    return found


def with_healed(recipe: Recipe, run_dir: Path) -> Recipe:
    """The recipe without the batches that a run was healed of."""
    return leave_out(recipe, [(one["batches"][0], one["batches"][1]) for one in read_healed(run_dir)])


def leave_out(recipe: Recipe, ranges: list[tuple[int, int]]) -> Recipe:
    """A recipe that skips these batches beside those it skips already."""
    if not ranges:
        return recipe
    joined: list[list[int]] = []
    for first, last in sorted([*skipped_batches(recipe.data.skip_batches), *ranges]):
        if joined and first <= joined[-1][1] + 1:
            joined[-1][1] = max(joined[-1][1], last)
        else:
            joined.append([first, last])
    text = ",".join(f"{first}-{last}" for first, last in joined)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"skip_batches": text})})
