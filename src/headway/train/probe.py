"""What looks at a run from outside while it trains. The loop marks the parts of a step by name and says when a step is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.train.build import Run

DATA = "headway.data"
FORWARD_BACKWARD = "headway.forward_backward"
OPTIMIZER = "headway.optimizer"
"""Names of the parts of a step in a trace."""

Probe = Callable[["Run"], AbstractContextManager[object]]
"""Opened around the loop; it may set the run's `after_step`."""
