"""Callbacks in the background can neither slow nor break a run: a thread and a bounded queue each;
what raises or hangs is reported once and dropped.
"""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headway.track import callbacks as module
from headway.track.callbacks import Callback, CallbackThreads


class Seen(Callback):
    """Notes every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.calls.append(("step", step, metrics["loss"]))

    def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
        self.calls.append(("validate", step, metrics["valid"]["loss"]))

    def on_save(self, step: int, path: Path) -> None:
        self.calls.append(("save", step, path.name))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self.calls.append(("end", summary["steps"]))


def record(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": float(step), **more}


def test_calls_come_in_order_and_with_the_numbers_of_the_record() -> None:
    seen = Seen()
    threads = CallbackThreads([seen])
    threads.record(record(1, before={"valid": {"loss": 9.0}}), "before")
    threads.record(record(2, valid={"valid": {"loss": 8.0}}))
    threads.saved(2, Path("checkpoints/step-00000002"))
    threads.summary = {"steps": 2}
    threads.close()
    assert seen.calls == [
        ("validate", 0, 9.0), ("step", 1, 1.0), ("step", 2, 2.0), ("validate", 2, 8.0), ("save", 2, "step-00000002"), ("end", 2),
    ]  # fmt: skip


def test_a_callback_that_raises_is_reported_once_and_dropped_and_others_continue() -> None:
    class Broken(Callback):
        calls = 0

        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            Broken.calls += 1
            metrics["loss"].explode()

    said: list[str] = []
    seen = Seen()
    threads = CallbackThreads([Broken(), seen])
    threads.report = said.append
    for step in range(1, 50):
        threads.record(record(step))
    threads.summary = {"steps": 49}
    threads.close()
    assert Broken.calls == 1
    assert len(said) == 1
    assert "Broken failed in on_step: AttributeError: 'float' object" in said[0]
    assert "training continues" in said[0]
    assert len(seen.calls) == 50


def test_a_callback_cannot_change_what_others_see() -> None:
    class Greedy(Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            metrics["time"].clear()  # type: ignore[attr-defined]

    shared = record(1, time={"step_seconds": 0.5})
    threads = CallbackThreads([Greedy()])
    threads.record(shared)
    threads.close()
    assert shared["time"] == {"step_seconds": 0.5}


def test_a_callback_that_hangs_is_dropped_and_delays_nothing() -> None:
    release = threading.Event()

    class Stuck(Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            release.wait()

    said: list[str] = []
    threads = CallbackThreads([Stuck()], hang_seconds=0.05, end_seconds=0.1)
    threads.report = said.append
    threads.record(record(1))
    time.sleep(0.1)
    begun = time.perf_counter()
    for step in range(2, 200):
        threads.record(record(step))
    assert time.perf_counter() - begun < 0.5
    threads.close()
    assert len(said) == 1
    assert "Stuck has not returned from on_step for 0.05 s" in said[0]
    release.set()


def test_a_callback_that_hangs_at_the_end_delays_it_little() -> None:
    release = threading.Event()

    class Late(Callback):
        def on_end(self, summary: Mapping[str, Any]) -> None:
            release.wait()

    said: list[str] = []
    threads = CallbackThreads([Late()], end_seconds=0.05)
    threads.report = said.append
    threads.close()
    assert len(said) == 1
    assert "on_end at the end of the run" in said[0]
    release.set()


def test_a_slow_callback_misses_steps_but_no_validation() -> None:
    seen = Seen()
    gate = threading.Event()

    class Slow(Callback):
        def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
            gate.wait()
            seen.on_step(step, metrics)

        def on_validate(self, step: int, metrics: Mapping[str, Mapping[str, Any]]) -> None:
            seen.on_validate(step, metrics)

    threads = CallbackThreads([Slow()])
    threads.record(record(0))
    threads.record(record(1, valid={"valid": {"loss": 8.0}}))
    for step in range(2, module.MAX_QUEUED * 2):
        threads.record(record(step))
    gate.set()
    threads.close()
    steps = [call[1] for call in seen.calls if call[0] == "step"]
    assert ("validate", 1, 8.0) in seen.calls
    assert len(steps) <= module.MAX_QUEUED + 1
    assert steps[-1] == 2 * module.MAX_QUEUED - 1
    assert steps == sorted(steps)
