"""How many files a process may hold open: the soft limit is raised to the hard one, which is what the administrator allows."""

from __future__ import annotations

import sys

MOST = 1 << 20


def raise_open_files() -> None:
    """Raise the soft limit as far as allowed; a system that refuses is left alone."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            return
