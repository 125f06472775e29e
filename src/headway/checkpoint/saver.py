"""Saving beside training: a step's state is copied to host memory, then a thread writes, verifies and retains while training goes on.

    training:  ... step | copy to the host | step | step | step ...        stalled only for the copy
    thread:                                | write, hash, fsync, read back, manifest, rename, retain |

One save is under way at a time; the next waits for it, but not for a store: what is whole on the disk is sent by a thread of its own
(`uploads.py`). A save that fails leaves the older checkpoints, is told, and does not end training.
All ranks come to the same end, because they agree on every stage over a group of their own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoint.config import CheckpointConfig
from headway.checkpoint.heads import Heads
from headway.checkpoint.host import HostCopy
from headway.checkpoint.load import step_folders, step_of
from headway.checkpoint.manifest import Json
from headway.checkpoint.remote import Remote
from headway.checkpoint.retention import Own, retain
from headway.checkpoint.save import ALONE, TensorRecord, Writers, clean, save_checkpoint
from headway.checkpoint.uploads import Uploads
from headway.errors import CheckpointError, HeadwayError
from headway.runtime.machine import ram_bytes
from headway.runtime.storage import writing

log = logging.getLogger("headway")

MEMORY_SHARE = 0.5
"""Of the free host memory, what copies of all ranks on a machine may take before `async: auto` writes without a copy."""
POLL_SECONDS = 0.1
HURRY_SECONDS = 5.0
"""How long an upload may still take once a stopped run does not wait for it any longer."""
ABANDON_SECONDS = 60.0
"""How long a failing run still waits for the save under way."""


@dataclass(frozen=True)
class Job:
    """One save."""

    step: int
    scalars: Mapping[str, Json]
    snapshot: bool = False

    @property
    def name(self) -> str:
        """What people call it."""
        return f"the {'snapshot' if self.snapshot else 'checkpoint'} of step {self.step}"


class Saver:
    """Saves the state of a run, beside training where there is memory for a copy. All ranks call the same methods in the same order."""

    def __init__(self, checkpoints: Path, config: CheckpointConfig, writers: Writers = ALONE, tokenizer: Path | None = None) -> None:
        self.checkpoints, self.config, self.writers, self.tokenizer = checkpoints, config, writers, tokenizer
        self.saved_step = 0
        """The newest step of which a checkpoint is known to be complete."""
        self.started_step = 0
        """The newest step of which a checkpoint was begun; the same on all ranks at any moment."""
        self.failed: CheckpointError | None = None
        """Why the newest save failed; None once one succeeds."""
        self.tell: Callable[[str], None] = lambda text: None
        """Told of every save that fails, on the first rank, from any thread."""
        self.remote: Remote | None = None
        """Where checkpoints go once they are complete here."""
        self.ranks_here = 1
        """Ranks on this machine, which share its memory."""
        self.run = ""
        """Which run this is; its checkpoints say so."""
        self.on_saved: Callable[[int], None] = lambda step: None
        """Called on the first rank with the step of every save that is complete, before older ones go."""
        self.heads = Heads()
        """What the checkpoints here say about themselves, read once."""
        self.uploads = Uploads(self._send, self._not_sent)
        self._tidying = threading.Lock()
        self._failures = 0
        self._host = HostCopy()
        self._copies: bool | None = None
        self._thread: threading.Thread | None = None
        self._bug: BaseException | None = None

    def send_to(self, remote: Remote) -> None:
        """Send every checkpoint to a store, once it is complete here."""
        self.remote = remote
        self.uploads.hurry = lambda on: remote.store.hurry(on=on)

    def on_failure(self, tell: Callable[[str], None]) -> None:
        """Whom to tell of saves that fail, and of a store that does not answer."""
        self.tell = tell
        if self.remote is not None:

            def trouble(text: str) -> None:
                log.warning("%s", text)
                tell(text)

            self.remote.store.on_trouble = trouble

    @property
    def is_busy(self) -> bool:
        """Whether a save or an upload is under way."""
        thread = self._thread
        return (thread is not None and thread.is_alive()) or self.uploads.is_busy

    def save(self, job: Job, records: Iterable[TensorRecord]) -> float:
        """Save; returns for how many seconds the caller was kept from other work. A failure is told, not raised."""
        begun = time.perf_counter()
        self.make_room()
        if not job.snapshot:
            self.started_step = job.step
        records = list(records)
        if self._is_beside(records):
            copied = self._host.take(records)
            self._thread = threading.Thread(target=self._work, args=(job, copied), name="headway-save", daemon=True)
            self._thread.start()
        else:
            self._work(job, records)
            self.wait()
        return time.perf_counter() - begun

    def wait(self) -> None:
        """Wait until nothing is under way, neither a save nor an upload."""
        self.make_room()
        self.uploads.wait()
        self._raise_bug()

    def make_room(self) -> None:
        """Wait until no save is under way; what goes to a store keeps nobody waiting."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_bug()

    def part(self, seconds: float) -> None:
        """For a run that was asked to stop: what is whole on the disk but cannot be sent in so many seconds is left to the next start."""
        self.make_room()
        if self.remote is None:
            return
        until = time.monotonic() + seconds
        while not self.uploads.wait(POLL_SECONDS) and time.monotonic() < until:
            pass
        with self.remote.store.hurried():
            is_sent = self.uploads.wait(HURRY_SECONDS) and self.uploads.failed is None
        if not all(self.writers.gather(is_sent)):
            self.uploads.leave()
            if self.writers.rank == 0:
                log.warning("the checkpoint of step %d stays on the disk; the next start sends it", self.saved_step)
        self._raise_bug()

    def require(self) -> None:
        """Wait, and raise what the newest save failed of: at the end of a run nothing may be lost silently."""
        self.wait()
        if (problem := self.failed or self.uploads.failed) is not None:
            raise CheckpointError(
                f"the last save failed: {problem} In {self.checkpoints} {self._newest()}; the same command goes on from there."
            )

    def abandon(self) -> None:
        """The run is failing: give what is under way a while to end."""
        until = time.monotonic() + ABANDON_SECONDS
        if self._thread is not None:
            self._thread.join(ABANDON_SECONDS)
        self.uploads.wait(max(0.0, until - time.monotonic()))

    def _raise_bug(self) -> None:
        bug = self._bug or self.uploads.bug
        self._bug = self.uploads.bug = None
        if bug is not None:
            raise bug

    def _is_beside(self, records: list[TensorRecord]) -> bool:
        """Whether there is memory for a copy, decided at the first save, by all ranks alike."""
        wanted = self.config.asynchronous
        if self._copies is None and wanted == "auto":
            needed = sum(tensor.nbytes for record in records for _, tensor in record.boxes) * self.ranks_here
            free = ram_bytes()[1]
            fits = free is None or needed <= MEMORY_SHARE * free
            answers = self.writers.gather(fits)
            self._copies = all(answers)
            if not self._copies and self.writers.rank == 0:
                log.warning(
                    "saves are not made beside training: a copy takes %.1f GB of host memory, too much of what is free", needed / 1e9
                )
        return wanted is True or self._copies is True

    def _work(self, job: Job, records: list[TensorRecord]) -> None:
        """The whole save; whatever goes wrong is told, and a bug is kept for the main thread."""
        begun = time.perf_counter()
        try:
            path = save_checkpoint(
                self.checkpoints, job.step, records, job.scalars, self.tokenizer, self.writers,
                snapshot=job.snapshot, run=self.run, needed=self.uploads.names,
            )  # fmt: skip
            if not job.snapshot:
                self.saved_step = job.step
            if self.writers.rank == 0:
                log.info("saved %s in %.1f s", path, time.perf_counter() - begun)
            self._quietly(lambda: self.on_saved(job.step), "the record of what was saved", "written")
            if self.remote is not None:
                self.uploads.put(path.name)
            self._retain(job.step)
            self.failed, self._failures = None, 0
        except CheckpointError as problem:
            self._failed(job, problem)
        except BaseException as bug:  # raised by the next wait
            self._bug = bug

    def _send(self, name: str) -> None:
        """Send a checkpoint to the store; where that fails, the local one stays and the next save or start tries again."""
        assert self.remote is not None
        begun, path, remote = time.perf_counter(), self.checkpoints / name, self.remote
        remote.publish(path, self.uploads.writers)
        if self.writers.rank == 0:
            log.info("sent %s to %s in %.1f s", name, remote.place, time.perf_counter() - begun)
        own = Own(self.run, step_of(path))
        self._quietly(lambda: remote.retain(own), "older checkpoints in the store")
        here = self.config.model_copy(update={"keep_last": 1, "keep_best": min(1, self.config.keep_best), "keep_every": None})
        self._quietly(lambda: retain(self.checkpoints, here, own, self.heads, self.uploads.names), "older local checkpoints")

    def _not_sent(self, name: str, problem: CheckpointError, in_a_row: int) -> None:
        if self.writers.rank == 0:
            times = "" if in_a_row == 1 else f" ({in_a_row} uploads in a row)"
            job = Job(step_of(self.checkpoints / name), {}, name.startswith("snapshot"))
            text = f"{job.name} was not sent{times}: {problem} Training goes on; {self._newest()}."
            log.error("%s", text)
            self.tell(text)

    def resume_upload(self) -> None:
        """At the start of a run: what an earlier start left complete on the disk, but not in the store, goes up beside training."""
        if self.remote is None:
            return
        folders: list[Path] = []
        if self.writers.rank == 0 and self.checkpoints.is_dir():
            clean(self.checkpoints)
            folders = step_folders(self.checkpoints, snapshots=False)
            there = self.remote.names() if folders else []
            folders = [path for path in folders if path.name not in there]
        name = self.writers.gather(folders[-1].name if folders else None)[0]
        if name is not None:
            self.uploads.put(name)

    def _failed(self, job: Job, problem: CheckpointError) -> None:
        """Tell, every time: a failure that is told once and goes on is forgotten."""
        self.failed = problem
        self._failures += 1
        if self.writers.rank == 0:
            times = "" if self._failures == 1 else f" ({self._failures} saves in a row)"
            text = f"{job.name} was not saved{times}: {problem} Training goes on; {self._newest()}."
            log.error("%s", text)
            self.tell(text)

    def _retain(self, step: int) -> None:
        """Let go what need not stay; the new checkpoint is whole even if this fails."""
        own, names = Own(self.run, step), self.uploads.names
        self._quietly(lambda: retain(self.checkpoints, self.config, own, self.heads, names), "older checkpoints")

    def _quietly(self, work: Callable[[], object], what: str, verb: str = "removed") -> None:
        """Tidy up on the first rank; a failure is told and fails nothing."""
        if self.writers.rank == 0:
            try:
                with self._tidying, writing(self.checkpoints, error=CheckpointError):
                    work()
            except HeadwayError as problem:
                text = f"{what} cannot be {verb}: {problem}"
                log.error("%s", text)
                self.tell(text)

    def _newest(self) -> str:
        return f"the newest checkpoint on the disk is of step {self.saved_step}" if self.saved_step else "there is no checkpoint yet"
