"""Where the time of a step goes: the events of a chrome trace come in, a summary whose parts add up to the whole step goes out.

compute         computation outside the optimizer
optimizer       computation inside the optimizer
communication   exposed: no computation at the same time; hidden: behind computation
data wait       waiting for the batch, with no computation or communication
rest            everything else: Python, kernel launches, waiting for other ranks to begin
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

TRACE_DATA = "headway.data"
TRACE_FORWARD_BACKWARD = "headway.forward_backward"
TRACE_OPTIMIZER = "headway.optimizer"
"""Names of the parts of a step in a profiler trace."""

Interval = tuple[float, float]
Intervals = list[Interval]

COMMUNICATION = re.compile(r"^(gloo:|nccl:|ncclDevKernel|ncclKernel|nccl)")
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
NO_COMPUTE = ("c10d::", "ProfilerStep", "headway.", "record_param_comms")


def union(intervals: Iterable[Interval]) -> Intervals:
    """The same times as disjoint intervals in order."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > begin:
            joined.append((begin, end))
    return joined


def intersection(one: Intervals, two: Intervals) -> Intervals:
    """The times in both."""
    found: Intervals = []
    i = j = 0
    while i < len(one) and j < len(two):
        begin, end = max(one[i][0], two[j][0]), min(one[i][1], two[j][1])
        if begin < end:
            found.append((begin, end))
        if one[i][1] < two[j][1]:
            i += 1
        else:
            j += 1
    return found


def total_time(intervals: Intervals) -> float:
    """Their total time."""
    return sum(end - begin for begin, end in intervals)


def difference(one: Intervals, two: Intervals) -> Intervals:
    """The times of the first that are not in the second."""
    left: Intervals = []
    for begin, end in one:
        for other_begin, other_end in two:
            if other_end <= begin:
                continue
            if other_begin >= end:
                break
            if other_begin > begin:
                left.append((begin, other_begin))
            begin = max(begin, other_end)
        if begin < end:
            left.append((begin, end))
    return left


@dataclass(frozen=True)
class StepSummary:
    """Seconds per step, averaged over the profiled steps; all but `hidden_communication` add up to `step`."""

    num_steps: int
    step: float
    compute: float
    optimizer: float
    exposed_communication: float
    hidden_communication: float
    data_wait: float
    rest: float
    operations: tuple[tuple[str, int, float], ...] = ()
    """The longest: name, calls and seconds of self time per step."""


def summarize_trace(events: Sequence[Mapping[str, Any]]) -> StepSummary | None:
    """The summary of a trace; None if it holds no whole step."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    steps = union(
        _interval(one)
        for one in timed
        if str(one["name"]).startswith("ProfilerStep") and one.get("cat") == "user_annotation"
    )
    num = len({one["name"] for one in timed if str(one["name"]).startswith("ProfilerStep")})
    if not num:
        return None
    on_device = any(one.get("cat") == "kernel" for one in timed)
    work = [one for one in timed if _is_compute(one, on_device)]
    busy = intersection(union(_interval(one) for one in work), steps)
    communication = intersection(
        union(_interval(one) for one in timed if _is_communication(one, on_device)), steps
    )
    optimizer = _annotated(timed, TRACE_OPTIMIZER, on_device)
    data = _annotated(timed, TRACE_DATA, on_device=False)
    exposed = difference(communication, busy)
    waiting = difference(difference(intersection(data, steps), busy), communication)
    per = 1e-6 / num
    parts = {
        "compute": total_time(difference(busy, optimizer)) * per,
        "optimizer": total_time(intersection(busy, optimizer)) * per,
        "exposed_communication": total_time(exposed) * per,
        "data_wait": total_time(waiting) * per,
    }
    total = total_time(steps) * per
    return StepSummary(
        num_steps=num,
        step=total,
        hidden_communication=total_time(intersection(communication, busy)) * per,
        rest=max(0.0, total - sum(parts.values())),
        operations=_longest(work, on_device, num),
        **parts,
    )


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_communication(event: Mapping[str, Any], on_device: bool) -> bool:
    """With kernels in the trace, only kernels count as communication, not the host events about them."""
    return (
        bool(COMMUNICATION.match(str(event["name"])))
        and (event.get("cat") == "kernel") is on_device
    )


def _is_compute(event: Mapping[str, Any], on_device: bool) -> bool:
    name = str(event["name"])
    if COMMUNICATION.match(name) or name.startswith(NO_COMPUTE):
        return False
    return event.get("cat") in (DEVICE_EVENTS if on_device else ("cpu_op",))


def _annotated(timed: Sequence[Mapping[str, Any]], name: str, on_device: bool) -> Intervals:
    wanted = "gpu_user_annotation" if on_device else "user_annotation"
    return union(
        _interval(one) for one in timed if one["name"] == name and one.get("cat") == wanted
    )


def _longest(
    work: Sequence[Mapping[str, Any]], on_device: bool, num_steps: int, count: int = 12
) -> tuple[tuple[str, int, float], ...]:
    """The operations with the most self time: without the time of the operations they call."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    threads: dict[Any, list[tuple[float, float, str]]] = {}
    for event in work:
        threads.setdefault(event.get("tid"), []).append((*_interval(event), str(event["name"])))
    for events in threads.values():
        stack: list[tuple[float, str]] = []
        for begin, end, name in sorted(events, key=lambda one: (one[0], -one[1])):
            while stack and stack[-1][0] <= begin:
                stack.pop()
            seconds[name] = seconds.get(name, 0.0) + end - begin
            calls[name] = calls.get(name, 0) + 1
            if stack and not on_device:
                seconds[stack[-1][1]] -= end - begin
            stack.append((end, name))
    first = sorted(seconds, key=lambda name: -seconds[name])[:count]
    return tuple(
        (name, round(calls[name] / num_steps), seconds[name] * 1e-6 / num_steps) for name in first
    )


def write_page(summary: StepSummary, rank: int, world: int, device: str) -> str:
    """The summary as a page of text."""
    lines = [
        f"rank {rank} of {world} on {device}: {summary.num_steps} steps, {summary.step * 1e3:.1f} ms each",
        "",
        f"{'part':<26}{'ms per step':>14}{'share':>9}",
    ]
    for label, value in (
        ("compute", summary.compute),
        ("optimizer", summary.optimizer),
        ("communication, exposed", summary.exposed_communication),
        ("data wait", summary.data_wait),
        ("rest", summary.rest),
    ):
        lines.append(f"{label:<26}{value * 1e3:>14.2f}{value / summary.step:>9.1%}")
    lines += [
        "",
        f"{'communication, hidden':<26}{summary.hidden_communication * 1e3:>14.2f}   (behind the above)",
        "",
    ]
    lines.append(f"{'operations by self time':<60}{'calls':>8}{'ms per step':>14}")
    lines += [
        f"{name[:58]:<60}{calls:>8}{seconds * 1e3:>14.2f}"
        for name, calls, seconds in summary.operations
    ]
    return "\n".join(lines) + "\n"
