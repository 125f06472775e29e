"""`headway train --profile`: some steps are recorded. Each rank writes a trace for chrome://tracing or Perfetto and a one-page summary into
logs/; the first one also compares all ranks.

    logs/trace-rank-00000.json.gz   logs/profile-rank-00000.txt   logs/profile-rank-00000.json   logs/stragglers.txt
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.diagnose.trace import Summary, summarize_trace, write_page
from headway.errors import ConfigError
from headway.runtime.storage import write_atomic
from headway.train.slow_ranks import HISTORY, SlowRule, slow_ranks, slower_than_before, write_report

if TYPE_CHECKING:
    from headway.train.run import Run

log = logging.getLogger("headway")


@dataclass(frozen=True)
class ProfilePlan:
    """Which steps of this start are recorded, counted from its first, and when a rank is called slow."""

    first_step: int
    num_steps: int
    rule: SlowRule

    def __post_init__(self) -> None:
        if self.first_step < 2:
            raise ConfigError(f"--profile-from is {self.first_step}; it must be at least 2, the step before warms the profiler up.")
        if self.num_steps < 1:
            raise ConfigError(f"--profile-steps is {self.num_steps}; it must be at least 1.")
        if self.rule.ratio < 1:
            raise ConfigError(f"--slow-ratio is {self.rule.ratio:g}; it must be at least 1.")

    def fit(self, steps: int) -> None:
        """Refuse a plan that this many steps do not reach to the end of."""
        last = self.first_step + self.num_steps - 1
        if steps < last:
            raise ConfigError(
                f"--profile records steps {self.first_step} to {last} after the start; only {steps} are left. "
                "Lower --profile-from or --profile-steps."
            )


def plan_profile(first_step: int = 6, num_steps: int = 3, ratio: float = 1.1) -> ProfilePlan:
    """The plan that these numbers describe."""
    return ProfilePlan(first_step, num_steps, SlowRule(ratio))


def profiled(plan: ProfilePlan) -> Callable[[Run], Any]:
    """The probe that records what the plan says."""

    @contextmanager
    def probe(run: Run) -> Iterator[None]:
        plan.fit(run.total_steps - run.state.step)
        recorder = Recorder(run, plan)
        with recorder.profiler:
            run.on_step(recorder.after_step)
            yield

    return probe


class Recorder:
    """Records the steps of one rank and writes what they show."""

    def __init__(self, run: Run, plan: ProfilePlan) -> None:
        from torch.profiler import ProfilerActivity, profile, schedule

        self.run, self.plan = run, plan
        self.times: deque[float] = deque(maxlen=HISTORY + 1)
        self.last = time.perf_counter()
        self.fresh: Summary | None = None
        """What was just recorded and not compared yet."""
        on_cuda = run.compute.device.type == "cuda"
        self.profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])],
            schedule=schedule(wait=plan.first_step - 2, warmup=1, active=plan.num_steps, repeat=1),
            on_trace_ready=self._write,
            acc_events=True,
            experimental_config=_all_threads(),
        )

    def after_step(self, step: int) -> None:
        """A step is done."""
        now = time.perf_counter()
        self.times.append(now - self.last)
        self.profiler.step()
        if self.fresh is not None:
            # Here and not where the recording ends, which may be because this rank failed: the others would be waited for in vain.
            self._compare(self.fresh)
            self.fresh = None
            self.run.meter.interrupt()
        self.last = time.perf_counter()

    def _path(self, name: str) -> Path:
        return self.run.start.folder / "logs" / name

    def _write(self, profiler: Any) -> None:
        process = self.run.process
        who = f"rank-{process.rank:05}"
        trace = self._path(f"trace-{who}.json.gz")
        profiler.export_chrome_trace(str(trace))
        with gzip.open(trace, "rt", encoding="utf-8") as file:
            summary = summarize_trace(json.load(file)["traceEvents"])
        if summary is None:
            log.warning("the run ended before a whole step was recorded; there is only %s", trace)
            return
        self.fresh = summary
        write_atomic(self._path(f"profile-{who}.txt"), write_page(summary, process.rank, process.world, self.run.compute.name))
        write_atomic(self._path(f"profile-{who}.json"), json.dumps(summary.as_dict(), indent=2) + "\n")
        log.info(
            "profiled %d steps of %.1f ms: compute %.0f %%, optimizer %.0f %%, communication exposed %.0f %%, data wait %.0f %%; %s",
            summary.num_steps, summary.step * 1e3, *(100 * part / summary.step for part in
            (summary.compute, summary.optimizer, summary.exposed_communication, summary.data_wait)), self._path(f"profile-{who}.txt"),
        )  # fmt: skip

    def _compare(self, summary: Summary) -> None:
        """All ranks come here after the same step, so they can tell each other their times."""
        process, rule = self.run.process, self.plan.rule
        mine = {
            "compute": summary.compute + summary.optimizer,
            "data wait": summary.data_wait,
            "rest": summary.rest,
            "step": summary.step,
        }
        mine = {timer: seconds * summary.num_steps for timer, seconds in mine.items()}
        everyone = self.run.ranks.world.gather((mine, list(self.times)))
        if not process.is_first:
            return
        times = {timer: [one[timer] for one, _ in everyone] for timer in mine}
        found = slow_ranks(times, rule)
        for rank, (_, history) in enumerate(everyone):
            found += slower_than_before("a step", rank, history, rule)
        write_atomic(self._path("stragglers.txt"), write_report(times, found, rule))
        for one in found:
            self.run.emit("slow_rank", str(one))


def _all_threads() -> Any:
    """Exchanges may be started from threads, which the profiler leaves out unless told."""
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=True)
