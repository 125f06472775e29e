"""The command line in a process of its own that is forked from this one: nothing is imported again, which takes seconds each time.

It has its own signals, exit code, standard output and standard error. What only a fresh interpreter shows (what is imported when, what
happens at its very end) needs one: `headway(..., afresh=True)` in runs.py.
"""

import io
import os
import signal
import sys
import tempfile
import time
import traceback

from headway.cli import main


class Forked:
    """A started command with what tests use of subprocess.Popen; what it wrote is in `stdout` and `stderr` after `wait`."""

    def __init__(self, *arguments: str, out: int | None = None, err: int | None = None) -> None:
        """`out` and `err` are descriptors to write to instead of files of its own, for instance a pipe nobody reads."""
        self.returncode: int | None = None
        self.stdout = self.stderr = ""
        self._files = [
            _nameless_file() if stream is None else os.dup(stream) for stream in (out, err)
        ]
        self._is_own = [out is None, err is None]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _become(list(arguments), self._files)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
                self.stdout, self.stderr = (
                    _content(file) if is_own else _closed(file)
                    for file, is_own in zip(self._files, self._is_own, strict=True)
                )
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self, timeout: float = 120) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                self.send_signal(signal.SIGKILL)
                raise TimeoutError(f"not done after {timeout} s")
            time.sleep(0.005)
        return code


def _nameless_file() -> int:
    descriptor, path = tempfile.mkstemp(prefix="headway-forked-")
    os.unlink(path)
    return descriptor


def _content(descriptor: int) -> str:
    os.lseek(descriptor, 0, os.SEEK_SET)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        return file.read()


def _closed(descriptor: int) -> str:
    os.close(descriptor)
    return ""


def _become(arguments: list[str], files: list[int]) -> None:
    """Run the command line in this process, the forked one, and end it."""
    code = 1
    try:
        for number, descriptor in enumerate(files, start=1):
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, "r", closefd=False), encoding="utf-8")
        sys.stdout = io.TextIOWrapper(
            io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True
        )
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), encoding="utf-8", write_through=True
        )
        sys.argv = ["headway", *arguments]
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)  # not through the exit handlers of the tests
