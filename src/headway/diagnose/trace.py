"""Where the time of a step goes: the events of a chrome trace come in, a summary whose parts add up
to the whole step goes out.

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

from headway.diagnose.profile import TRACE_DATA, TRACE_OPTIMIZER

Interval = tuple[float, float]
Intervals = list[Interval]

COMMUNICATION = re.compile(r"^(gloo:|nccl:|ncclDevKernel|ncclKernel|nccl)")
"""Names of events that are communication, on the host and on the device."""
DEVICE_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events that are computation on a device."""
NO_COMPUTE = ("c10d::", "ProfilerStep", "headway.", "record_param_comms")
"""Beginnings of names of host events that wrap others."""
MICROSECOND = 1e-6
"""The unit of times in a trace, in seconds."""


def union(intervals: Iterable[Interval]) -> Intervals:
    """The same times as disjoint intervals in order."""
    joined: Intervals = []
    for begin, end in sorted(intervals):
        # It touches or overlaps the last one.
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > begin:
            joined.append((begin, end))
    return joined


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """The times in both. Both lists are disjoint and in order."""
    common: Intervals = []
    i = 0
    j = 0
    while i < len(first) and j < len(second):
        begin = max(first[i][0], second[j][0])
        end = min(first[i][1], second[j][1])
        if begin < end:
            common.append((begin, end))

        # The one that ends first meets nothing more.
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1

    return common


def total_time(intervals: Intervals) -> float:
    """The time that disjoint intervals take together."""
    return sum(end - begin for begin, end in intervals)


def difference(first: Intervals, second: Intervals) -> Intervals:
    """The times of the first that are not in the second."""
    remaining: Intervals = []
    for begin, end in first:
        for other_begin, other_end in second:
            if other_end <= begin:
                continue
            if other_begin >= end:
                break
            if other_begin > begin:
                remaining.append((begin, other_begin))
            begin = max(begin, other_end)

        if begin < end:
            remaining.append((begin, end))

    return remaining


@dataclass(frozen=True)
class StepSummary:
    """Seconds per step, averaged over the profiled steps.

    All but `hidden_communication` add up to `step`.
    """

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
    # Complete events: those with a beginning and a length.
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    step_events = [event for event in timed if str(event["name"]).startswith("ProfilerStep")]
    # A step may have one annotation on the host and one on the device.
    num_steps = len({event["name"] for event in step_events})
    if not num_steps:
        return None
    steps = union(
        _interval(event) for event in step_events if event.get("cat") == "user_annotation"
    )

    # With kernels in the trace, the time of the device counts; otherwise that of the host.
    on_device = any(event.get("cat") == "kernel" for event in timed)
    work = [event for event in timed if _is_compute(event, on_device)]
    messages = [event for event in timed if _is_communication(event, on_device)]
    busy = intersection(union(map(_interval, work)), steps)
    communication = intersection(union(map(_interval, messages)), steps)
    optimizer = _annotated(timed, TRACE_OPTIMIZER, on_device)
    data = intersection(_annotated(timed, TRACE_DATA, on_device=False), steps)

    # Each moment belongs to one part, in this order: computation, communication, data wait.
    exposed = difference(communication, busy)
    waiting = difference(difference(data, busy), communication)
    per_step = MICROSECOND / num_steps
    parts = {
        "compute": total_time(difference(busy, optimizer)) * per_step,
        "optimizer": total_time(intersection(busy, optimizer)) * per_step,
        "exposed_communication": total_time(exposed) * per_step,
        "data_wait": total_time(waiting) * per_step,
    }
    total = total_time(steps) * per_step
    return StepSummary(
        num_steps=num_steps,
        step=total,
        hidden_communication=total_time(intersection(communication, busy)) * per_step,
        rest=max(0.0, total - sum(parts.values())),
        operations=_longest(work, on_device, num_steps),
        **parts,
    )


def _interval(event: Mapping[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_communication(event: Mapping[str, Any], on_device: bool) -> bool:
    """With kernels in the trace, only kernels count as communication, not the host events about
    them.
    """
    return (
        bool(COMMUNICATION.match(str(event["name"])))
        and (event.get("cat") == "kernel") is on_device
    )


def _is_compute(event: Mapping[str, Any], on_device: bool) -> bool:
    name = str(event["name"])
    if COMMUNICATION.match(name) or name.startswith(NO_COMPUTE):
        return False
    if on_device:
        return event.get("cat") in DEVICE_EVENTS
    return event.get("cat") == "cpu_op"


def _annotated(timed: Sequence[Mapping[str, Any]], name: str, on_device: bool) -> Intervals:
    """The times of a part of a step; on a device, of the kernels that were launched in it."""
    category = "gpu_user_annotation" if on_device else "user_annotation"
    return union(
        _interval(event)
        for event in timed
        if event["name"] == name and event.get("cat") == category
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
        # Operations that have begun and not ended: (end, name). An operation that begins within
        # another is called by it; of those that begin together the longest is the caller.
        stack: list[tuple[float, str]] = []
        for begin, end, name in sorted(events, key=lambda event: (event[0], -event[1])):
            while stack and stack[-1][0] <= begin:
                stack.pop()

            seconds[name] = seconds.get(name, 0.0) + end - begin
            calls[name] = calls.get(name, 0) + 1
            # Kernels of one stream do not call each other.
            if stack and not on_device:
                seconds[stack[-1][1]] -= end - begin

            stack.append((end, name))

    longest = sorted(seconds, key=lambda name: -seconds[name])[:count]
    return tuple(
        (name, round(calls[name] / num_steps), seconds[name] * MICROSECOND / num_steps)
        for name in longest
    )


def write_page(summary: StepSummary, rank: int, world: int, device: str) -> str:
    """The summary as a page of text."""
    lines = [
        f"rank {rank} of {world} on {device}: {summary.num_steps} "
        f"steps, {summary.step * 1e3:.1f} ms each",
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
        f"{'communication, hidden':<26}{summary.hidden_communication * 1e3:>14.2f} "
        "  (behind the above)",
        "",
    ]
    lines.append(f"{'operations by self time':<60}{'calls':>8}{'ms per step':>14}")
    lines += [
        f"{name[:58]:<60}{calls:>8}{seconds * 1e3:>14.2f}"
        for name, calls, seconds in summary.operations
    ]
    return "\n".join(lines) + "\n"
