"""The worker's end of a launcher: a program and its steps come in, a `RunResult` goes out."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import headway
from headway.rewards.messages import read_message, write_message
from headway.rewards.sandbox.expression import Step
from headway.rewards.sandbox.trials import RunResult

LARGEST_RESULT = 64 << 20
PROBE = "print(len(input()))"
"""Shows that Python starts in a sandbox, reads its stdin and prints."""
REMEDY = (
    "Programs of answers run only where Linux lets this user make namespaces. Allow them (sysctl "
    "user.max_user_namespaces=10000, on Ubuntu kernel.apparmor_restrict_unprivileged_userns=0, for "
    "a container docker run --privileged), or score on another machine."
)


class SandboxRefusal(Exception):
    """No sandbox can be made here; says what is missing."""


class SandboxClient:
    """A launcher, which is started when it is needed."""

    def __init__(self, limits: Mapping[str, Any]) -> None:
        self.limits = dict(limits)
        self._process: subprocess.Popen[bytes] | None = None

    def require(self) -> None:
        """Run a program that must work; what is missing is a SandboxRefusal with its remedy."""
        result = self.run(PROBE, None, "12345", 30.0)
        # The length, not the text: what comes back shows that the program ran.
        if result.status != "ended" or result.output.strip() != "5":
            raise SandboxRefusal(
                f"Python does not start in a sandbox (exit code {result.code}). Its libraries may "
                "be in a folder that sandboxes do not show: name it in reward.N.folders."
            )

    def run(
        self, program: str, steps: Sequence[Step] | None, stdin: str, seconds: float
    ) -> RunResult:
        """Run a program in a sandbox of its own."""
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        encoded = None
        if steps is not None:
            encoded = [{"kind": step.kind, "code": step.code} for step in steps]
        job = {
            "program": program,
            "steps": encoded,
            "stdin": stdin,
            "limits": {**self.limits, "seconds": seconds},
        }
        try:
            write_message(process.stdin, job)
            answer = read_message(process.stdout, LARGEST_RESULT)
        except OSError:
            answer = None
        if answer is None:
            self.close()
            raise SandboxRefusal("the process that starts sandboxes has ended")
        if "refused" in answer:
            raise SandboxRefusal(f"no sandbox can be made: {answer['refused']}. {REMEDY}")
        return RunResult(answer["status"], answer["code"], answer["output"])

    def _start(self) -> subprocess.Popen[bytes]:
        """A new interpreter with an empty environment and no file but its pipes."""
        source = Path(headway.__file__).parents[1]
        return subprocess.Popen(
            # -P: no module of the working directory stands in for one of Python. -B: nothing is
            # written into folders of the user.
            [sys.executable, "-P", "-B", "-m", "headway.rewards.sandbox.launcher"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=os.sep,
            env={"PYTHONPATH": str(source)},
            close_fds=True,
        )

    def close(self) -> None:
        """End the launcher."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            # What was not written is lost with the process.
            with suppress(OSError):
                stream.close()
