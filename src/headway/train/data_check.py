"""The data of a run is hashed by the run itself: small stores before the first step, the others while it trains, each file once.

In: open data and the ranks; out: damage, which all ranks learn of between two steps, and the line that ends the run: which file, which
steps have read from it, and the newest checkpoint before them. The first rank hashes; where stores are copied to local disks
(`data.stage_to`), the first rank of every machine does.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.load import open_checkpoint, step_folders, step_of
from headway.data.groups import GroupSource
from headway.data.stored_files import UnknownReaders, documents_read_from, stored_files
from headway.errors import CheckpointError, DataError
from headway.train.run_folder import RECIPE

if TYPE_CHECKING:
    from headway.data.open import OpenData
    from headway.runtime.paths import AnyPath
    from headway.train.config import Recipe
    from headway.train.run import Run, Session

log = logging.getLogger("headway")

REPLAY_SECONDS = 60.0
"""How long the steps that have read from a damaged file are searched for; other ranks wait meanwhile."""


@dataclass(frozen=True)
class ReadSteps:
    """The steps of a run that have read from a file."""

    first: int | None
    """None: no step has."""
    last: int
    count: int | None
    """None: not known; then steps from `first` to `last` may have."""


class DataCheck:
    """Hashes the files of a run's data."""

    def __init__(self, data: OpenData, recipe: Recipe, session: Session) -> None:
        process = session.process
        self._data = data
        self._checksums = data.checksums
        self._world = session.world
        self._hashes = process.is_first
        if recipe.data.stage_to is not None:
            self._hashes = process.local_rank == 0
        # Numbers that are made of all data before training, and cached, are made of data that was hashed.
        mixtures = (data.train, *data.valid.values())
        self._hashes_all = any(
            isinstance(part.selection.source, GroupSource) and part.selection.source.keeps_whole
            for mixture in mixtures
            for part in mixture
        )
        self._left: dict[Path, str] = {}

    def at_start(self) -> None:
        """Hash small stores now; damage is a DataError on all ranks."""
        problem: str | None = None
        if self._hashes:
            try:
                self._left = self._checksums.verify_now(
                    stored_files(self._data), everything=self._hashes_all
                )
            except DataError as error:
                problem = str(error)
            except OSError as error:
                problem = f"{error.filename}: cannot be read: {error.strerror or error}. Copy or build the store again."
        problems = [one for one in self._world.gather(problem) if one is not None]
        if problems:
            raise DataError(problems[0])

    def begin(self) -> None:
        """Hash the other files from now on; what is found is seen by `damage`, not by readers."""
        self._checksums.is_watched = True
        if self._left:
            self._checksums.verify_in_background(self._left)

    @property
    def is_damaged(self) -> bool:
        """Whether this rank has found a file that is not what it was."""
        return self._checksums.damage is not None

    def end(self) -> None:
        """Hash no more, and report what was not hashed."""
        unchecked = self._checksums.unchecked
        waiting = self._checksums.waiting
        self._checksums.end()
        if unchecked:
            log.warning(
                "%d data files were read but not verified before the run ended, the first is %s",
                len(unchecked),
                unchecked[0],
            )
        elif waiting:
            log.info(
                "%d of %d large data files were hashed once more during the run; the next start begins with the other %d",
                len(self._left) - len(waiting),
                len(self._left),
                len(waiting),
            )


def explain_damage(run: Run) -> str:
    """The line that ends a run whose data was damaged: the file, the steps, the checkpoint before them. All ranks call it."""
    damage = run.data.checksums.damage
    paths = run.ranks.world.gather(None if damage is None else (str(damage.path), damage.problem))
    text = ""
    if run.process.is_first:
        path, problem = next(one for one in paths if one is not None)
        text = _describe(run, Path(path), problem)
    return run.ranks.world.gather(text)[0]


def _describe(run: Run, path: Path, problem: str) -> str:
    begin = f"{problem} The run stops after step {run.state.step} and saves nothing more."
    command = f"headway train {run.home / RECIPE}"
    steps = _steps_reading(run, path)
    if steps.first is None:
        return f"{begin} No step has trained on what the file holds: put it back, and `{command}` resumes."
    if steps.count is None:
        read = f"Steps {steps.first} to {steps.last} may have read from it"
    elif steps.count == 1:
        read = f"Step {steps.first} has read from it"
    else:
        read = f"{steps.count} steps have read from it, the first is {steps.first}, the last {steps.last}"
    checkpoint = _newest_before(run, steps.first)
    if checkpoint is None:
        return f"{begin} {read}; no checkpoint before them is left. Put the file back and begin again: `{command} --resume never`."
    return f"{begin} {read}. Put the file back and go back to the newest checkpoint before: `{command} --resume {checkpoint}`."


def _steps_reading(run: Run, path: Path) -> ReadSteps:
    """Which steps have read from a file. What cannot be known counts as read."""
    step = run.state.step
    first = run.first_step + 1
    wanted: dict[int, range] = {}
    try:
        for number, source in enumerate(run.data.train):
            documents = documents_read_from(path, source.selection.source, run.data)
            if documents is not None:
                wanted[number] = documents
    except (UnknownReaders, DataError):
        return ReadSteps(first, step, None)
    if not wanted or step < first:
        return ReadSteps(None, step, 0)
    return _replay(run, wanted, first)


def _replay(run: Run, wanted: Mapping[int, range], first: int) -> ReadSteps:
    loader = run.loader
    loader.close()
    ends = time.monotonic() + REPLAY_SECONDS
    try:
        replayed = loader.batches_reading(wanted, stops=lambda: time.monotonic() > ends)
    except DataError:
        return ReadSteps(first, run.state.step, None)
    steps = [run.state.step - loader.steps_after(batch) for batch in replayed.batches]
    steps = [step for step in steps if step >= first]
    if replayed.is_exact:
        return (
            ReadSteps(steps[0], steps[-1], len(steps))
            if steps
            else ReadSteps(None, run.state.step, 0)
        )
    if time.monotonic() <= ends:
        # The plan ended elsewhere than the run: settings were changed on the way, and it says nothing.
        return ReadSteps(first, run.state.step, None)
    if steps:
        return ReadSteps(steps[0], run.state.step, None)
    return ReadSteps(
        run.state.step - loader.steps_after(replayed.num_batches - 1) + 1, run.state.step, None
    )


def _newest_before(run: Run, step: int) -> AnyPath | None:
    """The newest readable checkpoint of an earlier step than this one, on disk or in the object store."""
    places: list[AnyPath] = list(reversed(step_folders(run.checkpoints)))
    remote = run.saver.remote
    if remote is not None:
        try:
            stored = [remote.location / name for name in remote.names()]
        except CheckpointError:
            stored = []
        places += sorted(
            (place for place in stored if place.name.startswith("step-")), key=step_of, reverse=True
        )
    for place in sorted(places, key=step_of, reverse=True):
        if step_of(place) < step:
            try:
                open_checkpoint(place)
            except CheckpointError:
                continue
            return place
    return None
