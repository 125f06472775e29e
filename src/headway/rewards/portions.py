"""Answers that are judged at the same time, and handed over as they are judged.

    inputs -> at most `at_once` of them in threads -> {0: outcome, 2: outcome}, {1: outcome}, ...

Whoever reads the portions keeps each before it takes the next, and only then do threads begin other
answers. So a kill loses no more than the answers that were begun, and quick ones of the last moment.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from headway.rewards.base import RewardOutcome


class OutcomeThreads:
    """Threads that wait for processes or servers, each for one answer at a time."""

    def __init__(self, at_once: int, name: str, seconds: float = 0.0) -> None:
        """`seconds`: how long the outcomes of quicker calls are collected before they are handed
        over.
        """
        self._at_once = at_once
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix=name)

    def portions(
        self,
        outcome_of: Callable[[dict[str, Any]], RewardOutcome],
        inputs: Sequence[dict[str, Any]],
    ) -> Iterator[dict[int, RewardOutcome]]:
        """The outcomes of all inputs by their index, in the order in which they are ready."""
        waiting = iter(enumerate(inputs))
        running: dict[Future[RewardOutcome], tuple[int, float]] = {}
        ready: queue.SimpleQueue[Future[RewardOutcome]] = queue.SimpleQueue()
        portion: dict[int, RewardOutcome] = {}
        handed_over = time.monotonic()
        while True:
            for index, item in islice(waiting, self._at_once - len(running)):
                began = time.monotonic()
                future = self._begin(outcome_of, item)
                running[future] = (index, began)
                # A queue instead of `wait`, which looks at all that runs each time one is ready.
                future.add_done_callback(ready.put)
            if not running:
                break

            # One that is ready, and all others that became ready meanwhile: on a slow disk a
            # portion grows, and the number of portions does not.
            future = ready.get()
            slowest = 0.0
            while True:
                index, began = running.pop(future)
                portion[index] = future.result()
                slowest = max(slowest, time.monotonic() - began)
                if ready.empty():
                    break
                future = ready.get()
            if slowest >= self._seconds or time.monotonic() - handed_over >= self._seconds:
                yield portion
                portion = {}
                handed_over = time.monotonic()
        if portion:
            yield portion

    def _begin(
        self, outcome_of: Callable[[dict[str, Any]], RewardOutcome], item: dict[str, Any]
    ) -> Future[RewardOutcome]:
        try:
            return self._threads.submit(outcome_of, item)
        except RuntimeError:
            # The pool was shut down by another thread.
            raise CancelledError("the reward was closed while it judged answers") from None

    def close(self, *, wait: bool = True) -> None:
        """End the threads; what has not begun is cancelled."""
        self._threads.shutdown(wait=wait, cancel_futures=True)
