"""What ranks agree on between two steps, and what a save under a bad step does: nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.parallel.collectives import RankGroup
from headway.runtime.stop import StopSignal
from headway.train import saving
from headway.train.orders import REQUEST, Order, Orders, exit_code


@pytest.mark.parametrize(
    ("signal", "asked", "order"),
    [
        (None, None, Order()),
        ("SIGTERM", None, Order("SIGTERM")),
        ("SIGUSR1", None, Order("SIGUSR1")),
        (None, {"save_only": False}, Order(REQUEST)),
        (None, {"save_only": True}, Order(None, save=True)),
        ("SIGINT", {"save_only": False}, Order("SIGINT")),
        (None, {"at_step": 9}, Order()),
        (None, {"at_step": 8}, Order(REQUEST)),
    ],
)
def test_a_signal_or_a_request_becomes_an_order(tmp_path: Path, signal: str | None, asked: dict[str, Any] | None, order: Order) -> None:
    stop = StopSignal()
    stop.requested = signal
    orders = Orders(RankGroup(), tmp_path, stop, steps_before=5)
    if asked is not None:
        (tmp_path / "stop.json").write_text(json.dumps(asked))
    assert orders.look(3) == order


def test_a_bad_step_and_a_lost_cause_are_passed_on(tmp_path: Path) -> None:
    orders = Orders(RankGroup(), tmp_path, StopSignal())
    assert orders.look(3, 2) == Order(bad_step=2)
    assert orders.look(3, is_hopeless=True) == Order(is_hopeless=True)


def test_exit_codes_are_those_launchers_know() -> None:
    assert [exit_code(one) for one in ("SIGINT", "SIGUSR1", "SIGTERM", REQUEST)] == [130, 138, 143, 143]


@pytest.mark.parametrize("bad", [None, (4, "spike")])
def test_a_state_that_is_about_to_be_undone_is_not_saved(bad: tuple[int, str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(saving, "report", lambda run, everything: None)
    nothing: Any = SimpleNamespace(beat=lambda *_: None, sync=lambda: None, stalled=lambda seconds: None, seconds=lambda: 1.0)
    state = SimpleNamespace(step=5, seconds=0.0, scalars=dict, records=list)
    saver = SimpleNamespace(save=lambda job, records: saved.append(job.step))
    run: Any = SimpleNamespace(heart=nothing, metrics=nothing, meter=nothing, state=state, saver=saver, healer=SimpleNamespace(bad=bad))
    saving.save(run, nothing)
    assert saved == ([5] if bad is None else [])
