"""`launch.slurm`: what `headway launch slurm` asks of the cluster.

Options of the command line win over it. Imports without torch.

The words of an sbatch script come from here, so every value is checked: one line, no spaces where
SLURM takes none.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import field_validator, model_validator

from headway.config.section import Section, setting

WORD = re.compile(r"[A-Za-z0-9_.,:+@/%*\[\]=-]+")
"""What may stand in the script without quotes."""
TIME = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(\d+)(?::(\d+))?(?::(\d+))?)")
"""D-H[:M[:S]], or up to three numbers whose meaning depends on how many there are."""
OWN_OPTIONS = (
    "nodes",
    "time",
    "partition",
    "account",
    "qos",
    "mem",
    "cpus-per-task",
    "gpus-per-node",
    "array",
    "dependency",
    "signal",
    "requeue",
    "no-requeue",
    "output",
    "error",
    "open-mode",
    "job-name",
    "ntasks",
    "ntasks-per-node",
    "chdir",
    "wrap",
    "parsable",
    "export",
)
"""sbatch options that the script needs for itself or that have a setting."""
MINUTES_PER_DAY = 24 * 60
SHOWN = 80
"""Characters of a wrong value in a message."""


def minutes_of(time: str) -> float | None:
    """Minutes of a SLURM time limit: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S; None for anything else."""
    match = TIME.fullmatch(time)
    if match is None:
        return None
    days, hours, minutes, seconds, first, second, third = (
        None if part is None else int(part) for part in match.groups()
    )
    if days is not None:
        return days * MINUTES_PER_DAY + (hours or 0) * 60 + (minutes or 0) + (seconds or 0) / 60
    assert first is not None
    if third is not None:
        # H:M:S
        return first * 60 + (second or 0) + third / 60
    # M or M:S
    return first + (second or 0) / 60


def option_problem(text: str) -> str | None:
    """Why KEY=VALUE (or KEY) is no option that may be passed to sbatch; None if it is one."""
    key, equals, value = text.partition("=")
    if re.fullmatch(r"[a-z][a-z0-9-]*", key) is None or (equals and WORD.fullmatch(value) is None):
        return (
            f"is {text[:SHOWN]!r}; it must be the long name of an sbatch option and a value "
            "without spaces, e.g. constraint=h100"
        )
    if key in OWN_OPTIONS:
        return (
            f"is {text[:SHOWN]!r}; {key} has an option of its own, or is needed by the script. "
            "Leave it out"
        )
    return None


class SlurmConfig(Section):
    """The job of `headway launch slurm`. Its options override these."""

    partition: str | None = setting(None, "Partition; null = the cluster's default.")
    account: str | None = setting(None, "Account that is charged.")
    qos: str | None = setting(None, "Quality of service.")
    nodes: int = setting(1, "Number of nodes.", gt=0)
    gpus_per_node: int | str | None = setting(
        None, "GPUs of each node, e.g. 8 or h100:8; one rank for each. null = no GPUs."
    )
    nproc: int | None = setting(None, "Ranks on each node; null = one for each GPU, or one.", gt=0)
    time: str | None = setting(
        None,
        "Time limit: minutes, hours:minutes:seconds or days-hours:minutes:seconds; "
        "null = the partition's.",
    )
    cpus: int | None = setting(
        None, "CPU cores of each node's launcher and its ranks together.", gt=0
    )
    mem: str | None = setting(None, "Memory of each node, e.g. 500G; 0 = all of it.")
    setup: tuple[str, ...] = setting(
        (),
        "Shell lines before the ranks start, e.g. `module load cuda`; "
        "what they export reaches all nodes.",
    )
    container: str | None = setting(
        None, "Image that the ranks run in; headway must be installed in it."
    )
    container_runtime: Literal["apptainer", "pyxis"] = setting(
        "apptainer", "What starts the container: apptainer, or srun with pyxis (enroot)."
    )
    container_mounts: tuple[str, ...] = setting(
        (),
        "Further folders in the container, HERE or HERE:THERE; run and working folder always are.",
    )
    python: str | None = setting(
        None, "Python of the ranks; null = the one that submits, and python3 in a container."
    )
    signal_seconds: int = setting(
        300,
        "How long before the time limit the run saves and is queued again. "
        "SLURM may be a minute early.",
        ge=10,
        le=65535,
    )
    requeue: bool = setting(
        True,
        "Queue the job again after its time limit, a preemption or the loss of a node; "
        "the run resumes.",
    )
    max_restarts: int = setting(
        5,
        "Starts of the job in a row without a newer checkpoint, after which it is not queued "
        "again.",
        ge=0,
    )
    sbatch: tuple[str, ...] = setting(
        (),
        "Further options of sbatch, KEY or KEY=VALUE, e.g. "
        "constraint=h100, exclusive, reservation=R.",
    )

    @field_validator("partition", "account", "qos", "time", "mem", mode="before")
    @classmethod
    def _numbers_are_words(cls, value: object) -> object:
        """`time: 90` and `mem: 0` are numbers in YAML."""
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return value

    @field_validator("partition", "account", "qos", "mem", "container", "python")
    @classmethod
    def _is_one_word(cls, value: str | None) -> str | None:
        if value is not None and WORD.fullmatch(value) is None:
            raise ValueError(f"is {value[:SHOWN]!r}; it must be one word without spaces or quotes")
        return value

    @field_validator("gpus_per_node")
    @classmethod
    def _counts_gpus(cls, value: int | str | None) -> int | str | None:
        if value is None:
            return value
        text = str(value)
        if re.fullmatch(r"(?:[A-Za-z0-9_.-]+:)?\d+", text) is None or gpu_count(value) < 1:
            raise ValueError(
                f"is {text[:SHOWN]!r}; it must be a number of GPUs, or TYPE:NUMBER such as h100:8"
            )
        return value

    @field_validator("setup", "container_mounts")
    @classmethod
    def _are_lines(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if "\n" in value or "\r" in value:
                raise ValueError(
                    f"has a line break in {value[:SHOWN]!r}; write one list entry per line"
                )
        return values

    @field_validator("sbatch")
    @classmethod
    def _are_options(cls, values: tuple[str, ...]) -> tuple[str, ...]:
        for value in values:
            if problem := option_problem(value):
                raise ValueError(problem)
        return values

    @model_validator(mode="after")
    def _leaves_time_to_save(self) -> SlurmConfig:
        if self.time is None:
            return self
        minutes = minutes_of(self.time)
        if minutes is None:
            raise ValueError(
                f"time is {self.time[:SHOWN]!r}; it must be minutes, hours:minutes:seconds or "
                "days-hours:minutes:seconds"
            )
        # SLURM would send the signal to save at once.
        if minutes * 60 <= self.signal_seconds:
            raise ValueError(
                f"time is {self.time!r}, and signal_seconds is {self.signal_seconds}: "
                "the signal to save would come before the run begins. "
                "Give more time, or lower signal_seconds"
            )
        return self

    @property
    def ranks(self) -> int:
        """Ranks on each node."""
        if self.nproc:
            return self.nproc
        if self.gpus_per_node is None:
            return 1
        return gpu_count(self.gpus_per_node)


def gpu_count(gpus: int | str) -> int:
    """The number in `8` or `h100:8`."""
    return int(str(gpus).rpartition(":")[2])
