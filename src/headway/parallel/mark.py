"""Moments on the device's own clock, taken without waiting for it."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """A moment on the device's own clock."""

    event: torch.cuda.Event | None
    host: float

    @classmethod
    def now(cls, device: torch.device) -> Mark:
        """Mark the place the device's queue has reached."""
        if device.type != "cuda":
            return cls(None, time.perf_counter())
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return cls(event, time.perf_counter())

    def since(self, earlier: Mark) -> float:
        """Seconds between two marks that the device has passed."""
        if self.event is None or earlier.event is None:
            return self.host - earlier.host
        return earlier.event.elapsed_time(self.event) / 1000
