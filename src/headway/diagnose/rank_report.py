"""What several ranks found out about each other, as plain data: it passes between processes and into `--json`. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from headway.diagnose.check import Check


@dataclass(frozen=True)
class Bandwidth:
    """One collective at one size. `bus` counts the bytes that each rank sends, so that it can be compared with the link's speed."""

    collective: str
    bytes: int
    seconds: float
    algorithm: float
    """Bytes of the result per second."""
    bus: float


@dataclass(frozen=True)
class RanksReport:
    """The checks of all hosts and ranks, and the measured bandwidths."""

    checks: tuple[Check, ...]
    bandwidths: tuple[Bandwidth, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "checks": [check.to_json() for check in self.checks],
            "bandwidth": [asdict(one) for one in self.bandwidths],
        }

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> RanksReport:
        """The report that `to_json` described."""
        return RanksReport(
            tuple(map(Check.from_json, given["checks"])),
            tuple(Bandwidth(**one) for one in given["bandwidth"]),
        )
