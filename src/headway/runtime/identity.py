"""Which process a process id means: ids repeat in containers, on other machines and after a while, so that more is needed to name one."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def machine() -> str:
    """This boot of this machine and this process's space of ids; empty where the system does not say."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname() if not Path("/proc/self").exists() else ""


def process_start(pid: int) -> str | None:
    """When a process began; None if it is gone (or ended and not yet collected), or where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZXx" else fields[19]
