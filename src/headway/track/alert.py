"""Alerts: a message when something happens to a run: it starts, ends, crashes, hangs, its loss is not finite or jumps, a save fails.

Messages are sent in the background; what an alert says is also in the log. The address comes from the environment and is never shown.
What counts as a jump of the loss is said in the recipe's `heal` section; the supervisor and the launcher tell what a run itself cannot.
"""

from __future__ import annotations

import logging
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import address_from_environment, job_id
from headway.track.base import Event, TrackerConfig
from headway.track.message import Form, Message, refusal
from headway.track.sender import Send, Sender, poster

EVENTS_DOC = "What is told; all of: start, finish, crash, hang, spike, nan, save_failure, slow_rank."
log = logging.getLogger("headway")


class Config(TrackerConfig):
    """Tell people what happens to a run."""

    kind: str = setting("alert", "alert.", on_resume="free")
    form: Form = setting("webhook", "How a message is written: feishu, slack, webhook (all fields as JSON), or command.", on_resume="free")
    url_env: str = setting("ALERT_WEBHOOK", "Environment variable that holds the address to post to.", on_resume="free", min_length=1)
    command: tuple[str, ...] = setting((), "With form: command, program and arguments; reads the message as JSON.", on_resume="free")
    events: tuple[Event, ...] = setting(get_args(Event), EVENTS_DOC, on_resume="free")
    every_seconds: float = setting(300.0, "Least time between two messages about the same event.", ge=0, on_resume="free")
    timeout_seconds: float = setting(30.0, "How long a receiver may take.", gt=0, on_resume="free")

    def build(self, run_dir: Path, run_name: str) -> Alert:
        """The tracker of a run; an address or program that is not there is refused now."""
        if self.form != "command":
            address = address_from_environment(self.url_env, "track url_env")
            return Alert(self, run_name, poster(address, self.timeout_seconds, lambda answer: refusal(self.form, answer)))
        if not self.command or shutil.which(self.command[0]) is None:
            raise ConfigError(f"track command is {list(self.command)}; form: command needs a program that can be run, and its arguments.")
        return Alert(self, run_name, self._call)

    def build_outside(self, run_dir: Path, run_name: str) -> Alert:
        """One that tells for a run from outside."""
        return self.build(run_dir, run_name)

    def _call(self, message: bytes) -> str | None:
        """Hand a message to the command; returns why that failed."""
        quiet = subprocess.DEVNULL
        try:
            done = subprocess.run(self.command, input=message, stdout=quiet, stderr=quiet, timeout=self.timeout_seconds, check=False)
        except subprocess.TimeoutExpired:
            return f"{self.command[0]} took longer than {self.timeout_seconds:g} s"
        except OSError as problem:
            return f"{self.command[0]}: {problem.strerror}"
        return None if done.returncode == 0 else f"{self.command[0]} ended with exit code {done.returncode}"


class Alert:
    """Hands messages to a thread that sends them; several about the same event within a time become one."""

    def __init__(self, config: Config, run_name: str, send: Send) -> None:
        self._config = config
        self._run = run_name
        self._job = job_id()
        self._sender = Sender(f"alerts ({config.form})", send)
        self._lock = threading.Lock()
        self._last_sent: dict[Event, float] = {}
        self._held_back: dict[Event, int] = {}
        self._loss: float | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Remember the loss, for the messages."""
        loss = metrics.get("loss")
        self._loss = loss if isinstance(loss, (int, float)) and math.isfinite(loss) else self._loss

    def event(self, name: Event, text: str, step: int) -> None:
        """Tell what happened; any thread may call it."""
        if name not in self._config.events:
            return
        with self._lock:
            now = time.monotonic()
            if name in self._last_sent and now - self._last_sent[name] < self._config.every_seconds:
                self._held_back[name] = self._held_back.get(name, 0) + 1
                return
            self._last_sent[name] = now
            if held_back := self._held_back.pop(name, 0):
                text += f" ({held_back} more since the last message)"
        log.info("alert %s: %s", name, text)
        message = Message(name, self._run, self._job, step, self._loss, text, int(time.time()))
        self._sender.put(message.body(self._config.form))

    def note(self, text: str) -> None:
        """Remarks are no alerts."""

    def close(self) -> None:
        """Give messages under way a moment."""
        self._sender.close()
