"""Whether this system lets this user make the namespaces of sandboxes."""

from functools import cache

from headway.rewards.sandbox.client import SandboxClient, SandboxRefusal

LIMITS = {
    "memory_bytes": 1 << 30,
    "processes": 16,
    "disk_bytes": 16 << 20,
    "output_bytes": 1 << 20,
    "folders": [],
}


@cache
def why_no_sandbox() -> str | None:
    """Why no sandbox can be made here; None where they can."""
    client = SandboxClient(LIMITS)
    try:
        client.require()
    except SandboxRefusal as problem:
        return str(problem)
    finally:
        client.close()
    return None
