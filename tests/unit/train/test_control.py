"""What ranks agree on between two steps, and what a save under a bad step does: nothing."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headway.parallel.collectives import RankGroup
from headway.runtime.stop import StopSignal
from headway.train.control import STOP_COMMAND, Control, Decision, exit_code
from headway.train.health import BadStep
from headway.train.run import Run


@pytest.mark.parametrize(
    ("signal", "asked", "decision"),
    [
        (None, None, Decision()),
        ("SIGTERM", None, Decision("SIGTERM")),
        ("SIGUSR1", None, Decision("SIGUSR1")),
        (None, {"save_only": False}, Decision(STOP_COMMAND)),
        (None, {"save_only": True}, Decision(None, save=True)),
        ("SIGINT", {"save_only": False}, Decision("SIGINT")),
        (None, {"at_step": 9}, Decision()),
        (None, {"at_step": 8}, Decision(STOP_COMMAND)),
    ],
)
def test_a_signal_or_a_request_becomes_a_decision(
    tmp_path: Path, signal: str | None, asked: dict[str, Any] | None, decision: Decision
) -> None:
    stop = StopSignal()
    stop.requested = signal
    control = Control(RankGroup(), tmp_path, stop, steps_before=5)
    if asked is not None:
        (tmp_path / "stop.json").write_text(json.dumps(asked))
    assert control.decide(3) == decision


def test_a_bad_step_and_a_lost_cause_are_passed_on(tmp_path: Path) -> None:
    control = Control(RankGroup(), tmp_path, StopSignal())
    assert control.decide(3, 2) == Decision(bad_step=2)
    assert control.decide(3, gives_up=True) == Decision(gives_up=True)


def test_exit_codes_are_those_launchers_know() -> None:
    assert [exit_code(reason) for reason in ("SIGINT", "SIGUSR1", "SIGTERM", STOP_COMMAND)] == [
        130,
        138,
        143,
        143,
    ]


@pytest.mark.parametrize("bad", [None, BadStep(4, "spike", "too high")])
def test_a_state_that_is_about_to_be_rolled_back_is_not_saved(bad: BadStep | None) -> None:
    saved: list[Any] = []
    nothing: Any = SimpleNamespace(
        beat=lambda *_: None, sync=lambda: None, stalled=lambda seconds: None, seconds=lambda: 1.0
    )
    state = SimpleNamespace(step=5, seconds=0.0, scalars=dict, records=list)
    saver = SimpleNamespace(save=lambda job, records: saved.append(job.step))
    run: Any = SimpleNamespace(
        clock=nothing,
        report=lambda everything: None,
        heart=nothing,
        metrics=nothing,
        meter=nothing,
        state=state,
        saver=saver,
        healer=SimpleNamespace(bad=bad),
        rollouts=None,
    )
    Run.save(run)
    assert saved == ([5] if bad is None else [])
