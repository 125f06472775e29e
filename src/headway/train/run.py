"""A run and its verbs: begin, report, validate, save, roll back.

`build` makes a `Run`, `loop` drives it, and no other module changes its fields.

Invariant: methods that talk to other ranks (validate, save, roll_back, begin, ...) are called by
all ranks in the same order. Files of the run folder are written by the first rank alone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headway.checkpoint.best import is_among_best, metric_value, require_metric
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.load import open_checkpoint
from headway.checkpoint.save import step_folder
from headway.checkpoint.saver import SaveJob, Saver
from headway.config.load import dump_yaml
from headway.data.batch import Batch
from headway.data.config import ResolvedBatch
from headway.data.open import OpenData
from headway.data.target_check import TargetReport
from headway.diagnose.slow_ranks import SlowRankReporter
from headway.errors import GaveUpError, TrainingError
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
from headway.track.callbacks import CallbackRequests, RunCallbacks
from headway.track.console import Console
from headway.track.events import append_event
from headway.track.metrics_file import MetricsFile
from headway.train.batches import (
    StepSource,
    count_steps,
    make_loader,
    plan_rows,
    valid_batches,
)
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
from headway.train.start import Start
from headway.train.start_time import StartTime
from headway.train.state import Clock, TrainState

if TYPE_CHECKING:
    from headway.train.rollouts import Rollouts
    from headway.train.stages import StageMetrics, StagePosition

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
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    start_time: StartTime = field(default_factory=StartTime)
    original_recipe: Recipe | None = None
    """The recipe before model and data were read, of a run without stages."""


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
    loader: StepSource
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
    rollouts: Rollouts | None = None
    """What samples and judges the answers that the run trains on."""
    first_step: int = 0
    """The step at which the run began: 0, or that of the checkpoint `init.content` was taken
    from.
    """
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
        # The state as it was loaded needs no save: it is on disk, or it is the start of the run.
        self.saver.saved_step = self.state.step
        self.saver.started_step = self.state.step
        self.saver.on_failure(self._emit_save_failure)

    @property
    def process(self) -> Process:
        return self.session.process

    @property
    def lr_factor(self) -> float:
        """What batch.lr_scaling and callbacks multiply all learning rates by."""
        return self.recipe.batch.lr_factor(self.batch.rows) * self.state.lr_scale

    @property
    def home(self) -> Path:
        """The folder users know the run by: its own, or that of the run whose stage it is."""
        if self.stage is not None:
            return self.stage.run_folder
        return self.start.folder

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
        metrics = MetricsFile(self.start.folder / METRICS, self.writes)
        if self.stage is None:
            return metrics

        from headway.train.stages import StageMetrics

        of_whole_run = MetricsFile(self.stage.run_folder / METRICS, self.writes)
        return StageMetrics(metrics, of_whole_run, self.stage)

    @cached_property
    def control(self) -> Control:
        """What all ranks agree on between steps."""
        steps_before = 0
        if self.stage is not None:
            steps_before = self.stage.steps_before
        return Control(self.ranks.world, self.home, self.session.stop, steps_before)

    @property
    def has_ended(self) -> bool:
        """Whether all steps are done, or early stopping or a callback ends the run."""
        if self.state.step >= self.total_steps:
            return True
        stop = self.state.callback_stop
        # A run that is extended afterwards continues.
        if stop is not None and self.total_steps <= stop["total_steps"]:
            return True
        return self.state.early_stopping.is_over(self.recipe.eval.stop)

    # ---- beginning and end

    def begin(self) -> None:
        """Make trackers and the run folder, then show this rank's heartbeat; all ranks together."""
        world = self.ranks.world
        if self.process.is_first:
            self._make_trackers()

        # Every rank must have read the folder before one of them changes it.
        world.barrier()
        if self.process.is_first:
            prepare_folder(
                self.start, self.recipe, self.session.locks.moved, self.session.original_recipe
            )
            repair_healed(self.start.folder)
            if self.reference is not None:
                self.reference.record(self.start)
            self._record_saves()
            self.session.callbacks.threads.report = partial(self.emit, "callback")
        self.session.callbacks.control.reset(self.state.lr_scale)

        # Heartbeats go into the folder, which exists only now: preparing it removes old ones.
        world.barrier()
        self.heart.beat("start", self.state.step)
        self.heart.write_to(self.home)

        # From here on a lost rank can be named: every rank has a heartbeat.
        world.barrier()

    def _make_trackers(self) -> None:
        """The console and the trackers of the recipe. The first rank alone has any."""
        name = self.recipe.run.name
        if self.stage is not None:
            name = self.stage.run_name

        # Scripts read InternLM's lines from the output, so that style has no progress bar.
        style = self.recipe.log.style
        status_line = None
        if style != "internlm":
            status_line = StatusLine.on_terminal()
        self.console = Console(self.total_steps, status_line, style)

        self.trackers = [self.console]
        for config in self.recipe.track:
            tracker = config.build(self.start.folder, name)
            if tracker is not None:
                self.trackers.append(tracker)

        for tracker in self.trackers:
            if isinstance(tracker, MayFail):
                tracker.on_failure(partial(self.emit, "tracker_failure"))

    def use_tokenizer(self, folder: Path) -> None:
        """Put this tokenizer into checkpoints and final/."""
        self.tokenizer_path = folder
        self.saver.tokenizer = folder

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

        reports = self.slow_ranks.after_step(
            self.state.step,
            self.recipe.log.slow_ratio,
            self.ranks.world,
            self.meter.take_rank_times,
        )
        for text in reports:
            self.emit("slow_rank", text)
        self.clock.log_epoch()

    # ---- reporting

    def emit(self, event: Event, text: str, **facts: Any) -> None:
        """Write an event to events.jsonl and send it to every tracker.

        Any rank and thread may call it; only the first rank writes and sends.
        """
        if self.process.is_first:
            append_event(self.home, event, text, self.state.step, self.writes, **facts)
        for tracker in self.trackers:
            tracker.event(event, text, self.state.step)

    def _emit_save_failure(self, text: str) -> None:
        self.emit("save_failure", text)

    def report(self, *, everything: bool = False) -> None:
        """Write the records that have arrived from the device, and check their health.

        metrics.jsonl and callbacks get every step, the console and the trackers some of them.
        `everything` waits for the steps whose numbers are still on the device.
        """
        self.writes.retry(now=False)
        for record in self.meter.collect(everything=everything):
            # Callbacks follow the whole run, which counts steps over all of its stages.
            of_whole_run = record
            if self.stage is not None:
                of_whole_run = self.stage.in_whole_run(record)
            added = self.session.callbacks.record(of_whole_run, AT_START)
            record = {**added, **record}
            self.console.added |= set(added)

            self.metrics.write(record)
            self.console.tick(record)

            self.healer.check(self, record)
            self._check_agreement(record)
            self._report_start(record)
            if self._is_logged(record):
                # Trackers have the validation at the start already: `validate_at_start` sent it.
                shown = {name: value for name, value in record.items() if name != AT_START}
                for tracker in self.trackers:
                    tracker.log(record["step"], shown)

    def _report_start(self, record: dict[str, Any]) -> None:
        """Log where the time of the start went, once the first step's time is known."""
        start_time = self.session.start_time
        if not start_time.is_reported:
            log.info("%s", start_time.report(record["time"]["step_seconds"]))

    def _check_agreement(self, record: dict[str, Any]) -> None:
        """Give up where trainer and sampler no longer compute the same probabilities."""
        if self.rollouts is None:
            return
        from headway.tasks.answers import AGREEMENT, DIFFERING

        rollout = self.recipe.rollout
        limit = rollout.difference_limit
        lacks_mean = limit is not None and AGREEMENT not in record
        if lacks_mean or (rollout.exact and DIFFERING not in record):
            self.healer.gave_up = (
                f"step {record['step']}: objective {self.recipe.objective.kind} does not report how "
                "far trainer and sampler are apart, which rollout.difference_limit and exact "
                "compare. Add SampledTokens.agreement() to the metrics of its loss, or set "
                "difference_limit to null and exact to false"
            )
            return
        differing = record.get(DIFFERING)
        if differing:
            self.healer.gave_up = (
                f"step {record['step']}: {differing:.2%} of the sampled tokens have a "
                "log-probability of the trainer that is not the sampler's, bit for bit, and "
                "rollout.exact is true. `headway rollouts` shows the answers; set exact to false "
                "to train on"
            )
            return
        difference = record.get(AGREEMENT)
        if limit is None or difference is None or difference <= limit:
            return
        self.healer.gave_up = (
            f"step {record['step']}: the trainer's log-probabilities of sampled tokens differ from "
            f"the sampler's by {difference:.3g} on average; rollout.difference_limit is {limit:g}. "
            f"The answers were drawn by other weights than those that train{self._older_weights()}"
        )

    def _older_weights(self) -> str:
        """Which other weights are meant to draw answers."""
        if not self.recipe.rollout.ahead:
            return ""
        return (
            ": with rollout.ahead by those of a rollout before. Lower optim.lr, raise the limit, or "
            "set rollout.ahead to 0"
        )

    def _is_logged(self, record: dict[str, Any]) -> bool:
        """Whether the console and the trackers get this record."""
        step = record["step"]
        if step in (1, self.total_steps) or "valid" in record:
            return True
        return step % self.recipe.log.every == 0

    # ---- what callbacks request

    def obey_callbacks(self) -> CallbackRequests:
        """Do what callbacks on the first rank have requested; all ranks together.

        Learning rates and the end of the run are part of the state. Saving, and ending the run
        after an error, is left to the loop.
        """
        requests = CallbackRequests()
        if self.process.is_first:
            requests = self.session.callbacks.take_requests()
        requests = self.ranks.world.gather(requests)[0]

        if requests.lr_scale is not None:
            self.state.lr_scale = requests.lr_scale
            log.info(
                "a callback scales all learning rates by %g from step %d on",
                requests.lr_scale,
                self.state.step + 1,
            )
        if requests.stop is not None:
            self.state.callback_stop = {
                "reason": requests.stop,
                "step": self.state.step,
                "total_steps": self.total_steps,
            }
        return requests

    def raise_callback_error(self, text: str) -> NoReturn:
        """Raise what a callback raised: the very error on the first rank, its text on others."""
        if self.session.callbacks.error is not None:
            raise self.session.callbacks.error
        raise TrainingError(text)

    # ---- validation

    def validate(self) -> dict[str, Any]:
        """Evaluate every validation set; waits for the device.

        Sets are left out where the run must save soon.

        Returns `{"valid": {set: {metric: value}}}`, or nothing if no set was evaluated completely.
        """
        results: dict[str, Any] = {}
        for name in self.data.valid:
            if self.rollouts is not None:
                results[name] = self.rollouts.evaluate(name)
                continue
            batches = _UntilHurry(self, self._valid_batches(name))
            result = means(self.engine.evaluate(batches, self._validation_info()))
            if batches.was_cut:
                # Means over a part of a set cannot be compared with those of other steps.
                log.warning("validation at step %d was cut short to save in time", self.state.step)
                break
            results[name] = result
        if results:
            return {"valid": results}
        return {}

    def validate_at_start(self) -> None:
        """Validate before the first step if `eval.at_start` is set.

        Trackers get the numbers now. metrics.jsonl, which has one line per step, gets them with
        the first step.
        """
        self._check_metric()
        if not self.recipe.eval.at_start or self.state.step != self.first_step:
            return

        validation = self.validate()
        self.meter.interrupt()
        self.valid_at_start = {}
        if validation:
            self.valid_at_start = {AT_START: validation["valid"]}
            for tracker in self.trackers:
                tracker.log(self.state.step, validation)

    def _check_metric(self) -> None:
        """Refuse a checkpoint.metric that no validation will have, before training.

        One batch of every set shows which metrics there are.
        """
        metric = self.recipe.checkpoint.metric
        # Every validation has the default metric, the loss.
        if metric == CheckpointConfig().metric or not self.data.valid:
            return
        if self.rollouts is not None:
            # Answers to held-out prompts are judged by rewards, whose names are known.
            names = dict.fromkeys(self.rollouts.valid_metrics(), 0.0)
            require_metric(dict.fromkeys(self.data.valid, names), metric)
            return
        info = self._validation_info()
        results = {
            name: means(self.engine.evaluate(islice(self._valid_batches(name), 1), info))
            for name in self.data.valid
        }
        require_metric(results, metric)
        self.meter.interrupt()

    def _validation_info(self) -> StepInfo:
        # Schedules of a task are at the step that training has reached.
        return StepInfo(self.state.step, self.total_steps, training=False)

    def _valid_batches(self, name: str) -> Iterator[Batch]:
        for batch in valid_batches(self.recipe, self.data, self.batch, self.ranks, name):
            # A long validation is progress, too: a supervisor must not take it for a hang.
            self.heart.beat("validate", self.state.step)
            yield batch

    # ---- saving

    def due_save(self) -> str | None:
        """What to save after the current step: a `checkpoint`, a `snapshot` or nothing."""
        config = self.recipe.checkpoint
        state = self.state
        due = config.due(state.step)
        if not state.valid or not config.keep_best:
            return due

        require_metric(state.valid, config.metric)
        stop = self.recipe.eval.stop
        saves_best = config.on_best or (stop is not None and stop.restore_best)
        if due == "checkpoint" or not saves_best:
            return due

        # A save in progress counts: it may be better than this state.
        self.saver.wait_for_save()
        value = metric_value(state.valid, config.metric)
        # Other ranks may not see the checkpoints of the first one, so it decides for all.
        is_best = self.process.is_first and is_among_best(
            value, self.checkpoints, config, self.saver.manifests
        )
        if self.ranks.world.max(int(is_best)):
            return "checkpoint"
        return due

    def save(self, *, snapshot: bool = False) -> None:
        """Save a checkpoint.

        The metrics up to its step are on disk first, so that a resumed run finds them. So are
        answers that are sampled ahead: a resumed run does not have the weights that draw them.
        """
        if self.rollouts is not None:
            self.rollouts.settle()
        self.heart.beat("save", self.state.step)
        self.report(everything=True)
        if self.healer.bad is not None:
            return  # a state that is about to be rolled back must not replace a good checkpoint

        save_began = time.perf_counter()
        self.metrics.sync()
        self.state.seconds = self.clock.seconds()
        job = SaveJob(self.state.step, self.state.scalars(), snapshot)
        self.saver.save(job, self.state.records())
        self.heart.beat("step", self.state.step)
        self.meter.stalled(time.perf_counter() - save_began)

    def _record_saves(self) -> None:
        """On the first rank: write every save to saved.json.

        A run folder that was removed meanwhile is made again.
        """
        folder = self.start.folder
        saved = read_save_record(folder) or new_save_record()
        self.saver.run = saved.run

        # The saver calls this in its thread, once a checkpoint is complete on disk.
        def record(step: int) -> None:
            if not (folder / RECIPE).exists():
                log.warning(
                    "%s was removed during the run; writing it again. "
                    "Other files that were there are lost",
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
        """However the block ends, the save in progress ends first.

        Only a second Ctrl-C does not wait for it.
        """
        try:
            yield
        except KeyboardInterrupt:
            # The first Ctrl-C is a request to stop; with the second one the user will not wait.
            raise
        except BaseException:
            self.saver.abandon()
            raise
        self.heart.beat("save", self.state.step)
        self.saver.require()

    def refuse_damaged_data(self) -> None:
        """End the run if any rank has found damaged data; all ranks together.

        Nothing is saved after steps that may have read it.
        """
        if self.ranks.world.max(int(self.data_check.is_damaged)):
            raise GaveUpError(explain_damage(self))

    # ---- rolling back

    def roll_back(self, bad_step: int) -> None:
        """Return to a checkpoint before a bad step and skip its batch; all ranks together."""
        self.report(everything=True)
        if self.rollouts is not None:
            self.rollouts.settle()
        # A save or an upload in progress would write checkpoints that the plan sets aside.
        self.saver.wait()

        healer = self.healer
        batch = healer.batch_of(bad_step)
        first = max(0, batch - self.recipe.heal.skip_before)
        bad = healer.bad or BadStep(bad_step, "spike", "another rank saw it")

        # The first rank alone sets checkpoints aside and writes heal.json.
        plan = {}
        if self.process.is_first:
            plan = plan_rollback(self, bad, (first, batch))
        plan = self.ranks.world.gather(plan)[0]
        if "gave_up" in plan:
            raise GaveUpError(plan["gave_up"])

        # The first rank has hashed every byte of a checkpoint on disk. Of one in an object store
        # it has compared sizes only, so what is read is verified.
        is_remote = plan["checkpoint"].startswith("s3:")
        self.state.restore(open_checkpoint(plan["checkpoint"], verify=is_remote))
        self.state.valid = None

        # Batches are skipped by a setting, as after a restart: both ways give the same order.
        self.recipe = add_skipped_batches(self.recipe, [(first, batch)])
        self.loader.close()
        self.loader = make_loader(
            self.recipe, self.data, self.batch, self.state.cursor, self.ranks, self.rollouts
        )
        self.total_steps = count_steps(self.recipe, self.loader, self.batch)

        if self.reference is not None and self.reference.cover is not None:
            # Batches that replace the skipped ones may hold pairs that the reference has not
            # scored.
            position = (self.state.step, self.state.cursor)
            self.reference.cover(
                plan_rows(self.recipe, self.data, self.batch, self.ranks, position)
            )

        self.session.callbacks.control.reset(self.state.lr_scale)

        # Everything that counts steps starts again from the restored step.
        self.meter = self.meter.restarted(self.state, self.total_steps)
        self.saver.saved_step = self.state.step
        self.saver.started_step = self.state.step
        self.metrics.truncate_after(self.state.step)
        self.heart.beat("step", self.state.step)
        healer.rolled_back(self.state.step)

        self.emit(
            bad.kind,
            f"{bad.reason}; rolled back to step {self.state.step}, "
            f"skipping batches {first} to {batch}",
            batches=[first, batch],
            documents=plan["documents"],
            healed=plan["healed"],
        )


class _UntilHurry:
    """Batches until there is little time left to save; all ranks see the same end."""

    def __init__(self, run: Run, batches: Iterable[Batch]) -> None:
        self.run = run
        self.batches = batches
        self.was_cut = False

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self.batches):
            # An exchange of all ranks, so it is not done for every batch.
            if index % CHECK_HURRY_EVERY == 0 and self.run.control.in_hurry():
                self.was_cut = True
                return
            yield batch
