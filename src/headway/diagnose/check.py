"""One line of the doctor: what was checked, its state, what was found and the remedy. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

State = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Check:
    """What was checked, its state and the remedy. warn: it works, but less well; fail: training cannot work."""

    name: str
    state: State
    detail: str
    remedy: str | None = None

    def on(self, host: str) -> Check:
        """The same check with the host in its name."""
        return replace(self, name=f"{host}: {self.name}")

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @staticmethod
    def from_json(given: Mapping[str, Any]) -> Check:
        """The check that `to_json` described."""
        return Check(str(given["name"]), given["state"], str(given["detail"]), given["remedy"])


def failures(checks: Iterable[Check]) -> list[Check]:
    """The checks that failed."""
    return [check for check in checks if check.state == "fail"]
