"""Slow ranks: every rank's times come in, the outliers go out. Imports without torch.

InternLM's rule: a rank's time is compared with the mean of all ranks (without the smallest and largest where there are more than four) and
with the mean of its own last ten. It is an outlier if it is longer by more than a ratio and the mean is long enough to matter.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup

TRIM_ABOVE = 4
HISTORY = 10
COMPARE_EVERY = 50
"""Steps between two comparisons during training."""
MIN_MEAN_SECONDS = 0.5


@dataclass(frozen=True)
class SlowRule:
    """When a time is an outlier."""

    ratio: float = 1.1
    min_seconds: float = MIN_MEAN_SECONDS


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank over some steps: its own compute, its wait for its own data, and the whole."""

    compute: float = 0.0
    data_wait: float = 0.0
    total: float = 0.0
    num_steps: int = 0
    host: str = ""

    def plus(self, compute: float, data_wait: float, total: float) -> RankTimes:
        """These times and those of one more step."""
        return RankTimes(
            self.compute + compute,
            self.data_wait + data_wait,
            self.total + total,
            self.num_steps + 1,
            self.host,
        )


@dataclass(frozen=True)
class Outlier:
    """One time of one rank that is too long."""

    timer: str
    rank: int
    seconds: float
    usual: float
    against: str

    def __str__(self) -> str:
        times = f"{self.seconds / self.usual:.2f} times {self.against} ({self.usual:.3f} s)"
        return f"rank {self.rank}: {self.timer} took {self.seconds:.3f} s, {times}"


def usual(times: Sequence[float]) -> float:
    """The mean over ranks, without the extremes where there are more than four."""
    ordered = sorted(times)
    return mean(ordered[1:-1] if len(ordered) > TRIM_ABOVE else ordered)


def slow_ranks(times: Mapping[str, Sequence[float]], rule: SlowRule) -> list[Outlier]:
    """Ranks that are slower than the others; `times` has one number per rank for each timer."""
    found: list[Outlier] = []
    for timer, values in times.items():
        expected = usual(values)
        if len(values) > 1 and expected >= rule.min_seconds:
            found += [
                Outlier(timer, rank, value, expected, "the ranks' mean")
                for rank, value in enumerate(values)
                if value > rule.ratio * expected
            ]
    return found


def slower_than_before(
    timer: str, rank: int, history: Sequence[float], rule: SlowRule
) -> list[Outlier]:
    """Whether the last of a rank's times is longer than the ten before it."""
    before = list(history[-HISTORY - 1 : -1])
    if not before or mean(before) < rule.min_seconds or history[-1] <= rule.ratio * mean(before):
        return []
    return [Outlier(timer, rank, history[-1], mean(before), "its own last ten")]


def slow_in_training(everyone: Sequence[RankTimes], rule: SlowRule) -> dict[int, str]:
    """Why each slow rank is slow, by rank. All steps end together, so only a rank's own compute and data wait show who is slow."""
    num_steps = min(one.num_steps for one in everyone)
    if num_steps == 0:
        return {}
    compute = [one.compute / one.num_steps * num_steps for one in everyone]
    waits = [one.data_wait / one.num_steps * num_steps for one in everyone]
    steps = usual([one.total / one.num_steps * num_steps for one in everyone])
    found: dict[int, str] = {}
    for one in slow_ranks({"compute": compute}, rule):
        found[one.rank] = f"{one} over {num_steps} steps"
    for rank, seconds in enumerate(waits):
        if steps >= rule.min_seconds and seconds - usual(waits) > (rule.ratio - 1) * steps:
            others = (
                f"ranks wait {usual(waits):.3f} s on average, {num_steps} steps take {steps:.3f} s"
            )
            found[rank] = f"rank {rank}: waited {seconds:.3f} s for its data; {others}"
    return {rank: f"{text}, on {everyone[rank].host}" for rank, text in sorted(found.items())}


def write_report(
    times: Mapping[str, Sequence[float]], outliers: Sequence[Outlier], rule: SlowRule
) -> str:
    """A table of all ranks, and the outliers."""
    timers = list(times)
    lines = [
        f"{'rank':<6}" + "".join(f"{timer:>24}" for timer in timers),
        *(
            f"{rank:<6}" + "".join(f"{times[timer][rank]:>24.4f}" for timer in timers)
            for rank in range(len(next(iter(times.values()), ())))
        ),
        f"{'mean':<6}" + "".join(f"{usual(times[timer]):>24.4f}" for timer in timers),
        "",
        f"seconds in all profiled steps; slow = more than {rule.ratio:g} times the mean, where that is at least {rule.min_seconds:g} s",
        *(str(one) for one in outliers),
    ]
    return "\n".join(lines if outliers else [*lines, "no rank is slow"]) + "\n"


class SlowRankReporter:
    """Reports a rank when it becomes slow, not again while it stays slow."""

    def __init__(self, every: int = COMPARE_EVERY) -> None:
        self.every = every
        self._slow: frozenset[int] = frozenset()

    def after_step(
        self, step: int, ratio: float | None, world: RankGroup, take_times: Callable[[], RankTimes]
    ) -> list[str]:
        """Every `every` steps, exchange the times of all ranks; returns a text for each rank that has become slow.

        All ranks call it together. The times are measured already, so that nothing waits for the device.
        """
        if ratio is None or world.size == 1 or step % self.every:
            return []
        found = slow_in_training(
            world.gather(replace(take_times(), host=socket.gethostname())), SlowRule(ratio)
        )
        new = [text for rank, text in found.items() if rank not in self._slow]
        self._slow = frozenset(found)
        return new
