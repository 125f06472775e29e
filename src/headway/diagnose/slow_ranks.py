"""Slow ranks: every rank's times come in, the outliers go out. Imports without torch.

InternLM's rule: a rank's time is compared with the mean of all ranks (without the smallest and
largest where there are more than four) and with the mean of its own last ten. It is an outlier if
it is longer by more than a ratio and the mean is long enough to matter.
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
"""Ranks; with more, the smallest and the largest time are left out of the mean."""
HISTORY = 10
"""A rank's own last times that a new one is compared with."""
COMPARE_EVERY = 50
"""Steps between two comparisons during training."""
MIN_MEAN_SECONDS = 0.5
"""Shorter times differ by chance."""


@dataclass(frozen=True)
class SlowRule:
    """When a time is an outlier."""

    ratio: float = 1.1
    min_seconds: float = MIN_MEAN_SECONDS


@dataclass(frozen=True)
class RankTimes:
    """Seconds of one rank over some steps: its own compute, its wait for its own data, and the
    whole.
    """

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
    if len(ordered) > TRIM_ABOVE:
        ordered = ordered[1:-1]
    return mean(ordered)


def slow_ranks(times: Mapping[str, Sequence[float]], rule: SlowRule) -> list[Outlier]:
    """Ranks that are slower than the others; `times` has one number per rank for each timer."""
    outliers: list[Outlier] = []
    for timer, values in times.items():
        expected = usual(values)
        # Short times differ by chance.
        if len(values) > 1 and expected >= rule.min_seconds:
            outliers += [
                Outlier(timer, rank, value, expected, "the ranks' mean")
                for rank, value in enumerate(values)
                if value > rule.ratio * expected
            ]
    return outliers


def slower_than_before(
    timer: str, rank: int, history: Sequence[float], rule: SlowRule
) -> list[Outlier]:
    """Whether the last of a rank's times is longer than the ten before it."""
    before = list(history[-HISTORY - 1 : -1])
    if not before:
        return []
    expected = mean(before)
    if expected < rule.min_seconds or history[-1] <= rule.ratio * expected:
        return []
    return [Outlier(timer, rank, history[-1], expected, "its own last ten")]


def slow_in_training(everyone: Sequence[RankTimes], rule: SlowRule) -> dict[int, str]:
    """Why each slow rank is slow, by rank.

    All steps end together, so only a rank's own compute and data wait show who is slow.
    """
    # Ranks may have counted different numbers of steps: all times are of the smallest number.
    num_steps = min(times.num_steps for times in everyone)
    if num_steps == 0:
        return {}

    compute = [times.compute / times.num_steps * num_steps for times in everyone]
    waits = [times.data_wait / times.num_steps * num_steps for times in everyone]
    steps = usual([times.total / times.num_steps * num_steps for times in everyone])

    reasons: dict[int, str] = {}
    for outlier in slow_ranks({"compute": compute}, rule):
        reasons[outlier.rank] = f"{outlier} over {num_steps} steps"

    # Usual waits are near zero, so that a ratio of them says nothing: a wait counts by its share
    # of the step.
    usual_wait = usual(waits)
    for rank, seconds in enumerate(waits):
        if steps >= rule.min_seconds and seconds - usual_wait > (rule.ratio - 1) * steps:
            comparison = (
                f"ranks wait {usual_wait:.3f} s on average, {num_steps} steps take {steps:.3f} s"
            )
            reasons[rank] = f"rank {rank}: waited {seconds:.3f} s for its data; {comparison}"

    return {rank: f"{text}, on {everyone[rank].host}" for rank, text in sorted(reasons.items())}


def write_report(
    times: Mapping[str, Sequence[float]], outliers: Sequence[Outlier], rule: SlowRule
) -> str:
    """A table of all ranks, and the outliers."""
    num_ranks = len(next(iter(times.values()), ()))
    lines = [f"{'rank':<6}" + "".join(f"{timer:>24}" for timer in times)]
    for rank in range(num_ranks):
        cells = [f"{seconds[rank]:>24.4f}" for seconds in times.values()]
        lines.append(f"{rank:<6}" + "".join(cells))
    means = [f"{usual(seconds):>24.4f}" for seconds in times.values()]
    lines.append(f"{'mean':<6}" + "".join(means))
    lines += [
        "",
        f"seconds in all profiled steps; slow = more than {rule.ratio:g} times the mean, where "
        f"that is at least {rule.min_seconds:g} s",
    ]

    lines += [str(outlier) for outlier in outliers] or ["no rank is slow"]
    return "\n".join(lines) + "\n"


class SlowRankReporter:
    """Reports a rank when it becomes slow, not again while it stays slow."""

    def __init__(self, every: int = COMPARE_EVERY) -> None:
        self.every = every
        self._slow: frozenset[int] = frozenset()

    def after_step(
        self, step: int, ratio: float | None, world: RankGroup, take_times: Callable[[], RankTimes]
    ) -> list[str]:
        """Every `every` steps, exchange the times of all ranks.

        Returns a text for each rank that has become slow.

        All ranks call it together. The times are measured already, so that nothing waits for the
        device.
        """
        # The same answer on all ranks, so that all of them gather or none does.
        if ratio is None or world.size == 1 or step % self.every:
            return []
        times = replace(take_times(), host=socket.gethostname())
        reasons = slow_in_training(world.gather(times), SlowRule(ratio))
        newly_slow = [text for rank, text in reasons.items() if rank not in self._slow]
        self._slow = frozenset(reasons)
        return newly_slow
