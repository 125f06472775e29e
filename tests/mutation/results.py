"""What earlier runs found, and the table by package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from catalogue import Mutant
from trial import BROKEN, KILLED

LEAST_OVERALL, LEAST_IN_PACKAGE = 0.95, 0.90
Result = dict[str, Any]


class Results:
    """One line of JSON per verdict, appended at once, so that an interrupted run continues where it was."""

    def __init__(self, path: Path, root: Path, *, fresh: bool) -> None:
        self.path, self.root = path, root
        path.parent.mkdir(parents=True, exist_ok=True)
        if fresh:
            path.unlink(missing_ok=True)
        self.known: dict[str, Result] = {}
        self._keys: dict[str, str] = {}
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
            found = json.loads(line)
            self.known[found["key"]] = found
        self._tests = digest(sorted((root / "tests").rglob("*.py")))

    def key(self, mutant: Mutant) -> str:
        """A verdict holds as long as the mutant and the file it changes are the same; the file as it was when it was first asked for."""
        if mutant.id not in self._keys:
            self._keys[mutant.id] = f"{mutant.digest}-{digest([mutant.source(self.root)])}"
        return self._keys[mutant.id]

    def get(self, mutant: Mutant) -> Result | None:
        """What is known: a kill while the file of the test that made it is the same, anything else while all tests are."""
        found = self.known.get(self.key(mutant))
        if found is None or found["outcome"] == BROKEN:
            return None
        by = self.root / found["by"].partition("::")[0]
        same = (
            found["outcome"] == KILLED and by.is_file() and digest([by]) == found.get("by_digest")
        )
        return found if same or found["tests"] == self._tests else None

    def put(self, mutant: Mutant, result: Result) -> None:
        """Keep a verdict."""
        by = self.root / result["by"].partition("::")[0]
        whole = {**result, "key": self.key(mutant), "id": mutant.id, "tests": self._tests}
        if result["outcome"] == KILLED and by.is_file():
            whole["by_digest"] = digest([by])
        self.known[whole["key"]] = whole
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(whole) + "\n")


def digest(files: Sequence[Path]) -> str:
    """One number of the content of some files."""
    found = hashlib.sha256()
    for path in files:
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()[:16]


def summary(mutants: Sequence[Mutant], outcomes: Mapping[str, Result]) -> dict[str, Any]:
    """Counts by package and over all, and the names of what was not killed."""
    packages: dict[str, Any] = {}
    for mutant in mutants:
        if mutant.id not in outcomes:
            continue
        counts = packages.setdefault(mutant.package, {"mutants": 0, "killed": 0, "not_killed": []})
        counts["mutants"] += 1
        if outcomes[mutant.id]["outcome"] == KILLED:
            counts["killed"] += 1
        else:
            counts["not_killed"].append(
                {"name": mutant.name, **{k: outcomes[mutant.id][k] for k in ("outcome", "by")}}
            )
    for counts in packages.values():
        counts["rate"] = counts["killed"] / counts["mutants"]
    total, killed = (
        sum(counts[name] for counts in packages.values()) for name in ("mutants", "killed")
    )
    good = (
        total > 0
        and killed >= LEAST_OVERALL * total
        and all(counts["rate"] >= LEAST_IN_PACKAGE for counts in packages.values())
    )
    return {
        "mutants": total,
        "killed": killed,
        "rate": killed / max(1, total),
        "good": good,
        "packages": packages,
    }


def table(found: Mapping[str, Any]) -> str:
    """The summary for people."""
    lines = [f"{'package':<12} {'mutants':>7} {'killed':>7} {'not killed':>10} {'rate':>7}"]
    for package, counts in [*found["packages"].items(), ("all", found)]:
        lines.append(
            f"{package:<12} {counts['mutants']:>7} {counts['killed']:>7} {counts['mutants'] - counts['killed']:>10} {counts['rate']:>7.1%}"
        )
    for package, counts in found["packages"].items():
        lines += [
            f"{one['outcome']}: {package}: {one['name']} {one['by']}".rstrip()
            for one in counts["not_killed"]
        ]
    return "\n".join(lines)
