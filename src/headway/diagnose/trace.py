"""Where the time of a step goes: the events of a chrome trace come in, a summary whose parts add up to the whole goes out.

compute         something is calculated, outside the optimizer
optimizer       something is calculated inside it
communication   exposed: nothing is calculated meanwhile; hidden: something is
data wait       the step waits for its batch, and nothing else happens
rest            none of these: Python, launches, waiting for other ranks to begin
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headway.train import TRACE_DATA, TRACE_OPTIMIZER

Span = tuple[float, float]
Spans = list[Span]

EXCHANGE = re.compile(r"^(gloo:|nccl:|ncclDevKernel|ncclKernel|nccl)")
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
NO_WORK = ("c10d::", "ProfilerStep", "headway.", "record_param_comms")


def union(spans: Iterable[Span]) -> Spans:
    """The same moments as disjoint spans in order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        elif end > begin:
            joined.append((begin, end))
    return joined


def both(one: Spans, two: Spans) -> Spans:
    """The moments in both."""
    found: Spans = []
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


def length(spans: Spans) -> float:
    """Their time together."""
    return sum(end - begin for begin, end in spans)


def without(one: Spans, two: Spans) -> Spans:
    """The moments of the first that are not in the second."""
    left: Spans = []
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
class Summary:
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
    """What takes longest: name, calls and seconds per step."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def summarize_trace(events: Sequence[Mapping[str, Any]]) -> Summary | None:
    """The summary of a trace; None if it holds no whole step."""
    timed = [event for event in events if event.get("ph") == "X" and event.get("dur")]
    steps = union(_span(one) for one in timed if str(one["name"]).startswith("ProfilerStep") and one.get("cat") == "user_annotation")
    num = len({one["name"] for one in timed if str(one["name"]).startswith("ProfilerStep")})
    if not num:
        return None
    on_device = any(one.get("cat") == "kernel" for one in timed)
    work = [one for one in timed if _is_work(one, on_device)]
    busy = both(union(_span(one) for one in work), steps)
    talk = both(union(_span(one) for one in timed if _is_exchange(one, on_device)), steps)
    optimizer = _annotated(timed, TRACE_OPTIMIZER, on_device)
    data = _annotated(timed, TRACE_DATA, on_device=False)
    exposed = without(talk, busy)
    waiting = without(without(both(data, steps), busy), talk)
    per = 1e-6 / num
    parts = {
        "compute": length(without(busy, optimizer)) * per,
        "optimizer": length(both(busy, optimizer)) * per,
        "exposed_communication": length(exposed) * per,
        "data_wait": length(waiting) * per,
    }
    total = length(steps) * per
    return Summary(
        num_steps=num,
        step=total,
        hidden_communication=length(both(talk, busy)) * per,
        rest=max(0.0, total - sum(parts.values())),
        operations=_longest(work, on_device, num),
        **parts,
    )


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _is_exchange(event: Mapping[str, Any], on_device: bool) -> bool:
    """Where there are kernels, the kernel is the exchange and what the host says about it is not."""
    return bool(EXCHANGE.match(str(event["name"]))) and (event.get("cat") == "kernel") is on_device


def _is_work(event: Mapping[str, Any], on_device: bool) -> bool:
    name = str(event["name"])
    if EXCHANGE.match(name) or name.startswith(NO_WORK):
        return False
    return event.get("cat") in (DEVICE_WORK if on_device else ("cpu_op",))


def _annotated(timed: Sequence[Mapping[str, Any]], name: str, on_device: bool) -> Spans:
    wanted = "gpu_user_annotation" if on_device else "user_annotation"
    return union(_span(one) for one in timed if one["name"] == name and one.get("cat") == wanted)


def _longest(work: Sequence[Mapping[str, Any]], on_device: bool, num_steps: int, count: int = 12) -> tuple[tuple[str, int, float], ...]:
    """By time of their own: an operation that calls others counts what is left after them."""
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    threads: dict[Any, list[tuple[float, float, str]]] = {}
    for event in work:
        threads.setdefault(event.get("tid"), []).append((*_span(event), str(event["name"])))
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
    return tuple((name, round(calls[name] / num_steps), seconds[name] * 1e-6 / num_steps) for name in first)


def write_page(summary: Summary, rank: int, world: int, device: str) -> str:
    """One page for people."""
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
    lines += ["", f"{'communication, hidden':<26}{summary.hidden_communication * 1e3:>14.2f}   (behind the above)", ""]
    lines.append(f"{'operations by own time':<60}{'calls':>8}{'ms per step':>14}")
    lines += [f"{name[:58]:<60}{calls:>8}{seconds * 1e3:>14.2f}" for name, calls, seconds in summary.operations]
    return "\n".join(lines) + "\n"
