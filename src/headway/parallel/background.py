"""Work of several operations during backward.

Callables come in; handles go out, which complete in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from headway.parallel.collectives import Handle


class Background:
    """Runs work of several operations during backward, in order.

    On CUDA it has a separate stream, elsewhere a thread.

    A hook that exchanges here must do so for every bucket of a step, because ranks must start all
    collectives in the same order.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = None
        self.thread = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
        else:
            # One thread, so that work keeps its order.
            self.thread = ThreadPoolExecutor(1, thread_name_prefix="headway-exchange")

    def run(self, work: Callable[[], Any]) -> Handle:
        """Start work after everything that was queued before."""
        if self.stream is None:
            assert self.thread is not None
            return _Awaited(self.thread.submit(work))
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            work()
            event = torch.cuda.Event()
            event.record()
        return _Passed(event, work)


@dataclass
class _Awaited:
    """Work in the thread."""

    future: Future[Any]

    def wait(self) -> None:
        self.future.result()


@dataclass
class _Passed:
    """Work on the stream; the current stream waits for it, the host does not."""

    event: torch.cuda.Event
    work: Callable[[], Any]
    """Keeps the tensors it uses alive: until the event has passed, the main stream must not reuse
    their memory."""

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)
