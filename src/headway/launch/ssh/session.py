"""One start of an ssh job: `python -m headway.launch.ssh.session RUN`, which the driver supervises.

In: RUN/launch.json and RUN/launch-recipe.yaml. Out: the lines of all hosts with their names in front, an exit code, and
RUN/logs/launch-progress.json with the newest step. All hosts end together: if one fails or is lost, the others are killed, this process
ends with an exit code that makes the supervisor start again, and training resumes from the newest checkpoint.
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
from headway.launch.failure import STOP_SIGNALS, USERS_MISTAKE
from headway.launch.ssh.checks import HELLO_SECONDS, explain_end
from headway.launch.ssh.connection import Connection, HostMessage, SshOptions
from headway.launch.ssh.hosts import Host
from headway.launch.targets.base import JobHandle, read_handle
from headway.launch.targets.driven import recipe_words
from headway.runtime.log import start_logging
from headway.runtime.process import RESTARTS, SUPERVISOR, end_with_supervisor
from headway.runtime.stop import SIGNALS
from headway.runtime.storage import write_atomic
from headway.track.base import Event
from headway.track.events import report_event
from headway.train.config import Recipe

log = logging.getLogger("headway")

PROGRESS = Path("logs") / "launch-progress.json"
POLL_SECONDS = 0.2
BEAT_SECONDS = 5.0
SILENT_SECONDS = 90.0
"""An agent reports every two seconds; one that is silent for this long is lost, though its connection stands."""
GRACE_SECONDS = 20.0
"""How long the other hosts may take to end by themselves after a failure: they exchange its cause first."""
KILL_SECONDS = 10.0
LOST = 1


class SshSession:
    """The agents of all hosts during one start of the job."""

    def __init__(self, handle: JobHandle, environment: Mapping[str, str]) -> None:
        options = handle.options
        self.handle, self.environment = handle, environment
        self.hosts = [Host(**one) for one in options["hosts"]]
        self.recipe_file = Path(handle.arguments[0])
        self.recipe = load(Recipe, self.recipe_file, recipe_words(handle.arguments)[1:])
        self.messages: queue.Queue[HostMessage] = queue.Queue()
        self.ssh = SshOptions(options["python"], options["config"])
        self.connections: list[Connection] = []
        self.codes: dict[int, int] = {}
        """Exit codes of hosts that have ended, in their order."""
        self.lost: dict[int, str] = {}
        self.heard_at: dict[int, float] = {}
        self.hellos: set[int] = set()
        self.port: int | None = None
        self.received: list[int] = []
        self.passed = 0
        self.end_at: float | None = None
        self.is_killed = False
        self.step = self.saved = -1
        self.written = (-1, -1)

    def run(self) -> int:
        """Run the ranks on all hosts to their end; returns the exit code."""
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
            for connection in self.connections:
                connection.end_input()
            for connection in self.connections:
                connection.close()
            self._write_progress()
        return self._outcome()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)

    def _greet(self) -> bool:
        """Wait for the agents, then for a free port of the first host; False if a host is lost or a stop is requested."""
        deadline = time.monotonic() + HELLO_SECONDS
        is_asked = False
        while True:
            self._take_message()
            if self.lost or self.codes or self.received:
                return False
            if len(self.hellos) == len(self.hosts):
                host, port = self.handle.options["master"]
                if len(self.hosts) == 1 or port or self.port is not None:
                    self.port = self.port if self.port is not None else port
                    return True
                if not is_asked:
                    is_asked = True
                    self.connections[0].send({"do": "port", "host": host})
            if time.monotonic() > deadline:
                for node in set(range(len(self.hosts))) - self.hellos or {0}:
                    self._lose(node, f"no answer within {HELLO_SECONDS:.0f} s")
                return False

    def _start(self) -> None:
        options = self.handle.options
        shared = {
            "do": "start",
            "size": len(self.hosts),
            "workdir": options["workdir"],
            "run": options["run"],
            "recipe": self.recipe_file.read_text(encoding="utf-8"),
            "arguments": list(self.handle.arguments[1:]),
            "master": [options["master"][0], self.port],
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
                if (
                    node not in self.codes
                    and node not in self.lost
                    and time.monotonic() - heard_at > SILENT_SECONDS
                ):
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
        node, content = message.node, message.content
        label = self.hosts[node].label
        self.heard_at[node] = time.monotonic()
        if message.closed is not None:
            if node not in self.codes and node not in self.lost:
                self._lose(
                    node,
                    explain_end(
                        message.closed, list(self.connections[node].errors), self.ssh.python
                    ),
                )
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
            is_restart = (
                self.environment.get(RESTARTS, "0") != "0"
            )  # it worked before: a folder that is not mounted yet may come back
            self._ended(node, LOST if is_restart else USERS_MISTAKE)
        elif "hung" in content:
            say(label, f"no progress: {content['hung']}")
            self._report("hang", f"{label}: {content['hung']}")
        elif "ended" in content:
            self._ended(node, int(content["ended"]))
        if "step" in content:
            self.step = max(self.step, int(content["step"]))
            self.saved = max(self.saved, int(content.get("saved", -1)))

    def _ended(self, node: int, code: int) -> None:
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
        self.is_killed = True
        self.end_at = time.monotonic() + KILL_SECONDS
        self._send_all({"do": "kill"})

    def _pass_signals(self) -> None:
        """The first signal makes all hosts save and stop; a second Ctrl-C kills."""
        while self.passed < len(self.received):
            number = self.received[self.passed]
            self.passed += 1
            if self.passed == 1:
                self._send_all({"do": "signal", "number": int(number)})
            elif number == signal.SIGINT:
                self._kill()

    def _send_all(self, content: Mapping[str, Any]) -> None:
        for node, connection in enumerate(self.connections):
            if node not in self.codes and node not in self.lost:
                connection.send(content)

    def _outcome(self) -> int:
        """The exit code of all hosts together: that of the first one that failed."""
        if self.received and (
            self.is_killed
            or not self.codes
            or any(code - 128 in STOP_SIGNALS for code in self.codes.values())
        ):
            return 128 + self.received[0]
        if self.lost:
            return LOST
        if len(self.codes) < len(self.hosts):
            return next((code for code in self.codes.values() if code), LOST)
        return next((code for code in self.codes.values() if code), 0)

    def _report(self, event: Event, text: str) -> None:
        with suppress(HeadwayError, OSError):
            report_event(self.recipe.track, self.handle.run_dir, event, text, max(self.saved, 0))

    def _write_progress(self) -> None:
        if (now := (self.step, self.saved)) != self.written:
            with suppress(HeadwayError):
                write_atomic(
                    self.handle.run_dir / PROGRESS,
                    json.dumps({"step": self.step, "saved": self.saved}),
                )
                self.written = now


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
