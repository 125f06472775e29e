"""What ranks agree on between two steps: continue, save, stop, roll back or give up. Requests come from
`headway stop` (a small file in the run folder), from signals and from the health checks of the run. Imports without torch."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import CheckpointError, ConfigError, HeadwayError, LaunchError
from headway.runtime.heartbeat import Beat, is_alive, read_beats
from headway.runtime.json_file import load_json
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup
    from headway.runtime.stop import StopSignal

FILE = "stop.json"
POLL_SECONDS = 0.5
STOP_COMMAND = "headway stop"
SAVE, STOP = 1, 2


@dataclass(frozen=True)
class StopRequest:
    """A request of `headway stop`, to take effect after step `at_step`; None = now."""

    at_step: int | None = None
    save_only: bool = False


def request_stop(run_dir: Path, request: StopRequest) -> dict[str, object]:
    """Leave a request for a running run; returns the request and the run's step."""
    if not (run_dir / "recipe.yaml").is_file():
        raise ConfigError(
            f"{run_dir} is not a run folder (it has no recipe.yaml). Give the folder of a run, e.g. runs/my-run."
        )
    if request.at_step is not None and request.at_step < 0:
        raise ConfigError(f"--at-step is {request.at_step}; it must not be negative.")
    alive = [beat for beat in read_beats(run_dir) if is_alive(beat)]
    if not alive and not is_supervised(run_dir):
        raise LaunchError(
            f"{run_dir}: none of its ranks is running, so there is nothing to stop. See {run_dir / 'train.log'}."
        )
    write_atomic(run_dir / FILE, json.dumps(asdict(request)) + "\n")
    return {
        "run": str(run_dir),
        **asdict(request),
        "step": max((beat.step for beat in alive), default=None),
        "ranks": len(alive),
    }


def remove_request(run_dir: Path) -> None:
    """Remove a request that was handled or is out of date."""
    (run_dir / FILE).unlink(missing_ok=True)


def read_request(run_dir: Path) -> StopRequest | None:
    """The request in the run folder; None if it is missing or unreadable."""
    try:
        return StopRequest(**load_json(run_dir / FILE))
    except (OSError, ValueError, TypeError):
        return None


def is_supervised(run_dir: Path) -> bool:
    """Whether a supervisor watches the run; it may be between two starts."""
    try:
        found = load_json(run_dir / "logs" / "supervisor.json")
        return is_alive(
            Beat(0, found["pid"], found["host"], 0, "", 0.0, found["at"]), silent_seconds=30.0
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


class RequestPoller:
    """Reads the request file at most every POLL_SECONDS and remembers a request until its step comes. Used by the first rank."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._next_poll = 0.0
        self._found: StopRequest | None = None

    def due(self, step: int) -> StopRequest | None:
        """The request to handle after this step."""
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            self._found = read_request(self.run_dir)
        request = self._found
        return (
            request
            if request is not None and (request.at_step is None or step >= request.at_step)
            else None
        )

    def clear(self) -> None:
        remove_request(self.run_dir)
        self._found = None


@dataclass(frozen=True)
class Decision:
    """What happens next, the same on every rank."""

    stopped_by: str | None = None
    """A signal that any rank received, or STOP_COMMAND."""
    save: bool = False
    bad_step: int | None = None
    """A step to roll back."""
    gives_up: bool = False
    is_damaged: bool = False
    """Some data is not what it was."""


class Control:
    """Agrees with all ranks on a Decision between steps, in one exchange of five numbers."""

    def __init__(
        self, world: RankGroup, run_dir: Path, stop: StopSignal, steps_before: int = 0
    ) -> None:
        self.world, self.stop, self.steps_before = world, stop, steps_before
        self.requests = RequestPoller(run_dir) if world.rank == 0 else None

    def decide(
        self,
        step: int,
        bad_step: int | None = None,
        *,
        gives_up: bool = False,
        is_damaged: bool = False,
    ) -> Decision:
        """What to do after this step; `bad_step` and `gives_up` are what this rank's health check says, `is_damaged` its data check."""
        request = self.requests.due(self.steps_before + step) if self.requests is not None else None
        local = [
            0 if self.stop.requested is None else signal.Signals[self.stop.requested].value,
            0 if request is None else SAVE if request.save_only else STOP,
            0 if bad_step is None else bad_step,
            int(gives_up),
            int(is_damaged),
        ]
        number, requested, bad, any_gives_up, any_damaged = self.world.max_each(local)
        if request is not None and self.requests is not None:
            self.requests.clear()
        stopped_by = (
            signal.Signals(number).name if number else STOP_COMMAND if requested == STOP else None
        )
        return Decision(
            stopped_by, requested == SAVE, bad or None, bool(any_gives_up), bool(any_damaged)
        )

    def in_hurry(self) -> bool:
        """Whether any rank has little time left to save."""
        return bool(self.world.max(int(self.stop.in_hurry())))


def exit_code(stopped_by: str) -> int:
    """128 plus the signal's number, as launchers expect; a stop request counts as SIGTERM."""
    return 128 + (
        signal.SIGTERM if stopped_by == STOP_COMMAND else signal.Signals[stopped_by].value
    )


def on_first_rank(world: RankGroup, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` on the first rank and return its result (plain Python) on every rank; a user error is raised on every rank."""
    result: dict[str, Any] = {}
    if world.rank == 0:
        try:
            result = work()
        except HeadwayError as problem:
            world.gather({"error": str(problem), "exit_code": problem.exit_code})
            raise
    result = world.gather(result)[0]
    if "error" in result:
        raise (ConfigError if result["exit_code"] == ConfigError.exit_code else CheckpointError)(
            result["error"]
        )
    return result
