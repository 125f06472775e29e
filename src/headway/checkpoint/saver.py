"""Asynchronous saving: the state of a step is copied to host memory. A thread writes and verifies
the copy while training continues.

    training:  ... step | copy to the host | step | step | step ...     stalled only for the copy
    thread:                                | write, hash, fsync, read back, rename, retain |

One save runs at a time; the next one waits for it. Uploads to an object store run in a separate
thread (`uploads.py`) and delay no asynchronous save. With `async: false`, or where host memory has
no room for the copy, saves block training until the checkpoint is on disk and uploaded.

A save that fails leaves the older checkpoints in place, sends an alert and does not end training.
All ranks reach the same result: they agree on every phase over a process group used by nothing
else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headway.checkpoint.best import ManifestCache
from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.host_copy import HostCopy
from headway.checkpoint.load import step_folders, step_of
from headway.checkpoint.manifest import Json
from headway.checkpoint.retention import RunScope, retain
from headway.checkpoint.save import ALONE, Writers, clean, save_checkpoint
from headway.checkpoint.uploads import Uploads
from headway.errors import CheckpointError, HeadwayError
from headway.parallel.box import StateTensor
from headway.runtime.machine import ram_bytes
from headway.runtime.storage import writing

if TYPE_CHECKING:
    from headway.checkpoint.remote import RemoteCheckpoints

log = logging.getLogger("headway")

MEMORY_SHARE = 0.5
"""`async: auto` makes a copy only if the copies of all ranks on a machine fit into this share of
its free memory.
"""
POLL_SECONDS = 0.1
"""How often `leave_uploads` looks whether the uploads are done."""
HURRY_SECONDS = 5.0
"""How long a stopped run still waits for an upload before it leaves it to the next start."""
ABANDON_SECONDS = 60.0
"""How long a failing run waits for a running save."""


@dataclass(frozen=True)
class SaveJob:
    """One save, without its tensors."""

    step: int
    scalars: Mapping[str, Json]
    snapshot: bool = False
    """A snapshot does not count as a checkpoint: `saved_step` and `started_step` stay."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        kind = "snapshot" if self.snapshot else "checkpoint"
        return f"the {kind} of step {self.step}"


class Saver:
    """Saves the state of a run, asynchronously where memory allows.

    All ranks call the same methods in the same order.
    """

    def __init__(
        self,
        checkpoints: Path,
        config: CheckpointConfig,
        writers: Writers = ALONE,
        tokenizer: Path | None = None,
    ) -> None:
        self.checkpoints = checkpoints
        self.config = config
        self.writers = writers
        self.tokenizer = tokenizer
        self.saved_step = 0
        """Step of the newest complete checkpoint. The run sets it to the step that it starts from.
        """
        self.started_step = 0
        """Step of the newest checkpoint that was started; equal on all ranks."""
        self.failed: CheckpointError | None = None
        """Why the newest save failed; None once one succeeds."""
        self.report: Callable[[str], None] = lambda text: None
        """Called with a message for every save, upload or deletion that fails, on rank 0, from any
        thread.
        """
        self.remote: RemoteCheckpoints | None = None
        """Where complete checkpoints are uploaded."""
        self.ranks_here = 1
        """Ranks that share the memory of this machine."""
        self.run = ""
        """The id of the run, written into its checkpoints."""
        self.on_saved: Callable[[int], None] = lambda step: None
        """Called on rank 0 with the step of every complete save, before older checkpoints are
        deleted.
        """
        self.manifests = ManifestCache()
        self.uploads = Uploads(self._send, self._report_failed_upload)

        # Held by `_best_effort`, which the threads of the save and of the upload call. Retention
        # must not run in both at once.
        self._tidying = threading.Lock()
        self._failures = 0
        """Saves in a row that failed."""
        self._host_copy = HostCopy()
        self._copy_fits: bool | None = None
        """What the ranks agreed on for `async: auto`; None before the first save."""
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None
        """An unexpected exception of the thread, which the next wait raises."""

    def send_to(self, remote: RemoteCheckpoints) -> None:
        """Upload every checkpoint once it is complete on disk."""
        self.remote = remote
        self.uploads.hurry = lambda on: remote.store.hurry(on=on)

    def on_failure(self, report: Callable[[str], None]) -> None:
        """Send messages about failures to `report`: those of saves, and those of the object store
        that is known by now (see `send_to`) when it does not answer.
        """
        self.report = report
        if self.remote is not None:

            def warn(text: str) -> None:
                log.warning("%s", text)
                report(text)

            self.remote.store.on_retry = warn

    @property
    def is_busy(self) -> bool:
        """Whether a save or an upload is running."""
        thread = self._thread
        return (thread is not None and thread.is_alive()) or self.uploads.is_busy

    def save(self, job: SaveJob, records: Iterable[StateTensor]) -> float:
        """Save, and return the seconds the caller was blocked.

        A failure is reported, not raised. A synchronous save also waits for the upload.
        """
        begun = time.perf_counter()
        # There is one host copy: the running save must have written it before it is overwritten.
        self.wait_for_save()
        if not job.snapshot:
            self.started_step = job.step

        records = list(records)
        if self._is_asynchronous(records):
            copied = self._host_copy.take(records)
            self._thread = threading.Thread(
                target=self._work, args=(job, copied), name="headway-save", daemon=True
            )
            self._thread.start()
        else:
            self._work(job, records)
            self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        """Wait for the running save and all uploads."""
        self.wait_for_save()
        self.uploads.wait()
        self._raise_bug()

    def wait_for_save(self) -> None:
        """Wait for the running save, not for uploads."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_bug()

    def leave_uploads(self, seconds: float) -> None:
        """For a run that stops: uploads that do not finish within `seconds` are left to the next
        start; the disk has the checkpoint.
        """
        self.wait_for_save()
        if self.remote is None:
            return

        deadline = time.monotonic() + seconds
        while not self.uploads.wait(POLL_SECONDS) and time.monotonic() < deadline:
            pass
        # A call that is being retried gives up now, so that the thread reaches its end.
        with self.remote.store.hurried():
            is_sent = self.uploads.wait(HURRY_SECONDS) and self.uploads.failed is None

        # All ranks leave or none does: otherwise the next gather of an upload waits for a rank that
        # has gone.
        if not all(self.writers.gather(is_sent)):
            self.uploads.leave()
            if self.writers.rank == 0:
                log.warning(
                    "the checkpoint of step %d is on disk but not uploaded; "
                    "the next start uploads it",
                    self.saved_step,
                )
        self._raise_bug()

    def require(self) -> None:
        """Wait, and raise the error of the newest save if it failed: a run must not end with a
        silent loss.
        """
        self.wait()
        if (problem := self.failed or self.uploads.failed) is not None:
            raise CheckpointError(
                f"the last save failed: {problem} In {self.checkpoints} {self._describe_newest()}. "
                "Run the same command again to continue."
            )

    def abandon(self) -> None:
        """For a failing run: wait a limited time for running saves and uploads."""
        deadline = time.monotonic() + ABANDON_SECONDS
        if self._thread is not None:
            self._thread.join(ABANDON_SECONDS)
        self.uploads.wait(max(0.0, deadline - time.monotonic()))

    def _raise_bug(self) -> None:
        bug = self._bug or self.uploads.bug
        self._bug = self.uploads.bug = None
        if bug is not None:
            raise bug

    def _is_asynchronous(self, records: list[StateTensor]) -> bool:
        """Whether saves use a copy in host memory. All ranks decide together at the first save."""
        wanted = self.config.asynchronous
        if self._copy_fits is None and wanted == "auto":
            rank_bytes = sum(tensor.nbytes for record in records for _, tensor in record.boxes)
            # The ranks of a machine decide at the same moment, each before it has allocated.
            needed = rank_bytes * self.ranks_here
            free = ram_bytes()[1]
            fits = free is None or needed <= MEMORY_SHARE * free
            self._copy_fits = all(self.writers.gather(fits))
            if not self._copy_fits and self.writers.rank == 0:
                log.warning(
                    "saves block training: a copy needs %.1f GB, more than half of the free host "
                    "memory",
                    needed / 1e9,
                )
        return wanted is True or self._copy_fits is True

    def _work(self, job: SaveJob, records: list[StateTensor]) -> None:
        """One whole save.

        Failures are reported; an unexpected exception is raised later in the main thread.
        """
        begun = time.perf_counter()
        try:
            path = save_checkpoint(
                self.checkpoints,
                job.step,
                records,
                job.scalars,
                self.tokenizer,
                self.writers,
                snapshot=job.snapshot,
                run=self.run,
                needed=self.uploads.names,
            )

            if not job.snapshot:
                self.saved_step = job.step
            if self.writers.rank == 0:
                log.info("saved %s in %.1f s", path, time.perf_counter() - begun)
            self._best_effort(
                lambda: self.on_saved(job.step), "the record of saved steps", "written"
            )

            # Before retention, which keeps what waits for its upload.
            if self.remote is not None:
                self.uploads.put(path.name)
            self._retain(job.step)

            self.failed = None
            self._failures = 0
        except CheckpointError as problem:
            self._report_failed_save(job, problem)
        except BaseException as bug:  # raised by the next wait
            self._bug = bug

    def _send(self, name: str) -> None:
        """Upload a checkpoint.

        If that fails, the local one stays and the next save or start tries again.
        """
        remote = self.remote
        assert remote is not None
        begun = time.perf_counter()
        path = self.checkpoints / name
        remote.publish(path, self.uploads.writers)
        if self.writers.rank == 0:
            log.info(
                "uploaded %s to %s in %.1f s", name, remote.location, time.perf_counter() - begun
            )
        scope = RunScope(self.run, step_of(path))
        self._best_effort(lambda: remote.retain(scope), "older checkpoints in the object store")

        # The store keeps what the recipe asks for. The disk keeps what a restart on this machine
        # and `best-1` need.
        local_config = self.config.model_copy(
            update={"keep_last": 1, "keep_best": min(1, self.config.keep_best), "keep_every": None}
        )
        self._best_effort(
            lambda: retain(
                self.checkpoints, local_config, scope, self.manifests, self.uploads.names
            ),
            "older local checkpoints",
        )

    def _report_failed_upload(self, name: str, problem: CheckpointError, in_a_row: int) -> None:
        if self.writers.rank == 0:
            times = ""
            if in_a_row != 1:
                times = f" ({in_a_row} uploads in a row)"
            # Only for its name: messages about saves and uploads call a checkpoint the same.
            job = SaveJob(step_of(self.checkpoints / name), {}, name.startswith("snapshot"))
            self._alert(
                f"{job.name} was not uploaded{times}: {problem} "
                f"Training continues; {self._describe_newest()}."
            )

    def resume_upload(self) -> None:
        """At the start of a run: upload the newest of the checkpoints that are on disk but not in
        the store.
        """
        if self.remote is None:
            return

        newest_missing: str | None = None
        if self.writers.rank == 0 and self.checkpoints.is_dir():
            clean(self.checkpoints)
            names = [path.name for path in step_folders(self.checkpoints, snapshots=False)]
            if names:
                uploaded = self.remote.names()
                missing = [name for name in names if name not in uploaded]
                if missing:
                    newest_missing = missing[-1]

        # Rank 0 alone looked, so that all ranks upload the same checkpoint or none.
        newest_missing = self.writers.gather(newest_missing)[0]
        if newest_missing is not None:
            self.uploads.put(newest_missing)

    def _report_failed_save(self, job: SaveJob, problem: CheckpointError) -> None:
        """Report every failure, not only the first: a repeated failure must not be forgotten."""
        self.failed = problem
        self._failures += 1
        if self.writers.rank == 0:
            times = ""
            if self._failures != 1:
                times = f" ({self._failures} saves in a row)"
            self._alert(
                f"{job.name} was not saved{times}: {problem} "
                f"Training continues; {self._describe_newest()}."
            )

    def _retain(self, step: int) -> None:
        """Delete checkpoints that retention does not keep.

        If this fails, the new checkpoint is complete all the same.
        """
        scope = RunScope(self.run, step)
        names = self.uploads.names
        self._best_effort(
            lambda: retain(self.checkpoints, self.config, scope, self.manifests, names),
            "older checkpoints",
        )

    def _best_effort(self, work: Callable[[], object], subject: str, verb: str = "removed") -> None:
        """Do `work` on rank 0; a failure is reported and fails nothing else."""
        if self.writers.rank == 0:
            try:
                with self._tidying, writing(self.checkpoints, error=CheckpointError):
                    work()
            except HeadwayError as problem:
                self._alert(f"{subject} could not be {verb}: {problem}")

    def _alert(self, text: str) -> None:
        log.error("%s", text)
        self.report(text)

    def _describe_newest(self) -> str:
        """The end of a sentence for messages: what there is on disk to continue from."""
        if self.saved_step:
            return f"the newest checkpoint on disk is of step {self.saved_step}"
        return "there is no checkpoint yet"
