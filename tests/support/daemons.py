"""Debian packages and background programs of the cluster tests. Needs root; everything else lives in one temporary folder.

why_not(packages)        None where the programs are here or could be installed, else the reason in one line
Daemons(folder).start()  a program in the foreground of its own session, its output in a file; stop() ends exactly those
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

APT_SECONDS = 300
START_SECONDS = 30.0
STOP_SECONDS = 5.0


def find_program(name: str) -> str | None:
    """A program on the PATH or where the system's daemons are."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")


def why_not(packages: Mapping[str, str]) -> str | None:
    """Install what is missing of {program: Debian package}; the reason where that cannot be done, None when all are there."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "the cluster tests start daemons, which needs root"
    missing = sorted(
        {package for program, package in packages.items() if find_program(program) is None}
    )
    if not missing:
        return None
    if shutil.which("apt-get") is None:
        return f"{', '.join(missing)} not installed, and there is no apt-get here"
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    lock = ["-o", "DPkg::Lock::Timeout=120"]
    refused = Path("/usr/sbin/policy-rc.d")
    is_new = not refused.exists()
    if is_new:  # installed only: the packages' own daemons must not be started
        refused.write_text("#!/bin/sh\nexit 101\n")
        refused.chmod(0o755)
    try:
        for command in (
            ["apt-get", "update"],
            ["apt-get", *lock, "install", "-y", "--no-install-recommends", *missing],
        ):
            done = subprocess.run(
                command, env=quiet, capture_output=True, text=True, timeout=APT_SECONDS, check=False
            )
            if done.returncode != 0:
                lines = (done.stderr or done.stdout).strip().splitlines()
                return f"{', '.join(missing)} cannot be installed: {lines[-1] if lines else 'no reason given'}"
    except subprocess.TimeoutExpired:
        return f"{', '.join(missing)} cannot be installed: apt-get took longer than {APT_SECONDS} s"
    finally:
        if is_new:
            refused.unlink()
    still = [program for program in packages if find_program(program) is None]
    return f"{', '.join(still)} not found after installing {', '.join(missing)}" if still else None


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [int(socket.getsockname()[1]) for socket in sockets]
    finally:
        for listener in sockets:
            listener.close()


def short_folder() -> Path:
    """A folder with a short name that every user may enter: sockets have short names, and munge looks at each folder above its own."""
    folder = Path(tempfile.mkdtemp(prefix="hwc-"))
    folder.chmod(0o755)
    return folder


def wait_until(ready: Callable[[], bool], condition: str, seconds: float = START_SECONDS) -> float:
    """Wait until `ready` is true; returns the seconds it took."""
    begun = time.monotonic()
    while not ready():
        if time.monotonic() - begun > seconds:
            raise TimeoutError(f"{condition}: not within {seconds:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - begun


class Daemons:
    """Programs that run until `stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a program under a name; its output goes to NAME.out."""
        program = find_program(command[0])
        assert program is not None
        with open(self.folder / f"{name}.out", "ab") as output:
            child = subprocess.Popen(
                [program, *command[1:]],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.running[name] = child
        return child

    def end(self, name: str, number: int = signal.SIGTERM) -> None:
        """End one program; with SIGKILL if it does not listen."""
        child = self.running.pop(name)
        if child.poll() is None:
            child.send_signal(number)
        try:
            child.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()

    def stop(self) -> None:
        """End all programs, the last one first."""
        for name in reversed(list(self.running)):
            self.end(name)

    def output(self) -> str:
        """The last lines of every program, for a failure's message."""
        texts = (
            (path.name, path.read_text(errors="replace").splitlines()[-8:])
            for path in sorted(self.folder.glob("*.out"))
        )
        return "\n".join(f"{name}: {line}" for name, lines in texts for line in lines)
