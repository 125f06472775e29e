"""Alerts: send a message when a run starts, finishes, crashes or hangs, when its loss spikes or is
not finite, or when a save fails.

Messages are sent in the background, and each is also logged. The address comes from the environment
and is never logged. The recipe's `heal` section defines a loss spike. The supervisor and the
launcher send the alerts that a dead run cannot send.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from headway.config.section import setting
from headway.errors import ConfigError
from headway.runtime.web import address_from_environment, job_id
from headway.track.base import Event, TrackerConfig
from headway.track.sender import Send, Sender, poster

log = logging.getLogger("headway")

Form = Literal["feishu", "slack", "webhook", "command"]
EVENTS_DOC = (
    "Events to report; all of: start, finish, crash, hang, spike, nan, save_failure, slow_rank, "
    "callback, tracker_failure."
)


class Config(TrackerConfig):
    """Send a message when something happens to a run."""

    kind: str = setting("alert", "alert.", on_resume="free")
    form: Form = setting(
        "webhook",
        "Message format: feishu, slack, webhook (all fields as JSON), or command.",
        on_resume="free",
    )
    url_env: str = setting(
        "ALERT_WEBHOOK",
        "Environment variable that holds the address to post to.",
        on_resume="free",
        min_length=1,
    )
    command: tuple[str, ...] = setting(
        (),
        "For form: command, the program and its arguments; it reads the message as JSON on stdin.",
        on_resume="free",
    )
    events: tuple[Event, ...] = setting(get_args(Event), EVENTS_DOC, on_resume="free")
    every_seconds: float = setting(
        300.0, "Minimum seconds between two messages about the same event.", ge=0, on_resume="free"
    )
    timeout_seconds: float = setting(
        30.0, "Seconds to wait for the receiver's answer.", gt=0, on_resume="free"
    )

    def build(self, run_dir: Path, run_name: str) -> Alert:
        """Make the tracker.

        Raises ConfigError if the address is not set or the program does not exist.
        """
        if self.form != "command":
            address = address_from_environment(self.url_env, "track url_env")
            send = poster(address, self.timeout_seconds, lambda answer: _refusal(self.form, answer))
            return Alert(self, run_name, send)
        # Refused at the start: a mistake must not show at the first crash.
        if not self.command or shutil.which(self.command[0]) is None:
            raise ConfigError(
                f"track command is {list(self.command)}; form: command needs a program that can be "
                "run, and its arguments."
            )
        return Alert(self, run_name, self._call)

    def build_outside(self, run_dir: Path, run_name: str) -> Alert:
        """The same tracker, for a process other than the run."""
        return self.build(run_dir, run_name)

    def _call(self, message: bytes) -> str | None:
        """Run the command with the message on stdin; returns the reason of a failure."""
        null = subprocess.DEVNULL
        try:
            process = subprocess.run(
                self.command,
                input=message,
                stdout=null,
                stderr=null,
                timeout=self.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"{self.command[0]} took longer than {self.timeout_seconds:g} s"
        except OSError as problem:
            return f"{self.command[0]}: {problem.strerror}"
        if process.returncode == 0:
            return None
        return f"{self.command[0]} ended with exit code {process.returncode}"


class Alert:
    """Sends alerts from a background thread.

    Repeated events within `every_seconds` are only counted.
    """

    def __init__(self, config: Config, run_name: str, send: Send) -> None:
        self._config = config
        self._run = run_name
        self._job = job_id()
        self._sender = Sender(f"alerts ({config.form})", send)
        self._lock = threading.Lock()
        self._last_sent: dict[Event, float] = {}
        self._suppressed: dict[Event, int] = {}
        """Events since the last message about them."""
        self._loss: float | None = None
        """The last finite one."""

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Remember the loss, which messages include."""
        loss = metrics.get("loss")
        if isinstance(loss, (int, float)) and math.isfinite(loss):
            self._loss = loss

    def event(self, name: Event, text: str, step: int) -> None:
        """Send an alert. Callable from any thread."""
        if name not in self._config.events:
            return
        with self._lock:
            # A loss that spikes at every step must not fill a chat.
            now = time.monotonic()
            last_sent = self._last_sent.get(name, -math.inf)
            if now - last_sent < self._config.every_seconds:
                self._suppressed[name] = self._suppressed.get(name, 0) + 1
                return
            self._last_sent[name] = now
            # The count comes with the next message of the same kind.
            if suppressed := self._suppressed.pop(name, 0):
                text += f" ({suppressed} more since the last message)"
        log.info("alert %s: %s", name, text)
        message = AlertMessage(name, self._run, self._job, step, self._loss, text, int(time.time()))
        self._sender.put(message.body(self._config.form))

    def note(self, text: str) -> None:
        """Ignored: notes are not sent as alerts."""

    def close(self) -> None:
        """Wait briefly until queued messages are sent."""
        self._sender.close()


@dataclass(frozen=True)
class AlertMessage:
    """An event of a run. `loss` is the last finite loss, None before the first."""

    event: Event
    run: str
    job: str
    step: int
    loss: float | None
    text: str
    timestamp: int

    @property
    def title(self) -> str:
        """The job and the name of the run."""
        return f"{self.job}_{self.run}"

    def body(self, form: Form) -> bytes:
        """The message as JSON in the format of its receiver.

        `webhook` and `command` receive every field.
        """
        content: dict[str, Any] = asdict(self)
        if form == "feishu":
            # Feishu's rich text: paragraphs of elements, by language.
            post = {"title": self.title, "content": [[{"tag": "text", "text": self.text}]]}
            content = {
                "timestamp": self.timestamp,
                "msg_type": "post",
                "content": {"post": {"zh_cn": post}},
            }
        elif form == "slack":
            content = {"text": f"*{self.title}*\n{self.text}"}
        return json.dumps(content, ensure_ascii=False, allow_nan=False).encode()


def _refusal(form: Form, answer: bytes) -> str | None:
    """The error in an HTTP 200 answer: Feishu reports a rejected message with a non-zero code."""
    if form != "feishu":
        return None
    # Two generations of its webhooks have different names for the code.
    try:
        content: Any = json.loads(answer)
        code = content.get("code", content.get("StatusCode", 0))
    except (ValueError, AttributeError):
        return None
    if code == 0:
        return None
    return f"code {code}"
