"""The data of a run is hashed by the run itself: small stores before the first step, the others
while it trains, each file once.

In: open data and the ranks; out: damage, which all ranks learn of between two steps, and the line
that ends the run: which file, which steps have read from it, and the newest checkpoint before them.
The first rank hashes; where stores are copied to local disks (`data.stage_to`), the first rank of
every machine does.
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
"""How long the steps that have read from a damaged file are searched for; other ranks wait
meanwhile.
"""


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
        """Whether this rank hashes."""
        if recipe.data.stage_to is not None:
            self._hashes = process.local_rank == 0

        # Numbers of a reference are made of all data before training, and cached. A file that is
        # damaged then must not get into the cache.
        self._hashes_all = False
        for mixture in (data.train, *data.valid.values()):
            for part in mixture:
                source = part.selection.source
                if isinstance(source, GroupSource) and source.keeps_whole:
                    self._hashes_all = True
        self._left: dict[Path, str] = {}
        """Files to hash during training, and the checksums that they should have."""

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
                problem = (
                    f"{error.filename}: cannot be read: {error.strerror or error}. "
                    "Copy or build the store again."
                )
        # Ranks that hash nothing must fail with those that do.
        problems = [text for text in self._world.gather(problem) if text is not None]
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
        # Files that nobody has ever verified are worth a warning. Those that were verified by an
        # earlier run, and not yet by this one, are not.
        if unchecked:
            log.warning(
                "%d data files were read but not verified before the run ended, the first is %s",
                len(unchecked),
                unchecked[0],
            )
        elif waiting:
            log.info(
                "%d of %d large data files were hashed once more during the run; "
                "the next start begins with the other %d",
                len(self._left) - len(waiting),
                len(self._left),
                len(waiting),
            )


def explain_damage(run: Run) -> str:
    """The line that ends a run whose data was damaged. All ranks call it.

    It names the file, the steps that have read from it, and the checkpoint before them.
    """
    damage = run.data.checksums.damage
    paths = run.ranks.world.gather(None if damage is None else (str(damage.path), damage.problem))
    text = ""
    if run.process.is_first:
        path, problem = next(report for report in paths if report is not None)
        text = _describe_damage(run, Path(path), problem)
    return run.ranks.world.gather(text)[0]


def _describe_damage(run: Run, path: Path, problem: str) -> str:
    begin = f"{problem} The run stops after step {run.state.step} and saves nothing more."
    command = f"headway train {run.home / RECIPE}"
    steps = _steps_reading(run, path)
    if steps.first is None:
        return (
            f"{begin} No step has trained on what the file holds: "
            f"put it back, and `{command}` resumes."
        )
    if steps.count is None:
        read = f"Steps {steps.first} to {steps.last} may have read from it"
    elif steps.count == 1:
        read = f"Step {steps.first} has read from it"
    else:
        read = (
            f"{steps.count} steps have read from it, the first is {steps.first}, "
            f"the last {steps.last}"
        )
    checkpoint = _newest_before(run, steps.first)
    if checkpoint is None:
        return (
            f"{begin} {read}; no checkpoint before them is left. "
            f"Put the file back and begin again: `{command} --resume never`."
        )
    return (
        f"{begin} {read}. Put the file back and go back to the newest checkpoint before: "
        f"`{command} --resume {checkpoint}`."
    )


def _steps_reading(run: Run, path: Path) -> ReadSteps:
    """Which steps have read from a file. What cannot be known counts as read."""
    step = run.state.step
    first = run.first_step + 1
    # By the number of the source: its documents that lie in the file.
    wanted: dict[int, range] = {}
    try:
        for index, source in enumerate(run.data.train):
            documents = documents_read_from(path, source.selection.source, run.data)
            if documents is not None:
                wanted[index] = documents
    except (UnknownReaders, DataError):
        return ReadSteps(first, step, None)
    if not wanted or step < first:
        return ReadSteps(None, step, 0)
    return _replay_plan(run, wanted, first)


def _replay_plan(run: Run, wanted: Mapping[int, range], first: int) -> ReadSteps:
    """Plan the batches of the run once more, from lengths alone: which ones read `wanted`?"""
    loader = run.loader
    loader.close()
    deadline = time.monotonic() + REPLAY_SECONDS
    try:
        replayed = loader.batches_reading(wanted, stops=lambda: time.monotonic() > deadline)
    except DataError:
        return ReadSteps(first, run.state.step, None)

    # Steps before `first` belong to the run whose position this one took over (init.content).
    steps = [run.state.step - loader.steps_after(batch) for batch in replayed.batches]
    steps = [step for step in steps if step >= first]
    if replayed.is_exact:
        if steps:
            return ReadSteps(steps[0], steps[-1], len(steps))
        return ReadSteps(None, run.state.step, 0)
    if time.monotonic() <= deadline:
        # The plan ended elsewhere than the run: settings were changed on the way, and it says
        # nothing.
        return ReadSteps(first, run.state.step, None)

    # There was too little time. What was replayed is known; the steps after it may have read.
    if steps:
        return ReadSteps(steps[0], run.state.step, None)
    return ReadSteps(
        run.state.step - loader.steps_after(replayed.num_batches - 1) + 1, run.state.step, None
    )


def _newest_before(run: Run, step: int) -> AnyPath | None:
    """The newest readable checkpoint before a step, on disk or in the object store."""
    # Local ones come first, and the sort below is stable: of one step, the local one is taken.
    paths: list[AnyPath] = list(step_folders(run.checkpoints))
    remote = run.saver.remote
    if remote is not None:
        try:
            names = [name for name in remote.names() if name.startswith("step-")]
        except CheckpointError:
            # The store cannot be reached now. What is on disk may do.
            names = []
        paths += [remote.location / name for name in names]

    for path in sorted(paths, key=step_of, reverse=True):
        if step_of(path) < step:
            try:
                open_checkpoint(path)
            except CheckpointError:
                continue
            return path
    return None
