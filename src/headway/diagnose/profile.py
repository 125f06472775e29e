"""`headway train --profile`: records some steps. Each rank writes a trace for chrome://tracing or
Perfetto and a one-page summary into logs/; the first rank also compares all ranks.

    logs/trace-rank-00000.json.gz
    logs/profile-rank-00000.txt     logs/profile-rank-00000.json
    logs/stragglers.txt

A step is recorded after one of warm-up: the profiler's own start would be part of it.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.diagnose.slow_ranks import (
    HISTORY,
    SlowRule,
    slow_ranks,
    slower_than_before,
    write_report,
)
from headway.errors import ConfigError
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.diagnose.trace import StepSummary
    from headway.parallel.collectives import RankGroup
    from headway.runtime.device import Compute
    from headway.runtime.process import Process

log = logging.getLogger("headway")

TRACE_DATA = "headway.data"
TRACE_FORWARD_BACKWARD = "headway.forward_backward"
TRACE_OPTIMIZER = "headway.optimizer"
"""Names of the parts of a step in a profiler trace."""


@dataclass(frozen=True)
class ProfilePlan:
    """The steps to record, counted from this start, and when a rank is slow."""

    first_step: int
    num_steps: int
    rule: SlowRule

    def __post_init__(self) -> None:
        if self.first_step < 2:
            raise ConfigError(
                f"--profile-from is {self.first_step}; it must be at least 2, because the step "
                "before warms up the profiler."
            )
        if self.num_steps < 1:
            raise ConfigError(f"--profile-steps is {self.num_steps}; it must be at least 1.")
        if self.rule.ratio < 1:
            raise ConfigError(f"--slow-ratio is {self.rule.ratio:g}; it must be at least 1.")

    def fit(self, steps: int) -> None:
        """Refuse a plan that needs more than this many steps."""
        last = self.first_step + self.num_steps - 1
        if steps < last:
            raise ConfigError(
                f"--profile records steps {self.first_step} to {last} after the start; only "
                f"{steps} are left. Lower --profile-from or --profile-steps."
            )


def plan_profile(first_step: int = 6, num_steps: int = 3, ratio: float = 1.1) -> ProfilePlan:
    """A plan, with defaults."""
    return ProfilePlan(first_step, num_steps, SlowRule(ratio))


@dataclass(frozen=True)
class ProfileTarget:
    """The rank that is profiled, and what its recorder calls."""

    process: Process
    compute: Compute
    logs: Path
    world: RankGroup
    report: Callable[[str], None]
    """Takes a text about each slow rank."""
    reset_clock: Callable[[], None]
    """Called after work that belongs to no step."""


class Recorder:
    """Records steps of one rank and writes trace, summary and the comparison of ranks."""

    def __init__(self, target: ProfileTarget, plan: ProfilePlan) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        self.target = target
        self.plan = plan
        self.times: deque[float] = deque(maxlen=HISTORY + 1)
        self.last = time.perf_counter()
        self.summary: StepSummary | None = None
        """Recorded and not yet compared."""
        activities = [ProfilerActivity.CPU]
        if target.compute.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profiler = profile(
            activities=activities,
            # Steps are counted from 1: the one before the first is the warm-up.
            schedule=schedule(wait=plan.first_step - 2, warmup=1, active=plan.num_steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
            experimental_config=_all_threads(),
        )

    def after_step(self, step: int) -> None:
        """Called after each step: advances the profiler, and compares ranks after the last."""
        now = time.perf_counter()
        # Before the profiler's own work of this step, which is not part of it.
        self.times.append(now - self.last)
        self.profiler.step()
        if self.summary is not None:
            # Not where the recording ends: it may end because this rank failed, and the
            # comparison would wait for the others forever.
            self._compare(self.summary)
            self.summary = None
            self.target.reset_clock()
        self.last = time.perf_counter()

    def _path(self, name: str) -> Path:
        return self.target.logs / name

    def _write(self, profiler: Any) -> None:
        """Called by the profiler when its steps are recorded: write the trace and the summary."""
        from headway.diagnose.trace import summarize_trace, write_page

        process = self.target.process
        rank_name = f"rank-{process.rank:05}"
        trace = self._path(f"trace-{rank_name}.json.gz")
        profiler.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            summary = summarize_trace(json.load(file)["traceEvents"])

        if summary is None:
            log.warning("the run ended before a whole step was recorded; there is only %s", trace)
            return

        self.summary = summary
        write_atomic(
            self._path(f"profile-{rank_name}.txt"),
            write_page(summary, process.rank, process.world, self.target.compute.name),
        )
        write_atomic(
            self._path(f"profile-{rank_name}.json"), json.dumps(asdict(summary), indent=2) + "\n"
        )
        percent = 100 / summary.step
        log.info(
            "profiled %d steps of %.1f ms: compute %.0f %%, optimizer %.0f %%, communication "
            "exposed %.0f %%, data wait %.0f %%; %s",
            summary.num_steps,
            summary.step * 1e3,
            summary.compute * percent,
            summary.optimizer * percent,
            summary.exposed_communication * percent,
            summary.data_wait * percent,
            self._path(f"profile-{rank_name}.txt"),
        )

    def _compare(self, summary: StepSummary) -> None:
        """Exchange times and report slow ranks; all ranks call it after the same step."""
        rule = self.plan.rule
        per_step = {
            "compute": summary.compute + summary.optimizer,
            "data wait": summary.data_wait,
            "rest": summary.rest,
            "step": summary.step,
        }
        # Of all recorded steps together: the rule leaves out times that are too short to matter.
        local = {timer: seconds * summary.num_steps for timer, seconds in per_step.items()}
        everyone = self.target.world.gather((local, list(self.times)))
        if not self.target.process.is_first:
            return

        times = {timer: [of_rank[timer] for of_rank, _ in everyone] for timer in local}
        outliers = slow_ranks(times, rule)
        for rank, (_, history) in enumerate(everyone):
            outliers += slower_than_before("a step", rank, history, rule)

        write_atomic(self._path("stragglers.txt"), write_report(times, outliers, rule))
        for outlier in outliers:
            self.target.report(str(outlier))


def _all_threads() -> Any:
    """Communication may be started from threads, which the profiler ignores by default."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)
