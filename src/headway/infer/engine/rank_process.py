"""A further rank of an engine: `python -m headway.infer.engine.rank_process`. A `RankSetup` and
then commands on stdin; nothing goes out.

The end of stdin is the end of the process, also in the middle of an exchange. Signals are the first
rank's business.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from headway.errors import CommunicationError, HeadwayError
from headway.runtime.stop import SIGNALS

END_SECONDS = 2.0
"""After the end of stdin, until a rank that waits for others ends."""
log = logging.getLogger("headway")


def main() -> int:
    """Follow the first rank until it closes the pipe."""
    # Ctrl-C reaches the whole process group; the first rank decides what it means.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    # A thread reads, so that the end of stdin is seen also while this rank waits in an exchange.
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    setup = commands.get()
    if setup is None:
        return 0

    # Imported late: torch takes seconds, and a rank whose parent has gone by now ends without it.
    from headway.infer.engine.ranks import LOST_CONTACT, WAIT_SECONDS, end_group, follow
    from headway.infer.load import load_model
    from headway.parallel.collectives import start_group
    from headway.runtime.device import choose_compute
    from headway.runtime.process import Process

    try:
        compute = choose_compute(setup.device, setup.precision, setup.rank)
        backend = "nccl" if compute.device.type == "cuda" else "gloo"
        group = start_group(Process(setup.rank, setup.rank, setup.size), backend, WAIT_SECONDS)
        loaded = load_model(setup.path, device=compute.device, dtype=compute.dtype, group=group)
        follow(_until_none(commands), loaded)
        if backend == "nccl":
            end_group()
    except CommunicationError:  # the first rank says which one is gone
        return LOST_CONTACT
    except HeadwayError as problem:
        log.error("rank %d: %s", setup.rank, problem)
        return problem.exit_code
    return 0


def _until_none(commands: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while (command := commands.get()) is not None:
        yield command


def _read(commands: queue.SimpleQueue[Any]) -> None:
    """Queue the commands of the first rank, which has started this process: what is unpickled is
    its own. None marks the end."""
    try:
        while True:
            commands.put(pickle.load(sys.stdin.buffer))
    except (EOFError, pickle.UnpicklingError):
        commands.put(None)
    # Long enough for `main` to end in order; then for good, also out of an exchange.
    time.sleep(END_SECONDS)
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    code = main()
    sys.stderr.flush()
    os._exit(code)  # not through handlers that wait for ranks which are gone
