"""How ranks are started and what they get: what `launch/launcher.py` and `launch/train.py` take,
and options of verbs that start ranks.

A module of its own, because the command line imports it for every help, without pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headway.config.options import option
from headway.errors import ConfigError, LaunchError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class NodeSpec:
    """This node's rank, the number of nodes and the address of node 0."""

    num: int = 1
    rank: int = 0
    host: str = LOOPBACK
    port: int = 0
    """0: any free one, for a single node."""
    timeout_seconds: float = 300.0
    """How long to wait for the other nodes."""

    def __post_init__(self) -> None:
        if self.num < 1:
            raise LaunchError(f"--nnodes is {self.num}; it must be at least 1.")
        if not 0 <= self.rank < self.num:
            raise LaunchError(
                f"--node-rank is {self.rank}; with --nnodes {self.num} it must be 0 to "
                f"{self.num - 1}."
            )
        if self.num > 1 and not self.port:
            raise LaunchError(
                "--master is missing; give every node HOST:PORT of node 0, with a port that is "
                "free there."
            )


@dataclass(frozen=True)
class LaunchOptions:
    """The ranks to start on each machine; None = not given."""

    nproc: int | None = option(
        None, "Ranks that share the work on this machine; default: one per chosen GPU, else one."
    )
    gpus: str | None = option(
        None,
        "GPUs: ids as in nvidia-smi (0,1), UUIDs, a type (A800), auto (all free ones) or none.",
    )
    nodes: NodeSpec = NodeSpec()


@dataclass(frozen=True)
class TrainOptions:
    """What every rank needs in addition to the recipe."""

    resume: str = option(
        "auto",
        "auto: resume from the run folder's newest checkpoint; never: start from scratch; or a "
        "checkpoint: a folder, a run or "
        "s3://bucket/prefix.",
    )
    dry_run: bool = option(
        False,
        "Build everything, run one step, report what would happen, write nothing.",
        "--dry-run",
    )
    json: bool = False
    with_code: bool = option(
        False,
        "With --dry-run: import your own modules that the recipe names; without it they are only "
        "listed and nothing is built.",
        "--with-code",
    )
    """Decided before ranks start, so ranks get no such flag."""
    profile: bool = option(
        False,
        "Record some steps: a trace and a summary of each rank in the run's logs/.",
        "--profile",
    )
    profile_from: int | None = option(
        None, "First step to record, counted from this start; default: 6."
    )
    profile_steps: int | None = option(None, "Steps to record; default: 3.")
    slow_ratio: float | None = option(
        None, "Report a rank as slow if it takes this many times the mean; default: 1.1."
    )

    def __post_init__(self) -> None:
        if self.with_code and not self.dry_run:
            raise ConfigError(
                "--with-code is given without --dry-run; a run always runs the code that its "
                "recipe names. Leave it out."
            )
        if not self.profile and (numbers := self._profile_flags()):
            raise ConfigError(
                f"{numbers[0]} is given without --profile. Add --profile, or leave it out."
            )
        if self.profile and self.dry_run:
            raise ConfigError(
                "--profile is given with --dry-run, which writes nothing. Leave one of them out."
            )

    def profile_numbers(self) -> dict[str, Any]:
        """The given numbers of the profile, as `plan_profile` calls them."""
        numbers = {
            "first_step": self.profile_from,
            "num_steps": self.profile_steps,
            "ratio": self.slow_ratio,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def flags(self) -> list[str]:
        """The options on a command line."""
        switches = {"--dry-run": self.dry_run, "--json": self.json, "--profile": self.profile}
        switched = [flag for flag, is_on in switches.items() if is_on]
        return ["--resume", self.resume, *switched, *self._profile_flags()]

    def _profile_flags(self) -> list[str]:
        numbers = {
            "--profile-from": self.profile_from,
            "--profile-steps": self.profile_steps,
            "--slow-ratio": self.slow_ratio,
        }
        flags: list[str] = []
        for flag, value in numbers.items():
            if value is not None:
                flags += [flag, str(value)]
        return flags
