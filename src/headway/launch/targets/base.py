"""The contract between `headway launch` and the places where a job can run.

    Job ──submit──▶ JobHandle (RUN/launch.json) ──status──▶ JobStatus
                                                ──logs────▶ lines with host prefixes
                                                ──cancel──▶ stop with a save; the second call kills

In: a recipe and how many ranks it gets. Out: a record in the run folder, from which any later shell
finds the job again. The record never holds a secret: variables of the environment are named in it,
their values are not written.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, cast

from headway.config.kinds import kind_module
from headway.errors import ConfigError, LaunchError
from headway.runtime.heartbeat import read_beats
from headway.runtime.json_file import read_object
from headway.runtime.run_lock import refuse_live
from headway.runtime.storage import write_atomic
from headway.train.stages import steps_saved

PACKAGE = "headway.launch.targets"
FILE = "launch.json"
"""The record of a job in its run folder."""
State = Literal["queued", "running", "stopping", "done", "failed", "cancelled", "unknown"]
FINAL: tuple[State, ...] = ("done", "failed", "cancelled")


@dataclass(frozen=True)
class Job:
    """A recipe to train and the ranks it gets."""

    recipe: Path
    """The file, as `find_recipe` found it."""
    run_dir: Path
    overrides: tuple[str, ...] = ()
    num_nodes: int = 1
    ranks_per_node: int | None = None
    """None: one for each GPU of a node, or one."""
    gpus: str | None = None
    """As `headway train --gpus`."""
    resume: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables for every rank in addition to those of the target.

    They are passed on, never written.
    """
    setup: tuple[str, ...] = ()
    """Shell lines of the user that run first on each node, for targets that start a shell."""

    def __post_init__(self) -> None:
        if self.resume == "never":
            raise ConfigError(
                "--resume is 'never'; a launched job is resumed after every failure. "
                "Choose another run.name to start again."
            )
        if self.ranks_per_node is not None and self.ranks_per_node < 1:
            raise LaunchError(f"--nproc is {self.ranks_per_node}; it must be at least 1.")

    @property
    def train_arguments(self) -> list[str]:
        """The words after `headway train` that every node gets, whatever the target."""
        words = [str(self.recipe), *self.overrides, "--resume", self.resume]
        if self.gpus is not None:
            words += ["--gpus", self.gpus]
        return words


@dataclass(frozen=True)
class JobHandle:
    """How to find a job again; the content of RUN/launch.json."""

    kind: str
    """The target: a name in `KINDS` or a module of the user."""
    run_dir: Path
    """Absolute, on the machine that submitted the job."""
    arguments: tuple[str, ...]
    """The words after `headway train`."""
    ids: Mapping[str, str] = field(default_factory=dict)
    """What the target calls the job, e.g. {"job": "4711"}."""
    hosts: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """What the target needs to start the job again; plain JSON."""
    submitted_at: float = field(default_factory=time.time)


@dataclass(frozen=True)
class JobStatus:
    """Where a job is now."""

    state: State
    attempt: int = 1
    """1 for the first start, one more for every restart."""
    hosts: tuple[str, ...] = ()
    exit_code: int | None = None
    """As a shell shows it; None before the end, or where the target does not say."""
    step: int | None = None
    """The newest step of the ranks' heartbeats; None = not known."""
    message: str = ""
    """One line for a person: why it waits, why it failed."""


class Target(Protocol):
    """A place where jobs run."""

    def submit(self, job: Job) -> JobHandle:
        """Start or queue a job and write its handle; refuses in one line before anything starts."""
        ...

    def status(self, handle: JobHandle) -> JobStatus:
        """Where the job is now."""
        ...

    def logs(self, handle: JobHandle, *, lines: int, follow: bool) -> Iterator[str]:
        """The last lines of what the job printed, then with `follow` every new line until the job
        has ended.
        """
        ...

    def cancel(self, handle: JobHandle) -> None:
        """Stop the job after a save; a second call kills it.

        Refuses with one line if there is nothing to stop.
        """
        ...


def open_target(kind: str) -> Target:
    """The target of a kind."""
    # A user's module may be a target too, so it is checked.
    build = getattr(kind_module(PACKAGE, kind), "build", None)
    if not callable(build):
        raise ConfigError(
            f"{kind} has no function build() -> Target; a launch target's module needs one."
        )
    return cast(Target, build())


def write_handle(handle: JobHandle) -> None:
    """Write RUN/launch.json."""
    content = {**asdict(handle), "run_dir": str(handle.run_dir)}
    write_atomic(handle.run_dir / FILE, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def read_handle(run_dir: Path) -> JobHandle:
    """The handle in a run folder; refused in one line if there is none."""
    path = run_dir / FILE
    if not path.is_file():
        raise ConfigError(
            f"{run_dir} has no {FILE}, so `headway launch` did not start it. "
            "Give the folder of a run that it started."
        )
    fields = read_object(path, ConfigError)
    try:
        return JobHandle(
            kind=str(fields["kind"]),
            run_dir=Path(os.path.abspath(run_dir)),  # the folder may have been moved
            arguments=tuple(map(str, fields["arguments"])),
            ids={str(key): str(value) for key, value in fields["ids"].items()},
            hosts=tuple(map(str, fields["hosts"])),
            options=dict(fields["options"]),
            submitted_at=float(fields["submitted_at"]),
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise ConfigError(
            f"{path} is damaged ({type(problem).__name__}: {problem}). "
            "Restore it, or launch the run again."
        ) from None


def refuse_second(target: Target, kind: str, run_dir: Path, noun: str = "") -> None:
    """Refuse a run folder in which a job runs or for which one of this kind waits."""
    refuse_live(run_dir)
    if not (run_dir / FILE).is_file():
        return
    handle = read_handle(run_dir)
    # The handle of another kind says nothing about a queue that this target could ask.
    if handle.kind != kind:
        return
    status = target.status(handle)
    # A job that its system does not know any more cannot be waited for or cancelled.
    if status.state not in (*FINAL, "unknown"):
        raise LaunchError(
            f"{run_dir} is {status.state} already as {noun}{handle.ids['job']}. "
            f"Stop it with `headway launch cancel {run_dir}`, or choose another run.name."
        )


def newest_step(run_dir: Path) -> int | None:
    """The newest step that a rank reports in the run folder, or that was saved there.

    None if there is none yet.
    """
    # The last checkpoint outlives the heartbeats, which a good end removes. -1: none is saved.
    step = max([steps_saved(run_dir), *(beat.step for beat in read_beats(run_dir))])
    return step if step >= 0 else None
