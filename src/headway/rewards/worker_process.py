"""The process of a reward: `python -m headway.rewards.worker_process`. Setup and inputs on stdin,
answers on stdout.

    in     {"scorer": "user", "settings": {...}, "memory_bytes": ..., ...}, then inputs
    out    {"problem": null} when ready, then {"value": 1.0, "details": {}} or {"problem": "..."}

Every message has a `number`, and its answer the same one: an answer that comes from elsewhere, such
as from a fork of the user's code, is never taken for that of the next input.
"""

from __future__ import annotations

import ctypes
import math
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from headway.rewards.messages import read_message, write_message
from headway.rewards.scoring import SCORERS

NEW_PIDS = 0x20000000
NEW_USER = 0x10000000
PR_SET_PDEATHSIG = 1
LOOK_SECONDS = 0.5
"""How often the guard looks for its parent, where its pipe does not say."""
LARGEST_FILE = 1 << 30
"""Bytes of a file that a reward may write."""
DETAILS = 32
"""Further numbers that a reward may return."""


def main() -> int:
    """Fork the worker, and end with whichever of trainer and worker ends first."""
    # A terminal sends these to the trainer's whole group; when this ends is for the trainer to say.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # What Python has compiled of a user's file counts as current for a second and as long as the
    # size stays: a file that was just edited would be the old one.
    sys.dont_write_bytecode = True
    parent = os.getppid()
    isolate_processes()
    worker = _fork(_keep_worker)

    # Only the worker holds the other end of the answers now, so its death is seen at once.
    os.close(1)
    poll = select.poll()
    poll.register(0, 0)  # POLLHUP alone: the trainer is gone
    worker_ended = os.pidfd_open(worker) if hasattr(os, "pidfd_open") else None
    if worker_ended is not None:
        poll.register(worker_ended, select.POLLIN)
    while os.getppid() == parent:
        if poll.poll(LOOK_SECONDS * 1000):
            break
        if os.waitpid(worker, os.WNOHANG)[0]:
            break
    try:
        os.kill(worker, signal.SIGKILL)
    except ProcessLookupError:
        pass
    return 0


def _fork(work: Callable[[], int]) -> int:
    """Run a function in a fork that ends with this process; its process id."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # A process asks for itself alone, so the child does; it may find its parent gone already.
        _die_with(parent)
        code = 1
        try:
            code = work()
        finally:
            os._exit(code)
    return child


def _keep_worker() -> int:
    """The first process of the namespace: its end kills all others in it. The kernel protects it
    from signals of its own namespace, so that it cannot be the worker, which may kill itself.
    """
    worker = _fork(_work_apart)
    os.close(0)
    os.close(1)
    # Orphans of the user's code end up here, too.
    while os.wait()[0] != worker:
        continue
    return 0


def _work_apart() -> int:
    # A group of its own: what signals its group does not meet the guard.
    os.setpgid(0, 0)
    return work()


def isolate_processes() -> None:
    """Give the children a namespace of process ids: they see no process outside of it, and all end
    with the first. A system without such namespaces is left alone.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # Root needs no more than this.
    if libc.unshare(NEW_PIDS) == 0:
        return
    # Others may only do it inside a new user namespace, in which they keep their own ids.
    user = os.getuid()
    group = os.getgid()
    if libc.unshare(NEW_USER | NEW_PIDS) != 0:
        return
    # In this order: the kernel takes a map of groups only where setgroups is denied.
    for name, line in (
        ("setgroups", "deny"),
        ("uid_map", f"{user} {user} 1"),
        ("gid_map", f"{group} {group} 1"),
    ):
        try:
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(line)
        except OSError:
            return


def _die_with(parent: int) -> None:
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # In a namespace of its own the parent is 0; outside of it, another one has adopted it.
    if os.getppid() not in (0, parent):
        os._exit(1)


def work() -> int:
    """Answer until stdin ends."""
    messages = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDWR)
    # What the user's code prints is no answer, and it reads no inputs.
    os.dup2(null, 0)
    os.dup2(null, 1)

    setup = read_message(messages)
    if setup is None:
        return 0
    # Before anything of the user is imported: an import can fill memory as well.
    bound_memory(setup["memory_bytes"])
    sys.path[:] = setup["path"]
    worker = os.getpid()
    number = setup["number"]
    try:
        scorer = SCORERS[setup["scorer"]](setup["settings"])
    except Exception as problem:
        write_message(answers, {"number": number, "problem": f"{problem}"})
        return 0
    write_message(answers, {"number": number, "problem": None})

    while (inputs := read_message(messages)) is not None:
        number = inputs.pop("number")
        try:
            answer = checked(scorer(inputs))
        except MemoryError:
            answer = {"problem": "it needs more memory than memory_gib allows"}
        # sys.exit() in the code of a reward is a failure of one answer, not the end of the worker.
        except (Exception, SystemExit) as problem:
            answer = {"problem": f"{type(problem).__name__}: {problem}"}
        if os.getpid() != worker:
            return 0  # a fork of the user's code, which came back as well
        write_message(answers, {"number": number, **answer})
    return 0


def checked(result: Any) -> dict[str, Any]:
    """The answer that says what a scorer returned, or why it counts as no reward."""
    details: dict[str, float] = {}
    if isinstance(result, Mapping):
        if "reward" not in result:
            return {"problem": "it returned a mapping without the key `reward`"}
        for name, value in list(result.items())[:DETAILS]:
            if name == "reward":
                continue
            number = _number(value)
            if number is None:
                return {"problem": f"its {str(name)[:40]!r} is no finite number"}
            details[str(name)] = number
        result = result["reward"]
    number = _number(result)
    if number is None:
        return {"problem": f"it returned {repr(result)[:80]}; it must be a finite number"}
    return {"value": number, "details": details}


def _number(value: Any) -> float | None:
    """The value of a number, also of numpy or torch; None for text, None, NaN and all else."""
    if value is None or isinstance(value, (str, bytes, bytearray)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    if not math.isfinite(number):
        return None
    return number


def bound_memory(most_bytes: int) -> None:
    """Let allocations and files above a limit fail, where the system has such limits."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        # A file that grows without end is an OSError of the reward, not a full disk of the run.
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    except (ImportError, ValueError, OSError):
        return


if __name__ == "__main__":
    sys.exit(main())
