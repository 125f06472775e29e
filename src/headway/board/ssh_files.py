"""Files of runs on another machine, through one long-lived ssh process: keys only, and no shell
ever sees a path.

The command that the other machine's shell runs is a constant. The program it starts
(remote_reader.py) and every path travel over standard input.
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
"""Bytes, compressed and unpacked."""
LONGEST_HEAD = 1 << 16
"""Bytes of the line before an answer."""


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
            address = urlsplit(text)
            port = address.port
        except ValueError:
            raise ConfigError(f"{text}: not an address. {form}") from None

        if address.password is not None:
            raise ConfigError(
                f"ssh://{address.hostname}: holds a password. Only keys are "
                "used; remove it from the address."
            )

        host = address.hostname or ""
        user = address.username
        path = unquote(address.path)
        # A host that begins with a dash would be an option of ssh.
        if not NAME.fullmatch(host) or (user is not None and not USER.fullmatch(user)):
            raise ConfigError(f"{text}: not the name of a host and user. {form}")
        if not path.strip("/") or "\0" in path or address.query or address.fragment:
            raise ConfigError(f"{text}: has no folder. {form}")
        # /~/runs is below the home folder, where ssh starts.
        return cls(host, user, port, path.removeprefix("/~/"))

    def command(self, config: str | None = None) -> list[str]:
        """The words that start ssh."""
        return ssh_words(
            Host(self.host, self.user, self.port), SshOptions(COMMAND[0], config), COMMAND
        )


class SshRuns:
    """The runs below a folder of another machine, as `RemoteFiles`.

    One connection for all questions; a broken one is opened again at the next question.
    """

    poll_seconds = 0.5

    def __init__(self, address: SshAddress, config: str | None = None) -> None:
        self.address = address
        self.config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: IO[bytes] | None = None
        self._lock = threading.Lock()

    def listing(self) -> tuple[float, dict[str, RemoteRun]]:
        """The clock there, and the files of every run."""
        head, content = self._ask({"do": "list", "root": self.address.path})
        listed: Any = json.loads(content)
        runs: dict[str, RemoteRun] = {}
        for run, (stats, checkpoints) in listed.items():
            run_files = {path: RemoteFile(*stat) for path, stat in stats.items()}
            runs[run] = RemoteRun(run_files, checkpoints)
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
        process = self._process
        self._process = None
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
        """Start ssh and send it the program that it runs there."""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            # Its own session: a Ctrl-C for the board does not reach it before it is closed.
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
        # base64 has no line break, and the command there reads one line.
        program = files("headway.board").joinpath("remote_reader.py").read_bytes()
        process.stdin.write(base64.b64encode(program) + b"\n")
        process.stdin.flush()
        return process

    def _ask(self, request: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request and read its answer; whatever goes wrong closes the connection."""
        with self._lock:
            timer: threading.Timer | None = None
            try:
                process = self._process = self._process or self._start()
                # A read from a pipe has no time limit: killing ssh ends it.
                timer = threading.Timer(ANSWER_SECONDS, process.kill)
                timer.daemon = True
                timer.start()
                assert process.stdin is not None and process.stdout is not None
                process.stdin.write(json.dumps(request).encode() + b"\n")
                process.stdin.flush()

                line = process.stdout.readline(LONGEST_HEAD)
                head: Any = None
                if line:
                    head = json.loads(line)
                if not isinstance(head, dict):
                    raise RemoteError(self._why())
                size = int(head.get("size", -1))
                if not 0 <= size <= LARGEST_ANSWER:
                    raise RemoteError(self._why())

                # A few compressed bytes can become gigabytes: unpacking is bounded, too.
                packed = process.stdout.read(size)
                content = zlib.decompressobj().decompress(packed, LARGEST_ANSWER)
            except RemoteError:
                self.close()
                raise
            except (OSError, ValueError, zlib.error):
                reason = self._why()
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

        # Warnings and banners come first; the last line is the reason.
        lines = [line for line in text.splitlines() if line.strip()]
        reason = "the connection ended"
        if lines:
            reason = lines[-1][:300]

        if "denied" in reason:
            return reason + " Load a key into ssh-agent."
        if "host key" in reason.lower():
            return reason + " Connect once with ssh to accept its key."
        return reason
