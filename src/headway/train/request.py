"""`headway stop`: a small file in the run folder by which another shell asks a run to save, or to save and leave. Imports without torch."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from headway.errors import ConfigError, LaunchError
from headway.runtime.heartbeat import is_alive, read_beats
from headway.runtime.json_file import load_json
from headway.runtime.storage import write_atomic

FILE = "stop.json"
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Request:
    """What is asked for, once `at_step` steps are done; None = now."""

    at_step: int | None = None
    save_only: bool = False


def ask(run_dir: Path, request: Request) -> dict[str, object]:
    """Leave a request for a run that goes on; returns what was asked and where the run was."""
    if not (run_dir / "recipe.yaml").is_file():
        raise ConfigError(f"{run_dir} is no run folder (it holds no recipe.yaml). Give the folder of a run, e.g. runs/my-run.")
    if request.at_step is not None and request.at_step < 0:
        raise ConfigError(f"--at-step is {request.at_step}; it must not be negative.")
    alive = [beat for beat in read_beats(run_dir) if is_alive(beat)]
    if not alive and not is_supervised(run_dir):
        raise LaunchError(f"{run_dir}: no rank of it runs, so there is nothing to stop. Look at {run_dir / 'train.log'}.")
    write_atomic(run_dir / FILE, json.dumps(asdict(request)) + "\n")
    return {"run": str(run_dir), **asdict(request), "step": max((beat.step for beat in alive), default=None), "ranks": len(alive)}


def withdraw(run_dir: Path) -> None:
    """The request was heeded, or is of no use any more."""
    (run_dir / FILE).unlink(missing_ok=True)


def read_request(run_dir: Path) -> Request | None:
    """What is asked of a run now."""
    try:
        return Request(**load_json(run_dir / FILE))
    except (OSError, ValueError, TypeError):
        return None


def is_supervised(run_dir: Path) -> bool:
    """Whether a supervisor looks after the run, which may be between two starts."""
    from headway.runtime.heartbeat import Beat

    try:
        found = load_json(run_dir / "logs" / "supervisor.json")
        return is_alive(Beat(0, found["pid"], found["host"], 0, "", 0.0, found["at"]), silent_seconds=30.0)
    except (OSError, ValueError, KeyError, TypeError):
        return False


class Mailbox:
    """The request file as the first rank sees it: looked at now and then, remembered until it is due."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._look_at = 0.0
        self._found: Request | None = None

    def due(self, step: int) -> Request | None:
        """The request that is to be heeded after this step."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_SECONDS
            self._found = read_request(self.run_dir)
        request = self._found
        return request if request is not None and (request.at_step is None or step >= request.at_step) else None

    def heeded(self) -> None:
        """Forget the request."""
        withdraw(self.run_dir)
        self._found = None
