"""A real Chromium without a screen, driven over its debugging pipe: open a page, ask it, move the mouse, take a picture."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--hide-scrollbars", "--disable-background-networking", "--disable-sync",
         "--disable-component-update", "--disable-default-apps", "--remote-debugging-pipe")  # fmt: skip


class Page:
    """One tab."""

    def __init__(self, send: int, receive: int) -> None:
        self.send_end = send
        self.receive_end = receive
        self.number = 0
        self.buffer = b""
        self.session = ""
        self.problems: list[str] = []
        """Errors of scripts, of the console and of the security policy."""
        self.requests: list[str] = []
        """Every address that was asked for."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self._call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        number = self.number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.send_end, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                assert "error" not in reply, reply["error"]
                return reply["result"]
            self._note(reply)

    call = _call

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            chunk = os.read(self.receive_end, 1 << 16)
            assert chunk, "Chromium has ended"
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(line)

    def _note(self, message: dict[str, Any]) -> None:
        method = message.get("method", "")
        parameters = message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(parameters["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in (
            "error",
            "warning",
            "assert",
        ):
            self.problems.append(json.dumps(parameters["args"])[:500])
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(json.dumps(parameters["entry"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, seconds: float = 15.0) -> Any:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < end, (
                f"never true within {seconds} s: {script}; {self.problems}"
            )
            time.sleep(0.05)
        return value

    def move(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def drag(self, x0: float, x1: float, y: float) -> None:
        for kind, x in (
            ("mouseMoved", x0),
            ("mousePressed", x0),
            ("mouseMoved", (x0 + x1) / 2),
            ("mouseMoved", x1),
            ("mouseReleased", x1),
        ):
            buttons = (
                {"button": "left", "buttons": 1, "clickCount": 1}
                if kind != "mouseMoved" or x != x0
                else {}
            )
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **buttons)

    def resize(self, width: int, height: int, *, dark: bool = False, scale: int = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )
        self.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}],
        )

    def picture(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(
            base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        )


@contextmanager
def browser() -> Iterator[Page]:
    """A tab of a Chromium with a profile of its own."""
    assert PROGRAM is not None
    profile = tempfile.mkdtemp(prefix="chromium-")
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    flags = [*FLAGS, f"--user-data-dir={profile}", *(["--no-sandbox"] if os.geteuid() == 0 else [])]

    def connect() -> None:  # the browser reads from 3 and writes to 4
        read = os.dup(to_read)
        write = os.dup(from_write)
        os.dup2(read, 3)
        os.dup2(write, 4)

    process = subprocess.Popen(
        [PROGRAM, *flags],
        preexec_fn=connect,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Page(to_write, from_read)
    finally:
        process.kill()
        process.wait()
        os.close(to_write)
        os.close(from_read)
        shutil.rmtree(profile, ignore_errors=True)
