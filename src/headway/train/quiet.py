"""What stands in for a file on ranks that do not write it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class QuietMetrics:
    """The metrics of a rank that is not the first: the first one writes the same numbers."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Nothing to write."""

    def sync(self) -> None:
        """Nothing to wait for."""

    def cut_to(self, step: int) -> None:
        """Nothing to cut."""
