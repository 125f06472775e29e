"""Alerts: a message when a run starts or ends, when its loss is not finite and when it jumps. Looks at the steps that are logged.

Messages are sent by a thread of their own from a short queue: a receiver that is slow, gone or hangs costs the run nothing. What an alert
says is also in the log. The address comes from the environment and is never shown.
"""

from __future__ import annotations

import http.client
import logging
import math
import queue
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import address_from_environment, direct_opener, job_id
from headway.track.base import Event, TrackerConfig
from headway.track.message import Form, Message, refusal

QUEUE_MESSAGES = 32
EVENTS_DOC = "What is told; all of: start, finish, crash, hang, spike, nan, save_failure, slow_rank."
CLOSE_SECONDS = 10.0
log = logging.getLogger("headway")


class Config(TrackerConfig):
    """Tell people what happens to a run."""

    kind: str = setting("alert", "alert.", on_resume="free")
    form: Form = setting("webhook", "How a message is written: feishu, slack, webhook (all fields as JSON), or command.", on_resume="free")
    url_env: str = setting("ALERT_WEBHOOK", "Environment variable that holds the address to post to.", on_resume="free", min_length=1)
    command: tuple[str, ...] = setting((), "With form: command, program and arguments; reads the message as JSON.", on_resume="free")
    events: tuple[Event, ...] = setting(
        get_args(Event), "What is told: start, finish, crash, hang, spike, nan, save_failure, slow_rank; all.", on_resume="free"
    )
    spike_ratio: float = setting(1.5, "A loss so many times the one logged before is a spike.", gt=1, on_resume="free")
    every_seconds: float = setting(300.0, "Least time between two messages about the same event.", ge=0, on_resume="free")
    timeout_seconds: float = setting(30.0, "How long a receiver may take.", gt=0, on_resume="free")

    def build(self, run_dir: Path, run_name: str) -> Alert:
        """The tracker of a run; an address or program that is not there is refused now."""
        if self.form != "command":
            return Alert(self, run_name, address_from_environment(self.url_env, "track url_env"))
        if not self.command or shutil.which(self.command[0]) is None:
            raise ConfigError(f"track command is {list(self.command)}; form: command needs a program that can be run, and its arguments.")
        return Alert(self, run_name, None)


class Alert:
    """Watches the loss and hands messages to a thread that sends them."""

    def __init__(self, config: Config, run_name: str, address: str | None) -> None:
        self._config = config
        self._run = run_name
        self._job = job_id()
        self._sender = _Sender(config, address)
        self._last_sent: dict[Event, float] = {}
        self._held_back: dict[Event, int] = {}
        self._lock = threading.Lock()
        self._step: int | None = None
        self._loss: float | None = None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Look at a step; never waits."""
        loss = metrics.get("loss")
        if not isinstance(loss, (int, float)):
            loss = None
        is_first, self._step = self._step is None, step
        if is_first:
            self._tell("start", loss, f"training, step {step}, loss {_number(loss)}")
        if loss is not None and not math.isfinite(loss):
            self._tell("nan", loss, f"the loss of step {step} is {loss}")
        elif loss is not None and self._loss is not None and loss > self._config.spike_ratio * self._loss:
            self._tell("spike", loss, f"the loss jumped from {_number(self._loss)} to {_number(loss)} at step {step}")
        if loss is not None and math.isfinite(loss):
            self._loss = loss

    def event(self, name: Event, text: str, step: int) -> None:
        """Tell what happened; any thread may call it."""
        self._tell(name, self._loss, text, step)

    def note(self, text: str) -> None:
        """Remarks are no alerts."""

    def close(self) -> None:
        """Tell the end, and give messages under way a moment."""
        if self._step is not None:
            self._tell("finish", self._loss, f"ended after step {self._step}, loss {_number(self._loss)}")
            self._step = None  # told once
        self._sender.close()

    def _tell(self, event: Event, loss: float | None, text: str, step: int | None = None) -> None:
        if event not in self._config.events:
            return
        with self._lock:
            now = time.monotonic()
            if event in self._last_sent and now - self._last_sent[event] < self._config.every_seconds:
                self._held_back[event] = self._held_back.get(event, 0) + 1
                return
            self._last_sent[event] = now
            if held_back := self._held_back.pop(event, 0):
                text += f" ({held_back} more since the last message)"
        log.info("alert %s: %s", event, text)
        finite = loss if loss is not None and math.isfinite(loss) else None
        self._sender.put(
            Message(event, self._run, self._job, step if step is not None else self._step or 0, finite, text, int(time.time()))
        )


class _Sender:
    """A thread that sends messages one after another; the first failure is logged, later ones are not."""

    def __init__(self, config: Config, address: str | None) -> None:
        self._config = config
        self._address = address
        self._opener = direct_opener()
        self._waiting: queue.Queue[Message | None] = queue.Queue(QUEUE_MESSAGES)
        self._has_complained = False
        self._thread = threading.Thread(target=self._work, name="headway-alert", daemon=True)
        self._thread.start()

    def put(self, message: Message) -> None:
        """Send later; a message for which there is no room is lost."""
        try:
            self._waiting.put_nowait(message)
        except queue.Full:
            self._complain(f"{QUEUE_MESSAGES} messages wait already")

    def close(self) -> None:
        """Wait a little for what is under way; the thread never keeps a process alive."""
        try:
            self._waiting.put_nowait(None)
        except queue.Full:
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._complain(f"the receiver does not answer, {self._waiting.qsize()} messages wait")

    def _work(self) -> None:
        while (message := self._waiting.get()) is not None:
            problem = self._post(message, self._address) if self._address is not None else self._call(message)
            if problem is not None:
                self._complain(problem)

    def _complain(self, problem: str) -> None:
        if not self._has_complained:
            self._has_complained = True
            log.warning("alerts (%s) cannot be sent: %s; said only once", self._config.form, problem)

    def _post(self, message: Message, address: str) -> str | None:
        """Why the message was not sent, without the address."""
        headers = {"Content-Type": "application/json;charset=utf-8", "User-Agent": "headway"}
        request = urllib.request.Request(address, message.body(self._config.form), headers, method="POST")
        try:
            with self._opener.open(request, timeout=self._config.timeout_seconds) as response:
                return refusal(self._config.form, response.read(65536))
        except urllib.error.HTTPError as error:
            error.close()
            return f"HTTP {error.code}"
        except urllib.error.URLError as error:
            return f"{error.reason}"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__ if not isinstance(error, TimeoutError) else f"no answer in {self._config.timeout_seconds:g} s"

    def _call(self, message: Message) -> str | None:
        """Why the command failed."""
        try:
            done = subprocess.run(
                self._config.command,
                input=message.body("command"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=self._config.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{self._config.command[0]} took longer than {self._config.timeout_seconds:g} s"
        except OSError as problem:
            return f"{self._config.command[0]}: {problem.strerror}"
        return None if done.returncode == 0 else f"{self._config.command[0]} ended with exit code {done.returncode}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.4g}"
