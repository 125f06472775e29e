"""Files of runs on another machine, through one long-lived ssh process: keys only, and no shell ever sees a path.

The command that the other machine's shell runs is a constant. The program it starts (remote_reader.py) and every path travel over
standard input.
"""

from __future__ import annotations

import base64
import json
import subprocess
import tempfile
import threading
import zlib
from dataclasses import dataclass
from importlib.resources import files
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from headway.board.mirror import RemoteError, RemoteFile, RemoteRun
from headway.errors import ConfigError
from headway.launch.ssh.connection import SshOptions, ssh_words
from headway.launch.ssh.hosts import NAME, USER, Host

COMMAND = ("python3", "-c", "import base64,sys;exec(base64.b64decode(sys.stdin.buffer.readline()))")
ANSWER_SECONDS = 60.0
LARGEST_ANSWER = 64 << 20


@dataclass(frozen=True)
class SshAddress:
    """ssh://[user@]host[:port]/path"""

    host: str
    user: str | None
    port: int | None
    path: str

    @classmethod
    def parse(cls, text: str) -> SshAddress:
        """The parts of an address; what is missing or could be an option of ssh is refused."""
        form = "Write ssh://HOST/path, with USER@ before and :PORT behind the host where needed."
        try:
            parts = urlsplit(text)
            port = parts.port
        except ValueError:
            raise ConfigError(f"{text}: not an address. {form}") from None
        if parts.password is not None:
            raise ConfigError(
                f"ssh://{parts.hostname}: holds a password. Only keys are used; remove it from the address."
            )
        host, user, path = parts.hostname or "", parts.username, unquote(parts.path)
        if not NAME.fullmatch(host) or (user is not None and not USER.fullmatch(user)):
            raise ConfigError(f"{text}: not the name of a host and user. {form}")
        if not path.strip("/") or "\0" in path or parts.query or parts.fragment:
            raise ConfigError(f"{text}: has no folder. {form}")
        # /~/runs is below the home folder, where ssh starts
        return cls(host, user, port, path.removeprefix("/~/") if path.startswith("/~/") else path)

    def command(self, config: str | None = None) -> list[str]:
        """The words that start ssh."""
        return ssh_words(
            Host(self.host, self.user, self.port), SshOptions(COMMAND[0], config), COMMAND
        )


class SshRuns:
    """One connection; a broken one is opened again at the next question."""

    poll_seconds = 0.5

    def __init__(self, address: SshAddress, config: str | None = None) -> None:
        self.address, self.config = address, config
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._lock = threading.Lock()

    def listing(self) -> tuple[float, dict[str, RemoteRun]]:
        """The clock there, and the files of every run."""
        head, content = self._ask({"do": "list", "root": self.address.path})
        found: Any = json.loads(content)
        runs = {
            run: RemoteRun({path: RemoteFile(*about) for path, about in listed.items()}, saved)
            for run, (listed, saved) in found.items()
        }  # fmt: skip
        return float(head["now"]), runs

    def read(self, run: str, path: str, offset: int, size: int) -> bytes:
        """Bytes of a file of a run."""
        return self._ask(
            {
                "do": "read",
                "root": self.address.path,
                "run": run,
                "path": path,
                "offset": offset,
                "size": size,
            }
        )[1]

    def close(self) -> None:
        """End the connection."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, self._errors):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:
                        continue

    def _start(self) -> subprocess.Popen[bytes]:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # its own session: a Ctrl-C for the board does not reach it before it is closed
            process = subprocess.Popen(
                self.address.command(self.config),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as problem:
            raise RemoteError(
                f"ssh cannot be started: {problem.strerror}. Install an ssh client."
            ) from None
        assert process.stdin is not None
        program = files("headway.board").joinpath("remote_reader.py").read_bytes()
        process.stdin.write(base64.b64encode(program) + b"\n")
        process.stdin.flush()
        return process

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            timer: threading.Timer | None = None
            try:
                process = self._process = self._process or self._start()
                timer = threading.Timer(ANSWER_SECONDS, process.kill)
                timer.daemon = True
                timer.start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline(1 << 16)
                head: Any = json.loads(line) if line else None
                if (
                    not isinstance(head, dict)
                    or not 0 <= int(head.get("size", -1)) <= LARGEST_ANSWER
                ):
                    raise RemoteError(self._why())
                packed = process.stdout.read(int(head["size"]))
                unpacker = zlib.decompressobj()
                content = unpacker.decompress(packed, LARGEST_ANSWER)
            except (OSError, ValueError, zlib.error) as problem:
                reason = self._why() if not isinstance(problem, RemoteError) else str(problem)
                self.close()
                raise RemoteError(reason) from None
            finally:
                if timer is not None:
                    timer.cancel()
        if "error" in head:
            raise RemoteError(f"{request.get('path', self.address.path)} {head['error']}")
        return head, content

    def _why(self) -> str:
        """What ssh said before it ended."""
        if self._process is not None:
            try:
                self._process.wait(2.0)
            except subprocess.TimeoutExpired:
                return "does not answer"
        text = ""
        if self._errors is not None:
            self._errors.seek(0)
            text = self._errors.read(4096).decode(errors="replace").strip()
        lines = [line for line in text.splitlines() if line.strip()]
        said = lines[-1][:300] if lines else "the connection ended"
        remedy = (
            " Load a key into ssh-agent."
            if "denied" in said
            else " Connect once with ssh to accept its key."
            if "host key" in said.lower()
            else ""
        )
        return said + remedy
