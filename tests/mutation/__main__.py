"""`make mutants`: put small mistakes into the source, one at a time, and see whether a test notices each. See CONTRIBUTING.md."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from catalogue import ROOT, CatalogueError, Mutant, mend, read_catalogue
from results import Result, Results, summary, table
from source import SourceError
from trial import BROKEN, KILLED, SURVIVED, Copy, Trial, preload

POLL_SECONDS = 0.02


def main(arguments: Sequence[str] | None = None) -> int:
    """Try what is asked for; 0 if enough mutants are killed, 1 if not, 2 if the catalogue does not fit the source."""
    given = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        mutants = _read(given)
    except (CatalogueError, SourceError) as problem:
        sys.stderr.write(f"{problem}\n")
        return 2
    for mutant in mutants if given.check else ():
        changed = dict(mutant.renamed)
        if mutant.move is not None:
            changed[mutant.move.old] = mutant.move.new
        for old, new in changed.items():
            sys.stdout.write(f"{mutant.id}: `{old}` is now `{new}`\n")
    if given.check or not mutants:
        sys.stdout.write(f"{len(mutants)} mutants fit the source\n")
        return 0 if mutants else 2
    results = Results(given.state / "results.jsonl", given.root, fresh=given.fresh)
    outcomes = _try_all(mutants, results, given)
    found = summary(mutants, outcomes)
    if given.json is not None:
        given.json.write_text(
            json.dumps({**found, "outcomes": outcomes}, indent=1) + "\n", encoding="utf-8"
        )
    sys.stdout.write(table(found) + "\n")
    return 0 if found["good"] else 1


def _read(given: argparse.Namespace) -> list[Mutant]:
    only = given.only or ()
    if given.mend:
        try:
            mutants = read_catalogue(given.root, only=only)
            moves = [mutant.move for mutant in mutants if mutant.move is not None]
        except CatalogueError as problem:
            moves = problem.moves
        mend(moves)
        sys.stdout.write(f"{len(moves)} addresses are mended\n")
    return read_catalogue(given.root, only=only)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=1, help="trials at once")
    parser.add_argument(
        "--only",
        action="append",
        help="mutants whose name (`package: name`) contains this; may be repeated",
    )
    parser.add_argument("--fresh", action="store_true", help="forget what earlier runs found")
    parser.add_argument(
        "--check", action="store_true", help="only see whether every mutant fits the source"
    )
    parser.add_argument(
        "--mend",
        action="store_true",
        help="first write new addresses of functions and tests that have moved into the catalogue",
    )
    parser.add_argument("--quick", action="store_true", help="only run the tests that mutants name")
    parser.add_argument("--json", type=Path, help="write counts and verdicts to this file")
    parser.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        help="the most that the tests a mutant names may take; its package's take 4 times that",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the tree to work on, if not this one"
    )
    parser.add_argument(
        "--state", type=Path, default=ROOT / ".mutants", help="where verdicts are kept"
    )
    return parser.parse_args(arguments)


def _try_all(
    mutants: Sequence[Mutant], results: Results, given: argparse.Namespace
) -> dict[str, Result]:
    outcomes = {one.id: found for one in mutants if (found := results.get(one)) is not None}
    waiting = deque(one for one in mutants if one.id not in outcomes)
    _say(f"{len(mutants)} mutants, {len(outcomes)} known from earlier")
    if not waiting and all(
        one["outcome"] != KILLED or one.get("confirmed") for one in outcomes.values()
    ):
        return outcomes
    preload(given.root)
    with tempfile.TemporaryDirectory(prefix="headway-mutants-") as folder:
        free = [Copy(given.root, Path(folder) / str(number)) for number in range(given.jobs)]
        running: list[_Running] = []
        try:
            while waiting or running:
                while waiting and free:
                    running.append(_Running(waiting.popleft(), free.pop(), given))
                for one in [one for one in running if one.is_done()]:
                    running.remove(one)
                    free.append(one.copy)
                    outcomes[one.mutant.id] = one.result
                    results.put(one.mutant, one.result)
                    _say(
                        f"{one.result['outcome']:<9} {one.mutant.id}  ({one.result['seconds']} s) {one.result['by']}"
                    )
                time.sleep(POLL_SECONDS)
        finally:
            for one in running:
                one.stop()
        unsure = {
            name: one
            for name, one in outcomes.items()
            if one["outcome"] == KILLED and not one.get("confirmed")
        }
        _confirm(unsure, free[0], given)
    for mutant in mutants:
        if mutant.id in unsure:
            results.put(mutant, unsure[mutant.id])
    return outcomes


class _Running:
    """A mutant on trial: first by the tests it names, then by those of its package. There a test must fail twice, since some may depend
    on the time; one that does not is left out from then on."""

    def __init__(self, mutant: Mutant, copy: Copy, given: argparse.Namespace) -> None:
        self.mutant, self.copy, self.given = mutant, copy, given
        self.result: Result = {"outcome": SURVIVED, "by": "", "failed": [], "seconds": 0.0}
        named, self.rest = mutant.targets(given.root)
        self.excused: list[str] = []
        self.doubted: str | None = None
        self.is_named = bool(named)
        copy.change(mutant)
        self.trial: Trial | None = None
        self._start(named if named or given.quick else self.rest)

    def _start(self, targets: Sequence[str]) -> None:
        excused = [option for test in self.excused for option in ("--deselect", test)]
        limit = self.given.seconds if self.is_named else 4 * self.given.seconds
        self.trial = (
            Trial(self.copy, [*targets, *excused], self.mutant.module, limit) if targets else None
        )

    def is_done(self) -> bool:
        """Whether there is a verdict; starts what comes next if there is none."""
        found = self.trial.result() if self.trial is not None else dict(self.result)
        if found is None:
            return False
        doubted, self.doubted = self.doubted, None
        self.result = {**found, "seconds": round(self.result["seconds"] + found["seconds"], 1)}
        if found["outcome"] == BROKEN:
            self.result["output"] = (self.copy.folder / "output.txt").read_text(
                encoding="utf-8", errors="replace"
            )[-2000:]
        elif (
            found["outcome"] == KILLED and not self.is_named and doubted is None and found["failed"]
        ):
            self.doubted = found["by"]
            self._start([found["by"]])
            return False
        elif (
            found["outcome"] == SURVIVED
            and (self.is_named or doubted is not None)
            and not self.given.quick
        ):
            self.excused += [doubted] if doubted is not None else []
            self.is_named = False
            self._start(self.rest)
            return self.trial is None and self._end()
        return self._end()

    def stop(self) -> None:
        """End what is under way."""
        if self.trial is not None:
            self.trial.stop()

    def _end(self) -> bool:
        self.copy.restore()
        return True


def _confirm(outcomes: dict[str, Result], copy: Copy, given: argparse.Namespace) -> None:
    """A test that fails without any mutant too has noticed nothing."""
    killers = sorted(
        {one["by"].partition("[")[0] for one in outcomes.values() if "::" in one["by"]}
    )
    if not killers:
        return
    _say(f"{len(killers)} tests noticed a mutant; they run once without any")
    trial = Trial(copy, killers, None, 40 * given.seconds, stop_at_first=False)
    while (found := trial.result()) is None:
        time.sleep(POLL_SECONDS)
    if found["outcome"] == BROKEN:
        _say((copy.folder / "output.txt").read_text(encoding="utf-8", errors="replace")[-3000:])
    for result in outcomes.values():
        result["confirmed"] = True
        if found["outcome"] == BROKEN or result["by"] in found["failed"]:
            result.update(outcome=BROKEN, by=f"{result['by']} fails without the mutant too")


def _say(text: Any) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
