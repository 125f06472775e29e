"""What ranks agree on between two steps: continue, save, stop, roll back or give up.

Requests come from `headway stop` (a small file in the run folder), from signals and from the health
checks of the run. Imports without torch.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.config.options import option
from headway.errors import CheckpointError, ConfigError, HeadwayError, LaunchError
from headway.runtime.heartbeat import Beat, is_alive, read_beats
from headway.runtime.json_file import load_json
from headway.runtime.storage import write_atomic

if TYPE_CHECKING:
    from headway.parallel.collectives import RankGroup
    from headway.runtime.stop import StopSignal

FILE = "stop.json"
POLL_SECONDS = 0.5
"""Between two looks at the request file: steps may be many a second, and the disk may be remote."""
SUPERVISOR_SECONDS = 30.0
"""A supervisor that has written nothing for this long is dead."""
STOP_COMMAND = "headway stop"
"""`stopped_by` of a run that a request has stopped; signals have their names there."""
SAVE = 1
STOP = 2
"""Requests as ranks exchange them; 0 = none."""


@dataclass(frozen=True)
class StopRequest:
    """A request of `headway stop`, to take effect after step `at_step`; None = now."""

    at_step: int | None = option(None, "Stop after this step; default: after the current step.")
    save_only: bool = option(False, "Save a checkpoint and continue training.", "--save-only")


def request_stop(run_dir: Path, request: StopRequest) -> dict[str, object]:
    """Leave a request for a running run; returns the request and the run's step."""
    if not (run_dir / "recipe.yaml").is_file():
        raise ConfigError(
            f"{run_dir} is not a run folder (it has no recipe.yaml). "
            "Give the folder of a run, e.g. runs/my-run."
        )
    if request.at_step is not None and request.at_step < 0:
        raise ConfigError(f"--at-step is {request.at_step}; it must not be negative.")
    # Between two starts no rank is alive, but the next one will read the request.
    alive = [beat for beat in read_beats(run_dir) if is_alive(beat)]
    if not alive and not is_supervised(run_dir):
        raise LaunchError(
            f"{run_dir}: none of its ranks is running, so there is nothing to stop. "
            f"See {run_dir / 'train.log'}."
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
    # A file that anybody may write must not end a run.
    except (OSError, ValueError, TypeError):
        return None


def is_supervised(run_dir: Path) -> bool:
    """Whether a supervisor watches the run; it may be between two starts."""
    try:
        record = load_json(run_dir / "logs" / "supervisor.json")
        beat = Beat(0, record["pid"], record["host"], 0, "", 0.0, record["at"])
        return is_alive(beat, silent_seconds=SUPERVISOR_SECONDS)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class RequestPoller:
    """Reads the request file at most every POLL_SECONDS. Used by the first rank.

    A request is remembered until its step comes.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._next_poll = 0.0
        self._request: StopRequest | None = None

    def due(self, step: int) -> StopRequest | None:
        """The request to handle after this step."""
        # Between two polls the last answer holds, so that a request is acted on at its very step.
        now = time.monotonic()
        if now >= self._next_poll:
            self._next_poll = now + POLL_SECONDS
            self._request = read_request(self.run_dir)
        request = self._request
        if request is None:
            return None
        if request.at_step is not None and step < request.at_step:
            return None
        return request

    def clear(self) -> None:
        """Remove the request: it was handled."""
        remove_request(self.run_dir)
        self._request = None


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
    has_callback_requests: bool = False
    """Callbacks on the first rank requested something; all ranks exchange it next."""


class Control:
    """Agrees with all ranks on a Decision between steps, in one exchange of six numbers.

    Each number is the largest of all ranks, so that what one rank sees, all ranks do.
    """

    def __init__(
        self, world: RankGroup, run_dir: Path, stop: StopSignal, steps_before: int = 0
    ) -> None:
        self.world = world
        self.stop = stop
        self.steps_before = steps_before
        self.requests: RequestPoller | None = None
        if world.rank == 0:
            self.requests = RequestPoller(run_dir)

    def decide(
        self,
        step: int,
        bad_step: int | None = None,
        *,
        gives_up: bool = False,
        is_damaged: bool = False,
        has_callback_requests: bool = False,
    ) -> Decision:
        """What to do after this step.

        `bad_step` and `gives_up` are what this rank's health check says, `is_damaged` its data
        check, `has_callback_requests` what its callbacks say.
        """
        local_signal = 0
        if self.stop.requested is not None:
            local_signal = signal.Signals[self.stop.requested].value

        local_request = 0
        if self.requests is not None:
            request = self.requests.due(self.steps_before + step)
            if request is not None:
                local_request = SAVE if request.save_only else STOP

        # Steps count from 1, so that 0 is no bad step.
        local = [
            local_signal,
            local_request,
            bad_step or 0,
            int(gives_up),
            int(is_damaged),
            int(has_callback_requests),
        ]
        signal_number, requested, bad, any_gives_up, any_damaged, any_callback = (
            self.world.max_each(local)
        )

        # Removed only now, when every rank knows of it.
        if local_request and self.requests is not None:
            self.requests.clear()

        stopped_by = None
        if signal_number:
            stopped_by = signal.Signals(signal_number).name
        elif requested == STOP:
            stopped_by = STOP_COMMAND
        return Decision(
            stopped_by,
            save=requested == SAVE,
            bad_step=bad or None,
            gives_up=bool(any_gives_up),
            is_damaged=bool(any_damaged),
            has_callback_requests=bool(any_callback),
        )

    def in_hurry(self) -> bool:
        """Whether any rank has little time left to save."""
        return bool(self.world.max(int(self.stop.in_hurry())))


def exit_code(stopped_by: str) -> int:
    """128 plus the signal's number, as launchers expect; a stop request counts as SIGTERM."""
    if stopped_by == STOP_COMMAND:
        return 128 + signal.SIGTERM
    return 128 + signal.Signals[stopped_by].value


def on_first_rank(world: RankGroup, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` on the first rank and return its result (plain Python) on every rank.

    A user error is raised on every rank.
    """
    result: dict[str, Any] = {}
    if world.rank == 0:
        try:
            result = work()
        except HeadwayError as problem:
            # The others wait in the exchange below; without an answer they would hang.
            world.gather({"error": str(problem), "exit_code": problem.exit_code})
            raise
    result = world.gather(result)[0]
    if "error" in result:
        # The type is not exchanged; what matters on the other ranks is the exit code.
        error_type = CheckpointError
        if result["exit_code"] == ConfigError.exit_code:
            error_type = ConfigError
        raise error_type(result["error"])
    return result
