"""One start of an ssh job: `python -m headway.launch.ssh.session RUN`, which the driver supervises.

In: RUN/launch.json and RUN/launch-recipe.yaml. Out: the lines of all hosts with their names in
front, an exit code, and RUN/logs/launch-progress.json with the newest step. All hosts end together:
if one fails or is lost, the others are killed, this process ends with an exit code that makes the
supervisor start again, and training resumes from the newest checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from headway.config.load import load
from headway.errors import HeadwayError
from headway.launch.failure import USERS_MISTAKE, is_stop_code
from headway.launch.ssh.checks import HELLO_SECONDS, explain_end
from headway.launch.ssh.connection import Connection, HostMessage, SshOptions
from headway.launch.ssh.hosts import Host
from headway.launch.targets.base import JobHandle, read_handle
from headway.launch.targets.driven import recipe_words
from headway.runtime.log import start_logging
from headway.runtime.process import RESTARTS, SUPERVISOR, end_with_supervisor
from headway.runtime.stop import SIGNAL_EXIT, SIGNALS
from headway.runtime.storage import write_atomic
from headway.track.base import Event
from headway.track.events import report_event
from headway.train.config import Recipe

log = logging.getLogger("headway")

PROGRESS = Path("logs") / "launch-progress.json"
POLL_SECONDS = 0.2
BEAT_SECONDS = 5.0
"""How often agents get a sign of life."""
SILENT_SECONDS = 90.0
"""An agent reports every two seconds.

One that is silent for this long is lost, though its connection stands.
"""
GRACE_SECONDS = 20.0
"""How long the other hosts may take to end by themselves after a failure: they exchange its cause
first.
"""
KILL_SECONDS = 10.0
"""How long agents may take to kill their ranks and to report their end."""
LOST = 1
"""The exit code after the loss of a host; the supervisor starts again."""


class SshSession:
    """The agents of all hosts during one start of the job."""

    def __init__(self, handle: JobHandle, environment: Mapping[str, str]) -> None:
        options = handle.options
        self.handle = handle
        self.environment = environment
        self.hosts = [Host(**host) for host in options["hosts"]]
        self.recipe_file = Path(handle.arguments[0])
        self.recipe = load(Recipe, self.recipe_file, recipe_words(handle.arguments)[1:])
        self.messages: queue.Queue[HostMessage] = queue.Queue()
        self.ssh = SshOptions(options["python"], options["config"])
        self.connections: list[Connection] = []
        self.codes: dict[int, int] = {}
        """Exit codes of hosts that have ended, in their order."""
        self.lost: dict[int, str] = {}
        """Hosts whose connection or agent is gone, and why."""
        self.heard_at: dict[int, float] = {}
        """When the newest message of each host came."""
        self.hellos: set[int] = set()
        """Hosts whose agent has started."""
        self.port: int | None = None
        """Where ranks meet on the first host."""
        self.received: list[int] = []
        """Signals that this process got."""
        self.passed = 0
        """How many of them were acted on."""
        self.end_at: float | None = None
        """When hosts that still run are killed, or, once they are, left alone."""
        self.is_killed = False
        self.step = -1
        self.saved = -1
        self.written = (-1, -1)
        """Step and saved step in the progress file."""

    def run(self) -> int:
        """Run the ranks on all hosts to their end; returns the exit code."""
        # Only noted in the handler; `_pass_signals` acts on them between two messages.
        for number in SIGNALS:
            signal.signal(number, self._receive)
        self.connections = [
            Connection(node, host, self.ssh, self.messages) for node, host in enumerate(self.hosts)
        ]
        self.heard_at = dict.fromkeys(range(len(self.hosts)), time.monotonic())
        try:
            if self._greet():
                self._start()
                self._follow()
        finally:
            # All at once, then wait for each.
            for connection in self.connections:
                connection.end_input()
            for connection in self.connections:
                connection.close()
            self._write_progress()
        return self._outcome()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def _greet(self) -> bool:
        """Wait for the agents, then for a free port of the first host.

        False if a host is lost or a stop is requested.
        """
        deadline = time.monotonic() + HELLO_SECONDS
        is_asked = False
        while True:
            self._take_message()
            if self.lost or self.codes or self.received:
                return False
            if len(self.hellos) == len(self.hosts):
                # Port 0 of the settings: the first host chooses one, anew for every start.
                host, port = self.handle.options["master"]
                if len(self.hosts) == 1 or port or self.port is not None:
                    if self.port is None:
                        self.port = port
                    return True
                if not is_asked:
                    is_asked = True
                    self.connections[0].send({"do": "port", "host": host})
            if time.monotonic() > deadline:
                # If all have greeted, it is the first host that did not answer with a port.
                for node in set(range(len(self.hosts))) - self.hellos or {0}:
                    self._lose(node, f"no answer within {HELLO_SECONDS:.0f} s")
                return False

    def _start(self) -> None:
        """Make every agent start its ranks."""
        options = self.handle.options
        shared = {
            "do": "start",
            "size": len(self.hosts),
            "workdir": options["workdir"],
            "run": options["run"],
            "recipe": self.recipe_file.read_text(encoding="utf-8"),
            "arguments": list(self.handle.arguments[1:]),
            "master": [options["master"][0], self.port],
            # Values come from the environment of this process; the handle has only names.
            "environment": {
                name: self.environment[name] for name in options["env"] if name in self.environment
            },
            "job": self.environment.get(SUPERVISOR, "ssh"),
            "restarts": int(self.environment.get(RESTARTS, "0")),
            "hang_seconds": self.recipe.supervise.hang_seconds,
        }
        for node, connection in enumerate(self.connections):
            connection.send({**shared, "node": node, "ranks": options["ranks"][node]})

    def _follow(self) -> None:
        """Act on messages and signals until every host has ended or is lost."""
        beat_at = 0.0
        while len(self.codes) + len(self.lost) < len(self.hosts):
            now = time.monotonic()
            if now > beat_at:
                beat_at = now + BEAT_SECONDS
                self._send_all({"do": "beat"})
                self._write_progress()
            self._take_message()
            self._pass_signals()
            for node, heard_at in self.heard_at.items():
                if self._is_running(node) and time.monotonic() - heard_at > SILENT_SECONDS:
                    self._lose(node, f"its agent is silent for {SILENT_SECONDS:.0f} s")
            if self.end_at is not None and time.monotonic() > self.end_at:
                if self.is_killed:
                    return  # closing the connections ends what is left
                self._kill()

    def _take_message(self) -> None:
        """Wait a moment for a message and act on it."""
        try:
            message = self.messages.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        node = message.node
        content = message.content
        label = self.hosts[node].label
        self.heard_at[node] = time.monotonic()
        if message.closed is not None:
            if self._is_running(node):
                errors = list(self.connections[node].errors)
                self._lose(node, explain_end(message.closed, errors, self.ssh.python))
        elif "log" in content:
            say(label, str(content["log"]))
        elif "error" in content:
            say(label, f"ssh: {content['error']}")
        elif "hello" in content:
            self.hellos.add(node)
        elif "port" in content:
            self.port = int(content["port"])
        elif "refused" in content:
            say(label, f"error: {content['refused']}")
            # After a restart it has worked before: a folder that is not mounted yet may come back.
            is_restart = self.environment.get(RESTARTS, "0") != "0"
            self._ended(node, LOST if is_restart else USERS_MISTAKE)
        elif "hung" in content:
            say(label, f"no progress: {content['hung']}")
            self._report("hang", f"{label}: {content['hung']}")
        elif "ended" in content:
            self._ended(node, int(content["ended"]))
        if "step" in content:
            self.step = max(self.step, int(content["step"]))
            self.saved = max(self.saved, int(content.get("saved", -1)))

    def _is_running(self, node: int) -> bool:
        return node not in self.codes and node not in self.lost

    def _ended(self, node: int, code: int) -> None:
        """A host has ended; after a failure the others get a moment to end by themselves."""
        self.codes.setdefault(node, code)
        if code != 0 and self.end_at is None and not self.received:
            self.end_at = time.monotonic() + GRACE_SECONDS

    def _lose(self, node: int, why: str) -> None:
        """A host that is gone: the others cannot continue without it."""
        self.lost[node] = why
        text = f"{self.hosts[node].label} is lost: {why}"
        log.error("%s", text)
        if not self.received:
            self._report("crash", text)
        self._kill()

    def _kill(self) -> None:
        """Make all agents kill their ranks."""
        self.is_killed = True
        self.end_at = time.monotonic() + KILL_SECONDS
        self._send_all({"do": "kill"})

    def _pass_signals(self) -> None:
        """The first signal makes all hosts save and stop; a second Ctrl-C kills."""
        while self.passed < len(self.received):
            number = self.received[self.passed]
            self.passed += 1
            # Only the first is passed on: a rank takes a second SIGINT as a stop without a save.
            if self.passed == 1:
                self._send_all({"do": "signal", "number": int(number)})
            elif number == signal.SIGINT:
                self._kill()

    def _send_all(self, content: Mapping[str, Any]) -> None:
        for node, connection in enumerate(self.connections):
            if self._is_running(node):
                connection.send(content)

    def _outcome(self) -> int:
        """The exit code of all hosts together: that of the first one that failed."""
        codes = list(self.codes.values())
        # A signal that came after all ranks were done changes nothing.
        has_stopped = self.is_killed or not codes or any(is_stop_code(code) for code in codes)
        if self.received and has_stopped:
            return SIGNAL_EXIT + self.received[0]
        if self.lost:
            return LOST

        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        return 0 if len(codes) == len(self.hosts) else LOST

    def _report(self, event: Event, text: str) -> None:
        # An alert that cannot be sent ends no job.
        with suppress(HeadwayError, OSError):
            report_event(self.recipe.track, self.handle.run_dir, event, text, max(self.saved, 0))

    def _write_progress(self) -> None:
        newest = (self.step, self.saved)
        if newest == self.written:
            return
        with suppress(HeadwayError):
            content = json.dumps({"step": self.step, "saved": self.saved})
            write_atomic(self.handle.run_dir / PROGRESS, content)
            self.written = newest


def say(label: str, line: str) -> None:
    """A line of a host on standard output."""
    sys.stdout.write(f"[{label}] {line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run one start of the job in a run folder."""
    end_with_supervisor()
    logging_ = start_logging(level=os.environ.get("LOG_LEVEL", "INFO").upper())
    try:
        return SshSession(read_handle(Path(arguments[0])), os.environ).run()
    except HeadwayError as problem:
        log.error("%s", problem)
        return problem.exit_code
    finally:
        logging_.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
