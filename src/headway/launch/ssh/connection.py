"""One ssh connection to one host, with an agent at its other end.

Messages are JSON objects, one on a line.

    here ──stdin──▶ agent    {"do": "start", ...}, {"do": "signal", ...}; the end of the stream
                             means that the session is gone
    here ◀──stdout── agent   MARK {"log": ...}, MARK {"ended": 0}; a line without the mark is what a
                             login script printed
    here ◀──stderr──         what ssh itself says

Only keys: ssh asks no questions (BatchMode), so an unknown host key or a password ends in an error.
The environment and everything else that varies goes through stdin. The one shell line that ssh
makes of its arguments is `remote_line`.
"""

from __future__ import annotations

import json
import queue
import shlex
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from headway.errors import LaunchError
from headway.launch.ssh.hosts import Host

MARK = "@headway "
AGENT = "headway.launch.ssh.agent"
CONNECT_SECONDS = 10
ALIVE_SECONDS = 5
ALIVE_COUNT = 3
"""ssh ends a connection whose other side is silent for the product of both."""
CONFIG_SECONDS = 30
"""How long `ssh -G` may take; it may look up names."""
END_SECONDS = 3.0
"""How long a connection may take to end before it is killed."""
MAX_LINE_BYTES = 1 << 20
READ_BYTES = 1 << 16
MAX_ERRORS = 50
"""Lines of ssh's own output that are kept for an explanation."""
OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": str(CONNECT_SECONDS),
    "ServerAliveInterval": str(ALIVE_SECONDS),
    "ServerAliveCountMax": str(ALIVE_COUNT),
    "ControlMaster": "no",
    "ControlPath": "none",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "ClearAllForwardings": "yes",
    "PermitLocalCommand": "no",
    "RequestTTY": "no",
    "LogLevel": "ERROR",
}
"""A connection of its own (no shared master): when this process ends, the connection ends, and with
it the ranks.
"""


@dataclass(frozen=True)
class SshOptions:
    """How ssh is called, and which Python is called there."""

    python: str
    config: str | None = None
    """A file for ssh -F; None = the user's own."""


@dataclass(frozen=True)
class HostMessage:
    """What came from a host: an object of its agent, a line of something else, or (`closed`) the
    end of the connection.
    """

    node: int
    content: Mapping[str, Any]
    closed: int | None = None
    """The exit code of ssh: 255 if the connection failed."""


def remote_line(words: Sequence[str]) -> str:
    """The shell line for words that the program there must get unchanged.

    `exec`: the shell does not stay in between.
    """
    if any("\0" in word or "\n" in word for word in words):
        raise LaunchError(
            f"{shlex.join(words)!r} cannot be started over ssh: a word has a line break or a zero "
            "byte."
        )
    return f"exec {shlex.join(words)}"


def ssh_words(host: Host, options: SshOptions, remote: Sequence[str] | None = None) -> list[str]:
    """The words that start ssh; -- keeps a host name from being read as an option."""
    words = [_ssh_program(), "-T"]
    if options.config is not None:
        words += ["-F", options.config]
    for name, value in OPTIONS.items():
        words += ["-o", f"{name}={value}"]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    words += ["--", host.name]
    if remote is not None:
        words.append(remote_line(remote))
    return words


def _ssh_program() -> str:
    program = shutil.which("ssh")
    if program is None:
        raise LaunchError("ssh is not installed here. Install it (Debian: openssh-client).")
    return program


def address_of(host: Host, options: SshOptions) -> str:
    """The address that ssh connects to for a host; aliases of its configuration are resolved."""
    words = [_ssh_program(), "-G"]  # prints the configuration and connects to nothing
    if options.config is not None:
        words += ["-F", options.config]
    words += ["--", host.name]
    try:
        process = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=CONFIG_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return host.name

    if process.returncode == 0:
        for line in process.stdout.splitlines():
            if line.lower().startswith("hostname "):
                return line.split(None, 1)[1]
    return host.name


class Connection:
    """An agent on one host.

    Everything that comes from it goes into `messages`, which all connections of a job share.
    """

    def __init__(
        self, node: int, host: Host, options: SshOptions, messages: queue.Queue[HostMessage]
    ) -> None:
        self.node = node
        self.host = host
        self.errors: deque[str] = deque(maxlen=MAX_ERRORS)
        self._messages = messages
        self._outgoing: queue.Queue[bytes | None] = queue.Queue()
        # A group of its own: a Ctrl-C in the terminal must not end ssh before the ranks have saved.
        command = ssh_words(host, options, [options.python, "-P", "-m", AGENT])
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            bufsize=0,
        )
        stdout = self.process.stdout
        stderr = self.process.stderr
        stdin = self.process.stdin
        assert stdout is not None and stderr is not None and stdin is not None

        # A thread for each stream, so that a slow host holds up no other one.
        self._reading_errors = threading.Thread(
            target=self._read_errors, args=(stderr,), daemon=True
        )
        self._threads = [
            self._reading_errors,
            threading.Thread(target=self._read, args=(stdout,), daemon=True),
            threading.Thread(target=self._write, args=(stdin,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, content: Mapping[str, Any]) -> None:
        """Send an object; never waits. Errors show as the end of the connection."""
        self._outgoing.put(json.dumps(content).encode() + b"\n")

    def _write(self, stream: IO[bytes]) -> None:
        try:
            with stream:
                while (line := self._outgoing.get()) is not None:
                    unwritten = memoryview(line)
                    while unwritten:
                        unwritten = unwritten[stream.write(unwritten) :]
        except OSError:
            return  # ssh has ended; `_read` reports it

    def _read(self, stream: IO[bytes]) -> None:
        buffered = b""
        with stream:
            while chunk := stream.read(READ_BYTES):
                # A program that prints without line ends must not fill the memory here.
                *lines, buffered = (buffered + chunk).split(b"\n")
                buffered = buffered[:MAX_LINE_BYTES]
                for line in lines:
                    self._messages.put(HostMessage(self.node, parse_message(line)))

        # Everything that ssh said first: the end is explained with it.
        code = self.process.wait()
        self._reading_errors.join(END_SECONDS)
        self._messages.put(HostMessage(self.node, {}, closed=code))

    def _read_errors(self, stream: IO[bytes]) -> None:
        with stream:
            for line in iter(stream.readline, b""):
                text = line[:MAX_LINE_BYTES].decode(errors="replace").rstrip()
                if text:
                    self.errors.append(text)
                    self._messages.put(HostMessage(self.node, {"error": text}))

    def end_input(self) -> None:
        """End the stream to the agent, which then ends its ranks and itself."""
        self._outgoing.put(None)

    def close(self) -> None:
        """End the stream and wait for ssh; what is left after a moment is killed."""
        self.end_input()
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self._threads:
            thread.join(END_SECONDS)


def parse_message(line: bytes) -> dict[str, Any]:
    """An object of the agent; any other line is a log line."""
    text = line.decode(errors="replace").rstrip("\r")
    if text.startswith(MARK):
        try:
            content = json.loads(text[len(MARK) :])
            if isinstance(content, dict):
                return content
        except (ValueError, RecursionError):
            pass  # something else that begins with the mark
    return {"log": text}
