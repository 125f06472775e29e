"""The parts of a step from a trace with known times."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.diagnose.profile import TRACE_DATA, TRACE_FORWARD_BACKWARD, TRACE_OPTIMIZER
from headway.diagnose.trace import (
    difference,
    intersection,
    summarize_trace,
    total_time,
    union,
    write_page,
)

INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10)).map(
        lambda s: (float(s[0]), float(s[0] + s[1]))
    ),
    max_size=8,
)


def moments(spans: list[tuple[float, float]]) -> set[int]:
    return {moment for begin, end in spans for moment in range(int(begin), int(end))}


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_moments(
    first: list[tuple[float, float]], second: list[tuple[float, float]]
) -> None:
    a = union(first)
    b = union(second)
    assert moments(a) == moments(first)
    assert total_time(a) == len(moments(first))
    assert moments(intersection(a, b)) == moments(first) & moments(second)
    assert moments(difference(a, b)) == moments(first) - moments(second)


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts * 1000, "dur": dur * 1000, "tid": tid}


ON_CPU = [
    event("ProfilerStep#7", "user_annotation", 0, 100),
    event(TRACE_DATA, "user_annotation", 0, 10),
    event(TRACE_FORWARD_BACKWARD, "user_annotation", 10, 70),
    event("aten::linear", "cpu_op", 10, 30),
    event("aten::mm", "cpu_op", 12, 20),
    event("gloo:all_reduce", "user_annotation", 30, 40, tid=2),
    event("c10d::allreduce_", "cpu_op", 28, 4),
    event(TRACE_OPTIMIZER, "user_annotation", 80, 18),
    event("aten::_fused_adamw_", "cpu_op", 80, 15),
    {"ph": "f", "name": "flow"},
]


def test_the_parts_of_a_cpu_step_add_up() -> None:
    summary = summarize_trace(ON_CPU)
    assert summary is not None
    assert summary.num_steps == 1
    parts = (
        summary.compute,
        summary.optimizer,
        summary.exposed_communication,
        summary.data_wait,
        summary.rest,
    )
    assert parts == pytest.approx((0.030, 0.015, 0.030, 0.010, 0.015))
    assert summary.hidden_communication == pytest.approx(0.010)
    assert sum(parts) == pytest.approx(summary.step)
    self_seconds = {name: seconds for name, _, seconds in summary.operations}
    assert self_seconds["aten::linear"] == pytest.approx(0.010)
    assert self_seconds["aten::mm"] == pytest.approx(0.020)
    page = write_page(summary, 0, 2, "cpu")
    assert "communication, exposed" in page
    assert "30.0%" in page


def test_on_a_gpu_kernels_count_and_what_the_host_says_does_not() -> None:
    on_gpu = [
        event("ProfilerStep#3", "user_annotation", 0, 50),
        event("ProfilerStep#4", "user_annotation", 50, 50),
        event("aten::mm", "cpu_op", 0, 90),
        event("nccl:all_reduce", "user_annotation", 0, 90),
        event("ampere_gemm", "kernel", 5, 40, tid=7),
        event("ncclDevKernel_AllReduce", "kernel", 30, 40, tid=8),
        event(TRACE_OPTIMIZER, "gpu_user_annotation", 80, 10, tid=7),
        event("adam_kernel", "kernel", 80, 10, tid=7),
    ]
    summary = summarize_trace(on_gpu)
    assert summary is not None
    assert summary.num_steps == 2
    assert summary.step == pytest.approx(0.050)
    assert summary.compute == pytest.approx(0.020)
    assert summary.optimizer == pytest.approx(0.005)
    assert (summary.hidden_communication, summary.exposed_communication) == pytest.approx(
        (0.0075, 0.0125)
    )


def test_a_trace_without_a_whole_step_has_no_summary() -> None:
    assert summarize_trace(ON_CPU[1:]) is None
