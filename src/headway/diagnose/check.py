"""One line of the doctor: what was checked, its state, what was found and the remedy; and the
report of several ranks.

Plain data: it passes between processes and into `--json`. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What was checked, its state and the remedy. warn: it works, but less well; fail: training
    cannot work.
    """

    name: str
    state: State
    detail: str
    remedy: str | None = None

    def on(self, host: str) -> Check:
        """The same check with the host in its name."""
        # The name is what a line begins with; rank_checks.py tells host checks by the colon.
        return replace(self, name=f"{host}: {self.name}")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Check:
        """The check that `to_json` described."""
        return Check(str(data["name"]), data["state"], str(data["detail"]), data["remedy"])


def failures(checks: Iterable[Check]) -> list[Check]:
    """The checks that failed."""
    return [check for check in checks if check.state == "fail"]


@dataclass(frozen=True)
class Bandwidth:
    """One collective at one size.

    `bus` counts the bytes that each rank sends, so that it can be compared with the link's speed.
    """

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
            "bandwidth": [asdict(bandwidth) for bandwidth in self.bandwidths],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> RanksReport:
        """The report that `to_json` described."""
        return RanksReport(
            tuple(map(Check.from_json, data["checks"])),
            tuple(Bandwidth(**bandwidth) for bandwidth in data["bandwidth"]),
        )
