"""The sbatch script of a job, as text a person can read, change and submit again.

    header   what is asked of SLURM                    from launch.slurm and the options
    setup    the user's own shell lines
    exec     headway.launch.slurm_job, which starts srun: one launcher per node, under a supervisor

Every word comes from a checked setting or is quoted; nothing else of the user reaches the shell.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.launch.slurm_record import FOLDER
from headway.runtime.process import headway_command
from headway.train.slurm_config import SlurmConfig

SAFE_PATH = re.compile(r"[A-Za-z0-9_./+=@,:~-]+")
"""No space, which ends an option of #SBATCH, and no %, which SLURM replaces in log names."""
SCRIPT = "job.sh"
WAIT_SECONDS = 60
"""After the first launcher has ended the others have this long: it may have been killed without a
word to them.
"""
INDEX = "$SLURM_ARRAY_TASK_ID"
LOG_NAME = "slurm-%j"
"""SLURM puts the job id in."""
ARRAY_LOG_NAME = "slurm-%A_%a"
"""SLURM puts the id of the array and the index of the element in."""


@dataclass(frozen=True)
class ScriptParts:
    """What a script is made of."""

    settings: SlurmConfig
    name: str
    run_dir: Path
    """Absolute. For an array, the folder with one run folder per element."""
    working_dir: Path
    train_words: tuple[str, ...] = ()
    """Options of `headway train`."""
    num_elements: int | None = None
    """Size of an array; None = no array."""
    at_once: int | None = None
    """How many elements of an array may run at the same time."""


def write_script(parts: ScriptParts) -> str:
    """The whole script."""
    return "\n".join([*_header(parts), "", *_setup(parts), "", *_command(parts), ""])


def _header(parts: ScriptParts) -> list[str]:
    settings = parts.settings
    log_name = LOG_NAME
    array = None
    if parts.num_elements is not None:
        log_name = ARRAY_LOG_NAME
        array = f"0-{parts.num_elements - 1}"
        if parts.at_once is not None:
            array += f"%{parts.at_once}"

    options: dict[str, object] = {
        "job-name": re.sub(r"[^A-Za-z0-9_.-]", "-", parts.name),
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "nodes": settings.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": settings.gpus_per_node,
        "cpus-per-task": settings.cpus,
        "mem": settings.mem,
        "time": settings.time,
        "array": array,
        "output": f"{parts.run_dir / 'logs'}/{log_name}.out",
        # A requeued job has the same id and continues its log.
        "open-mode": "append",
        # B: to the first process alone, which decides what the ranks get.
        "signal": f"B:USR1@{settings.signal_seconds}",
    }
    by_hand = shlex.join(["sbatch", str(parts.run_dir / FOLDER / SCRIPT)])
    lines = [
        "#!/bin/bash",
        f"# Written by `headway launch slurm` for {parts.run_dir}. To submit it by hand: {by_hand}",
    ]
    for name, value in options.items():
        if value is not None:
            lines.append(f"#SBATCH --{name}={value}")
    lines.append("#SBATCH --requeue" if settings.requeue else "#SBATCH --no-requeue")
    lines += [f"#SBATCH --{option}" for option in settings.sbatch]
    return lines


def _setup(parts: ScriptParts) -> list[str]:
    # Not -u yet: setup files of module systems read variables that are not set.
    lines = ["set -eo pipefail", f"cd {shlex.quote(str(parts.working_dir))}"]
    if parts.settings.setup:
        lines += ["", "# launch.slurm.setup", *parts.settings.setup, ""]
    if parts.settings.cpus is not None:
        lines.append(
            f"export SRUN_CPUS_PER_TASK={parts.settings.cpus}  # srun does not take it from the job"
        )
    return [*lines, "set -u"]


def _command(parts: ScriptParts) -> list[str]:
    settings = parts.settings
    launch = parts.run_dir / FOLDER

    # A job of a chain names its recipe as the argument of the script.
    run_dir = str(parts.run_dir)
    recipe = f'"${{1:-{launch}/recipe.yaml}}"'
    log_name = LOG_NAME
    if parts.num_elements is not None:
        run_dir = f'"{parts.run_dir}/{INDEX}"'
        recipe = f'"{launch}/recipe-{INDEX}.yaml"'
        log_name = ARRAY_LOG_NAME

    job_command = [sys.executable, "-P", "-m", "headway.launch.slurm_job"]
    flags = [f"--max-restarts={settings.max_restarts}"]
    if not settings.requeue:
        flags.append("--no-requeue")

    # Not --kill-on-bad-exit: the other launchers would have no time to save and to report what
    # happened. %N is the host, %n the number of the node in the job.
    srun = [
        "srun",
        f"--nodes={settings.nodes}",
        f"--ntasks={settings.nodes}",
        "--ntasks-per-node=1",
        "--kill-on-bad-exit=0",
        f"--wait={WAIT_SECONDS}",
        f"--output={parts.run_dir}/logs/{log_name}.%N.%n.log",
        "--open-mode=append",
    ]

    # The Python of headway_command is this machine's; a container has its own.
    nodes = []
    if settings.nodes != 1:
        nodes = ["--nnodes", str(settings.nodes)]
    _, *train = headway_command(
        ["train", *nodes, "--nproc", str(settings.ranks), *parts.train_words]
    )
    return [
        "# One launcher per node. It saves and queues again before the time limit (SIGUSR1) and "
        "on preemption (SIGTERM).",
        f"recipe={recipe}",
        f'exec {shlex.join(job_command)} {run_dir} --recipe "$recipe" {shlex.join(flags)} -- \\',
        f"  {shlex.join([*srun, *_pyxis(parts)])} \\",
        f'  {shlex.join([*_apptainer(parts), _python(settings), *train])} "$recipe"',
    ]


def _python(settings: SlurmConfig) -> str:
    if settings.python:
        return settings.python
    if settings.container is not None:
        return "python3"
    return sys.executable


def _mounts(parts: ScriptParts) -> list[str]:
    """Folders of the job first, then the user's.

    A folder inside another one of the job is visible with it.
    """
    folders = [str(parts.working_dir)]
    if not parts.run_dir.is_relative_to(parts.working_dir):
        folders.append(str(parts.run_dir))
    return [*folders, *parts.settings.container_mounts]


def _apptainer(parts: ScriptParts) -> list[str]:
    """The words before Python that start it in a container of apptainer."""
    settings = parts.settings
    if settings.container is None or settings.container_runtime != "apptainer":
        return []
    words = ["apptainer", "exec"]
    if settings.gpus_per_node is not None:
        words.append("--nv")  # the host's NVIDIA driver
    for mount in _mounts(parts):
        words += ["--bind", mount]
    return [*words, "--pwd", str(parts.working_dir), settings.container]


def _pyxis(parts: ScriptParts) -> list[str]:
    """The options of srun that start its tasks in a container of pyxis."""
    settings = parts.settings
    if settings.container is None or settings.container_runtime != "pyxis":
        return []
    # pyxis wants SOURCE:TARGET.
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(parts)]
    return [
        f"--container-image={settings.container}",
        f"--container-mounts={','.join(mounts)}",
        f"--container-workdir={parts.working_dir}",
    ]


def check_paths(paths: Sequence[Path]) -> None:
    """Refuse folders whose names SLURM or a shell would read as something else."""
    for path in paths:
        if SAFE_PATH.fullmatch(str(path)) is None:
            raise ConfigError(
                f"{path}: the name of a SLURM job's folder may have letters, digits and ._/+=@,:~- "
                "only. Rename it."
            )
