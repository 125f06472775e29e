"""How a run is restarted and where `headway launch` starts it: settings that change nothing about
the model. Imports without torch.
"""

from __future__ import annotations

from headway.config.section import Section, setting
from headway.train.k8s_config import K8sConfig
from headway.train.slurm_config import SlurmConfig


class SuperviseConfig(Section):
    """When a supervised run (run.supervise or `headway supervise`) restarts and gives up. The flags
    of `headway supervise` override it."""

    max_restarts: int = setting(
        5,
        "Failures in a row without a newer checkpoint, after which the supervisor gives up.",
        ge=0,
    )
    backoff_seconds: float = setting(
        10.0,
        "Pause before a restart; it doubles with each failure in a row, up to ten minutes.",
        ge=0,
    )
    hang_seconds: float = setting(
        900.0,
        "A rank that makes no progress (step, validation batch, save) for this long hangs: "
        "stacks are saved and all ranks restart.",
        gt=0,
    )


class SshConfig(Section):
    """`headway launch ssh`. Its options override these settings."""

    hosts: tuple[str, ...] = setting((), "Hosts, each [USER@]HOST[:PORT].")
    nproc: int | None = setting(None, "Ranks on each host; null = one per GPU, else one.", ge=1)
    python: str | None = setting(
        None,
        "Python on the hosts, in whose environment headway is installed; "
        "null = the path of this one.",
    )
    workdir: str | None = setting(
        None,
        "Working directory on the hosts; relative paths of the recipe begin there. "
        "null = the path of this one.",
    )
    config: str | None = setting(None, "Configuration file of ssh (ssh -F); null = ~/.ssh/config.")
    master: str | None = setting(
        None,
        "ADDRESS[:PORT] at which the first host listens; "
        "null = its name for ssh and any free port.",
    )
    env: tuple[str, ...] = setting(
        (), "Names of environment variables whose values here are passed to every rank."
    )


class LaunchConfig(Section):
    """Where `headway launch` starts the run."""

    k8s: K8sConfig = setting(K8sConfig, "`headway launch k8s`.")
    slurm: SlurmConfig = setting(SlurmConfig, "`headway launch slurm`.")
    ssh: SshConfig = setting(SshConfig, "`headway launch ssh`.")
