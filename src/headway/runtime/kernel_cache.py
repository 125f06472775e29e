"""Where compiled kernels are kept between runs: below the user's cache folder instead of /tmp, which
a container loses when it ends.

    ~/.cache/headway/kernels/CPU/            what torch.compile makes (Inductor)
    ~/.cache/headway/kernels/CPU/triton/     Triton's kernels
    ~/.cache/headway/kernels/CPU/flash4/     FlashAttention-4's (kernels/flash4.py)

CPU is a digest of the processor: code for one processor may not run on another, and a home folder may
be shared by machines. GPUs, versions and sources are part of the libraries' own keys.
"""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

from headway.runtime.paths import cache_home

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
TRITON = "TRITON_CACHE_DIR"
CPU_BYTES = 1 << 13
"""Of /proc/cpuinfo: the first processor."""
CPU_FIELDS = (b"model name", b"flags", b"CPU implementer", b"CPU part", b"Features")


def keep_kernels() -> None:
    """Set the folders of compiled kernels, for libraries that are imported later and for child
    processes. A variable that the user has set stays.
    """
    folder = cache_home() / "headway" / "kernels"
    # Libraries would fail where they cannot write; their own choice is /tmp.
    if not _is_writable(folder):
        return
    folder /= _processor()
    if INDUCTOR not in os.environ:
        os.environ[INDUCTOR] = str(folder)
        # Inductor puts Triton's kernels beside its own, wherever the user has those.
        os.environ.setdefault(TRITON, str(folder / "triton"))


def _is_writable(folder: Path) -> bool:
    """Whether a folder, which need not exist yet, can be written."""
    for path in (folder, *folder.parents):
        if path.exists():
            return path.is_dir() and os.access(path, os.W_OK | os.X_OK)
    return False


def _processor() -> str:
    """A short digest of what this processor is and can do."""
    digest = hashlib.sha256(platform.machine().encode())
    try:
        with open("/proc/cpuinfo", "rb") as file:
            first = file.read(CPU_BYTES).split(b"\n\n")[0]
    except OSError:
        first = b""
    for line in first.splitlines():
        if line.startswith(CPU_FIELDS):
            digest.update(line)
    return digest.hexdigest()[:12]
