"""Two machines on one: network namespaces joined by a cable of given speed. Needs root and the programs ip and tc."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

ADDRESSES = ("10.173.0.1", "10.173.0.2")


def why_not() -> str | None:
    """Why namespaces cannot be made here; None where they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} not found (package iproute2)"
    name = f"hw{os.getpid()}x"
    if (
        subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode
        != 0
    ):
        return "this system makes no network namespaces"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@contextmanager
def two_nodes(rate: str | None = None) -> Iterator[tuple[str, str]]:
    """The names of two namespaces that reach each other at ADDRESSES; `rate` limits both directions, e.g. 100mbit."""
    names = (f"hw{os.getpid()}a", f"hw{os.getpid()}b")
    cables = (f"v{os.getpid()}a", f"v{os.getpid()}b")
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run(
            "ip",
            "link",
            "add",
            cables[0],
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            cables[1],
            "netns",
            names[1],
        )
        for name, cable, address in zip(names, cables, ADDRESSES, strict=True):
            within(name, "ip", "addr", "add", f"{address}/24", "dev", cable)
            within(name, "ip", "link", "set", cable, "up")
            within(name, "ip", "link", "set", "lo", "up")
            if rate is not None:
                within(
                    name,
                    "tc",
                    "qdisc",
                    "add",
                    "dev",
                    cable,
                    "root",
                    "tbf",
                    "rate",
                    rate,
                    "burst",
                    "256kb",
                    "latency",
                    "400ms",
                )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def within(name: str, *command: str) -> None:
    """Run a command inside a namespace."""
    run("ip", "netns", "exec", name, *command)


def run(*command: str) -> None:
    """Run a command that must succeed."""
    subprocess.run(command, check=True, capture_output=True)
