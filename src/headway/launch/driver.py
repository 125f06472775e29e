"""The process that drives a job of the local and ssh targets: `python -m headway.launch.driver
RUN`.

In: RUN/launch.json. Out: an exit code, and RUN/logs/launch-state.json every second, so that
`headway launch status` can tell where the job is. It supervises the command of the target
(restarts, back-off, resume) and turns requests of `headway launch cancel` into signals.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from headway.config.load import load
from headway.config.shipped import find_recipe
from headway.errors import HeadwayError
from headway.launch.failure import is_stop_code
from headway.launch.supervise import Supervisor, make_supervisor
from headway.launch.targets.base import JobHandle, State, open_target, read_handle
from headway.launch.targets.driven import KILL, STOP, DriverState, cancel_level, recipe_words
from headway.runtime.log import start_logging
from headway.runtime.process import boot_id, process_start
from headway.runtime.stop import SIGNAL_EXIT
from headway.train.config import Recipe

log = logging.getLogger("headway")

POLL_SECONDS = 0.2
WRITE_EVERY = 5
"""Polls between two writes of the state."""
CANCEL_MESSAGES = {
    STOP: "cancelled: saving, then stopping",
    KILL: "cancelled again: killing all ranks",
}


class Driver:
    """Drives one job."""

    def __init__(self, handle: JobHandle) -> None:
        self.handle = handle
        self.target = cast(Any, open_target(handle.kind))
        pid = os.getpid()
        self.state = DriverState(
            "running", socket.gethostname(), boot_id(), pid, process_start(pid)
        )
        self.supervisor: Supervisor | None = None
        self._over = threading.Event()

    def run(self) -> int:
        """Run the job to its end; returns its exit code."""
        self.state.write(self.handle.run_dir)
        thread = threading.Thread(target=self._watch, name="headway-driver", daemon=True)
        message = ""
        try:
            self.supervisor = self._make_supervisor()
            thread.start()
            code = self.supervisor.run()
        except HeadwayError as problem:
            log.error("%s", problem)
            code = problem.exit_code
            message = str(problem).splitlines()[0]
        except KeyboardInterrupt:
            # Cancelled before the supervisor had begun.
            code = SIGNAL_EXIT + signal.SIGINT

        # The thread first: it must not write over the last state.
        self._over.set()
        if thread.ident is not None:
            thread.join()
        state = replace(self._now(), state=self._outcome(code), exit_code=code, message=message)
        self._write(state)
        return code

    def _make_supervisor(self) -> Supervisor:
        path, *overrides = recipe_words(self.handle.arguments)
        recipe = load(Recipe, find_recipe(path), overrides)
        settings = recipe.supervise
        # Where ranks are on other machines, their heartbeats are not here; agents look there.
        if not self.target.detects_hangs:
            settings = settings.model_copy(update={"hang_seconds": math.inf})
        supervisor = make_supervisor(
            self.target.command(self.handle), settings, recipe, self.handle.run_dir
        )
        supervisor.saved_step = lambda: self.target.saved_step(self.handle)
        return supervisor

    def _outcome(self, code: int) -> State:
        if code == 0:
            return "done"
        if is_stop_code(code) or cancel_level(self.handle.run_dir) > 0:
            return "cancelled"
        return "failed"

    def _now(self) -> DriverState:
        restarts = 0 if self.supervisor is None else self.supervisor.restarts
        return replace(self.state, attempt=restarts + 1, step=self.target.step(self.handle))

    def _watch(self) -> None:
        """Pass requests to the supervisor, and show that this process lives."""
        level = 0
        polls = 0
        while not self._over.wait(POLL_SECONDS):
            wanted = cancel_level(self.handle.run_dir)
            while level < wanted:
                level += 1
                log.info("%s", CANCEL_MESSAGES[level])
                # The supervisor passes it on. A second SIGINT means at once.
                os.kill(os.getpid(), signal.SIGINT)
                self._over.wait(POLL_SECONDS)
            polls += 1
            if polls % WRITE_EVERY == 0:
                self._write(self._now())

    def _write(self, state: DriverState) -> None:
        with suppress(HeadwayError):  # a disk that cannot be written now ends no job
            state.write(self.handle.run_dir)


def main(arguments: Sequence[str]) -> int:
    """Drive the job of one run folder."""
    # A shell may have started the submitter with SIGINT ignored, which children inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    logging_ = start_logging(level=os.environ.get("LOG_LEVEL", "INFO").upper())
    try:
        return Driver(read_handle(Path(arguments[0]))).run()
    except HeadwayError as problem:
        log.error("%s", problem)
        return problem.exit_code
    finally:
        logging_.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
