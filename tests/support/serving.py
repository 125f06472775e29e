"""Starts `headway serve` in a process of its own, with real models or with stand-ins, and ends it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

TESTS = Path(__file__).parents[1]
STAND_IN = (
    "import sys; from headway.serve import engine_client; engine_client.ENGINE_MODULE = 'support.stand_in_engine'; "
    "from headway.__main__ import run; run()"
)


def searched() -> str:
    """Where the server finds stand-ins, and headway where it is not the installed one."""
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


@dataclass
class RunningServer:
    """A server that listens."""

    process: subprocess.Popen[bytes]
    url: str
    errors: IO[bytes]
    http: httpx.Client
    signs: Path
    """Files here tell stand-in engines what to do."""

    def client(self) -> httpx.Client:
        """Threads may share it."""
        return self.http

    def log(self) -> str:
        self.errors.seek(0)
        return self.errors.read().decode()

    def wait(self, seconds: float = 20) -> int:
        return self.process.wait(seconds)


@contextmanager
def serving(
    *options: str, stand_in: bool = True, environment: dict[str, str] | None = None
) -> Iterator[RunningServer]:
    """`headway serve` with these options, on a free port of loopback."""
    command = [sys.executable, "-c", STAND_IN] if stand_in else [sys.executable, "-m", "headway"]
    with tempfile.TemporaryFile() as errors, tempfile.TemporaryDirectory() as signs:
        variables = {
            **os.environ,
            "PYTHONPATH": searched(),
            "HEADWAY_TEST_ENGINES": signs,
            **(environment or {}),
        }
        process = subprocess.Popen(
            [*command, "serve", "--port", "0", "--json", *options],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=variables,
        )
        assert process.stdout is not None
        try:
            started = time.monotonic()
            text = ""
            while not text.endswith("}\n") and (line := process.stdout.readline().decode()):
                text += line
            if not text:
                errors.seek(0)
                raise AssertionError(
                    f"the server ended after {time.monotonic() - started:.1f} s: {errors.read().decode()}"
                )
            url = json.loads(text)["url"].rstrip("/")
            with httpx.Client(base_url=url, timeout=30) as client:
                yield RunningServer(process, url, errors, client, Path(signs))
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
            process.stdout.close()
