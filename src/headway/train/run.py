"""A run and its verbs: begin, report, validate, save, roll back. `build` makes it; `loop` drives it; no other module changes its fields."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

from headway.checkpoint.best import is_among_best, metric_value, require_metric
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import step_folder
from headway.checkpoint.saver import SaveJob, Saver
from headway.config.load import dump_yaml
from headway.data.batch import Batch
from headway.data.config import ResolvedBatch
from headway.data.loader import Loader
from headway.data.open import OpenData
from headway.data.target_check import TargetReport
from headway.diagnose.slow_ranks import SlowRankReporter
from headway.errors import GaveUpError
from headway.model.config import ModelConfig
from headway.parallel.collectives import RankGroup, RankGroups
from headway.parallel.engine import Engine
from headway.runtime.deferred import Deferred
from headway.runtime.device import Compute
from headway.runtime.heartbeat import Heartbeat
from headway.runtime.process import Process
from headway.runtime.status_line import StatusLine
from headway.runtime.stop import StopSignal
from headway.runtime.storage import write_atomic
from headway.tasks.base import StepInfo
from headway.track.base import Event, MayFail, Tracker
from headway.track.callbacks import CallbackThreads
from headway.track.console import Console
from headway.track.events import append_event
from headway.track.metrics_file import MetricsFile
from headway.train.batches import count_steps, make_loader, plan_rows, valid_batches
from headway.train.clock import Clock
from headway.train.config import Recipe
from headway.train.control import Control
from headway.train.data_check import DataCheck, explain_damage
from headway.train.frozen_model import Reference
from headway.train.health import (
    BadStep,
    Healer,
    LossMonitor,
    add_skipped_batches,
    plan_rollback,
    repair_healed,
)
from headway.train.meter import AT_START, Meter, means
from headway.train.run_folder import (
    METRICS,
    RECIPE,
    RunLocks,
    new_save_record,
    prepare_folder,
    read_save_record,
    write_save_record,
)
from headway.train.stages import StageMetrics, StagePosition
from headway.train.start import Start
from headway.train.state import TrainState

log = logging.getLogger("headway")

CHECK_HURRY_EVERY = 8
"""Validation microbatches between two checks of the time left to save."""

RunHook = Callable[["Run"], AbstractContextManager[object]]
"""Opened around the loop, for profilers and tests; it may call the run's `on_step`."""


@dataclass(frozen=True)
class Session:
    """What all runs of one call of `headway train` share."""

    process: Process = field(default_factory=Process)
    world: RankGroup = field(default_factory=RankGroup)
    stop: StopSignal = field(default_factory=StopSignal)
    locks: RunLocks = field(default_factory=RunLocks)
    hook: RunHook = nullcontext
    callbacks: CallbackThreads = field(default_factory=CallbackThreads)
    given: Recipe | None = None
    """The recipe as it was given, of a run without stages."""


class NoMetrics:
    """The metrics file of every rank but the first, which writes the same numbers."""

    def write(self, record: object) -> None: ...

    def sync(self) -> None: ...

    def truncate_after(self, step: int) -> None: ...


@dataclass
class Run:
    """A run, ready to train."""

    recipe: Recipe
    start: Start
    session: Session
    stage: StagePosition | None
    """Its position in a run of several stages."""
    ranks: RankGroups
    compute: Compute
    model: ModelConfig
    tokenizer_path: Path | None
    data: OpenData
    batch: ResolvedBatch
    total_steps: int
    engine: Engine
    loader: Loader
    state: TrainState
    meter: Meter
    saver: Saver
    loss_monitor: LossMonitor
    healer: Healer
    data_check: DataCheck
    targets: TargetReport = TargetReport()
    """Findings about the targets of masked data."""
    reference: Reference | None = None
    """The frozen model the objective compares with."""
    first_step: int = 0
    """The step at which the run began: 0, or that of the checkpoint `init.content` was taken from."""
    console: Console = field(default_factory=Console, init=False)
    trackers: list[Tracker] = field(default_factory=list, init=False)
    writes: Deferred = field(default_factory=Deferred, init=False)
    """Metrics, events and other small files that wait while the disk is full."""
    valid_at_start: dict[str, Any] = field(default_factory=dict, init=False)
    slow_ranks: SlowRankReporter = field(default_factory=SlowRankReporter, init=False)
    _step_callbacks: list[Callable[[int], None]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self.clock = Clock(self.state)
        self.slow_ranks.every = self.recipe.log.slow_every
        self.writes.report = self._emit_save_failure
        self.saver.saved_step = self.saver.started_step = self.state.step
        self.saver.on_failure(self._emit_save_failure)

    @property
    def process(self) -> Process:
        return self.session.process

    @property
    def lr_factor(self) -> float:
        """What batch.lr_scaling multiplies all learning rates by."""
        return self.recipe.batch.lr_factor(self.batch.rows)

    @property
    def home(self) -> Path:
        """The folder users know the run by: its own, or that of the run whose stage it is."""
        return self.start.folder if self.stage is None else self.stage.run_folder

    @property
    def checkpoints(self) -> Path:
        return self.recipe.checkpoint.locations(self.start.folder)[0]

    @property
    def heart(self) -> Heartbeat:
        """Where this rank records its progress."""
        return self.ranks.world.heart

    @cached_property
    def metrics(self) -> MetricsFile | StageMetrics | NoMetrics:
        """The file every step is written to, by the first rank."""
        if not self.process.is_first:
            return NoMetrics()
        own = MetricsFile(self.start.folder / METRICS, self.writes)
        return (
            own
            if self.stage is None
            else StageMetrics(
                own, MetricsFile(self.stage.run_folder / METRICS, self.writes), self.stage
            )
        )

    @cached_property
    def control(self) -> Control:
        """What all ranks agree on between steps."""
        return Control(
            self.ranks.world,
            self.home,
            self.session.stop,
            0 if self.stage is None else self.stage.steps_before,
        )

    @property
    def has_ended(self) -> bool:
        """Whether all steps are done, or early stopping ends the run."""
        return self.state.step >= self.total_steps or self.state.early_stopping.is_over(
            self.recipe.eval.stop
        )

    # ---- beginning and end

    def begin(self) -> None:
        """Make trackers and the run folder, then show this rank's heartbeat; all ranks together."""
        world = self.ranks.world
        if self.process.is_first:
            name = self.recipe.run.name if self.stage is None else self.stage.run_name
            further = (one.build(self.start.folder, name) for one in self.recipe.track)
            style = self.recipe.log.style
            self.console = Console(
                self.total_steps, None if style == "internlm" else StatusLine.on_terminal(), style
            )
            self.trackers = [self.console, *(one for one in further if one is not None)]
            for tracker in self.trackers:
                if isinstance(tracker, MayFail):
                    tracker.on_failure(partial(self.emit, "tracker_failure"))
        world.barrier()  # every rank has read the folder before one of them changes it
        if self.process.is_first:
            prepare_folder(self.start, self.recipe, self.session.locks.moved, self.session.given)
            repair_healed(self.start.folder)
            if self.reference is not None:
                self.reference.record(self.start)
            self._record_saves()
            self.session.callbacks.report = partial(self.emit, "callback")
        world.barrier()
        self.heart.beat("start", self.state.step)
        self.heart.write_to(self.home)
        world.barrier()  # from here on a lost rank can be named: every rank has a heartbeat

    def use_tokenizer(self, folder: Path) -> None:
        """Put this tokenizer into checkpoints and final/."""
        self.tokenizer_path = self.saver.tokenizer = folder

    def close(self) -> None:
        """Write out what waits, to disk and in the trackers."""
        self.writes.retry()
        for tracker in self.trackers:
            tracker.close()

    def on_step(self, callback: Callable[[int], None]) -> None:
        """Call this with the number of each finished step."""
        self._step_callbacks.append(callback)

    def step_done(self) -> None:
        """Call what `on_step` was given, and compare the speed of ranks."""
        for callback in self._step_callbacks:
            callback(self.state.step)
        ratio, world = self.recipe.log.slow_ratio, self.ranks.world
        for text in self.slow_ranks.after_step(
            self.state.step, ratio, world, self.meter.take_rank_times
        ):
            self.emit("slow_rank", text)
        self.clock.log_epoch()

    # ---- reporting

    def emit(self, event: Event, text: str, **facts: Any) -> None:
        """Write an event to events.jsonl and send it to every tracker. Any rank and thread may call it; only the first rank sends."""
        if self.process.is_first:
            append_event(self.home, event, text, self.state.step, self.writes, **facts)
        for tracker in self.trackers:
            tracker.event(event, text, self.state.step)

    def _emit_save_failure(self, text: str) -> None:
        self.emit("save_failure", text)

    def report(self, *, everything: bool = False) -> None:
        """Write the records that have arrived: every step to metrics.jsonl, some to the console and the trackers; check their health."""
        self.writes.retry(now=False)
        for record in self.meter.collect(everything=everything):
            self.metrics.write(record)
            self.console.tick(record)
            self.session.callbacks.record(
                record if self.stage is None else self.stage.in_whole_run(record), AT_START
            )
            self.healer.check(self, record)
            if (
                record["step"] % self.recipe.log.every == 0
                or record["step"] in (1, self.total_steps)
                or "valid" in record
            ):
                shown = {
                    name: value for name, value in record.items() if name != AT_START
                }  # trackers have it already
                for tracker in self.trackers:
                    tracker.log(record["step"], shown)

    # ---- validation

    def validate(self) -> dict[str, Any]:
        """Evaluate every validation set; waits for the device. Sets are left out where the run must save soon."""
        found: dict[str, Any] = {}
        for name in self.data.valid:
            batches = _UntilHurry(self, self._valid_batches(name))
            result = means(self.engine.evaluate(batches, self._validation_info()))
            if batches.was_cut:
                log.warning("validation at step %d was cut short to save in time", self.state.step)
                break
            found[name] = result
        return {"valid": found} if found else {}

    def validate_at_start(self) -> None:
        """Validate before the first step if `eval.at_start` is set; trackers get the numbers now, metrics.jsonl with the first step."""
        self._check_metric()
        if not self.recipe.eval.at_start or self.state.step != self.first_step:
            return
        found = self.validate()
        self.valid_at_start = {AT_START: found["valid"]} if found else {}
        self.meter.interrupt()
        for tracker in self.trackers if found else ():
            tracker.log(self.state.step, found)

    def _check_metric(self) -> None:
        """Refuse a checkpoint.metric that no validation will have, before training: one batch of every set shows what there is."""
        metric = self.recipe.checkpoint.metric
        if metric == CheckpointConfig().metric or not self.data.valid:
            return
        at = self._validation_info()
        found = {
            name: means(self.engine.evaluate(islice(self._valid_batches(name), 1), at))
            for name in self.data.valid
        }
        require_metric(found, metric)
        self.meter.interrupt()

    def _validation_info(self) -> StepInfo:
        return StepInfo(self.state.step, self.total_steps, training=False)

    def _valid_batches(self, name: str) -> Iterator[Batch]:
        for batch in valid_batches(self.recipe, self.data, self.batch, self.ranks, name):
            self.heart.beat("validate", self.state.step)
            yield batch

    # ---- saving

    def due_save(self) -> str | None:
        """What to save after the current step: a `checkpoint`, a `snapshot` or nothing."""
        config, state = self.recipe.checkpoint, self.state
        due = config.due(state.step)
        if state.valid and config.keep_best:
            require_metric(state.valid, config.metric)
            stop = self.recipe.eval.stop
            if due != "checkpoint" and (config.on_best or (stop is not None and stop.restore_best)):
                self.saver.wait_for_save()  # a save in progress counts
                value = metric_value(state.valid, config.metric)
                best = self.process.is_first and is_among_best(
                    value, self.checkpoints, config, self.saver.manifests
                )
                due = "checkpoint" if self.ranks.world.max(int(best)) else due
        return due

    def save(self, *, snapshot: bool = False) -> None:
        """Save a checkpoint. The metrics up to its step are on disk first, so that a resumed run finds them."""
        self.heart.beat("save", self.state.step)
        self.report(everything=True)
        if self.healer.bad is not None:
            return  # a state that is about to be rolled back must not replace a good checkpoint
        begun = time.perf_counter()
        self.metrics.sync()
        self.state.seconds = self.clock.seconds()
        self.saver.save(
            SaveJob(self.state.step, self.state.scalars(), snapshot), self.state.records()
        )
        self.heart.beat("step", self.state.step)
        self.meter.stalled(time.perf_counter() - begun)

    def _record_saves(self) -> None:
        """On the first rank: write every save to saved.json; a run folder that was removed meanwhile is made again."""
        folder = self.start.folder
        saved = read_save_record(folder) or new_save_record()
        self.saver.run = saved.run

        def record(step: int) -> None:
            if not (folder / RECIPE).exists():
                log.warning(
                    "%s was removed during the run; writing it again. Other files that were there are lost",
                    folder / RECIPE,
                )
                folder.mkdir(parents=True, exist_ok=True)
                write_atomic(folder / RECIPE, dump_yaml(self.recipe))
            write_save_record(folder, replace(saved, step=step))
            self.session.callbacks.saved(
                self.control.steps_before + step, step_folder(self.checkpoints, step)
            )

        self.saver.on_saved = record

    @contextmanager
    def finishing_saves(self) -> Iterator[None]:
        """However the block ends, the save in progress ends first; only a second Ctrl-C does not wait for it."""
        try:
            yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            self.saver.abandon()
            raise
        self.heart.beat("save", self.state.step)
        self.saver.require()

    def refuse_damaged_data(self) -> None:
        """End the run if any rank has found damaged data; all ranks together. Nothing is saved after steps that may have read it."""
        if self.ranks.world.max(int(self.data_check.is_damaged)):
            raise GaveUpError(explain_damage(self))

    # ---- rolling back

    def roll_back(self, bad_step: int) -> None:
        """Return to a checkpoint before a bad step and skip its batch; all ranks together."""
        self.report(everything=True)
        self.saver.wait()
        healer = self.healer
        batch = healer.batch_of(bad_step)
        first = max(0, batch - self.recipe.heal.skip_before)
        bad = healer.bad or BadStep(bad_step, "spike", "another rank saw it")
        plan = plan_rollback(self, bad, (first, batch)) if self.process.is_first else {}
        plan = self.ranks.world.gather(plan)[0]
        if "gave_up" in plan:
            raise GaveUpError(plan["gave_up"])
        self.state.restore(
            open_checkpoint(plan["checkpoint"], verify=plan["checkpoint"].startswith("s3:"))
        )
        self.state.valid = None
        self.recipe = add_skipped_batches(self.recipe, [(first, batch)])
        self.loader.close()
        self.loader = make_loader(self.recipe, self.data, self.batch, self.state.cursor, self.ranks)
        self.total_steps = count_steps(self.recipe, self.loader, self.batch)
        if self.reference is not None and self.reference.cover is not None:
            # Batches that take the place of the skipped ones may hold pairs that the reference has not scored.
            position = (self.state.step, self.state.cursor)
            self.reference.cover(
                plan_rows(self.recipe, self.data, self.batch, self.ranks, position)
            )
        self.meter = self.meter.restarted(self.state, self.total_steps)
        self.saver.saved_step = self.saver.started_step = self.state.step
        self.metrics.truncate_after(self.state.step)
        self.heart.beat("step", self.state.step)
        healer.rolled_back(self.state.step)
        text = f"{bad.reason}; rolled back to step {self.state.step}, skipping batches {first} to {batch}"
        self.emit(
            bad.kind,
            text,
            batches=[first, batch],
            documents=plan["documents"],
            healed=plan["healed"],
        )


class _UntilHurry:
    """Batches until there is little time left to save; all ranks see the same end."""

    def __init__(self, run: Run, batches: Iterable[Batch]) -> None:
        self.run, self.batches, self.was_cut = run, batches, False

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            if index % CHECK_HURRY_EVERY == 0 and self.run.control.in_hurry():
                self.was_cut = True
                return
            yield batch
