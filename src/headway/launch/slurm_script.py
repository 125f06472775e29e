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
SCRIPT = "job.sh"
WAIT_SECONDS = 60
"""After the first launcher has ended the others have this long: it may have been killed without a word to them."""
INDEX = "$SLURM_ARRAY_TASK_ID"
LOG_NAME = "slurm-%j"
ARRAY_LOG_NAME = "slurm-%A_%a"


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
    settings, logs = parts.settings, parts.run_dir / "logs"
    is_array = parts.num_elements is not None
    at_once = "" if parts.at_once is None else f"%{parts.at_once}"
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
        "array": f"0-{(parts.num_elements or 1) - 1}{at_once}" if is_array else None,
        "output": f"{logs}/{ARRAY_LOG_NAME if is_array else LOG_NAME}.out",
        "open-mode": "append",
        "signal": f"B:USR1@{settings.signal_seconds}",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if settings.requeue else "#SBATCH --no-requeue")
    again = shlex.join(["sbatch", str(parts.run_dir / FOLDER / SCRIPT)])
    first = [
        f"# Written by `headway launch slurm` for {parts.run_dir}. To submit it by hand: {again}"
    ]
    return ["#!/bin/bash", *first, *lines, *(f"#SBATCH --{one}" for one in settings.sbatch)]


def _setup(parts: ScriptParts) -> list[str]:
    lines = ["set -eo pipefail", f"cd {shlex.quote(str(parts.working_dir))}"]
    if parts.settings.setup:
        lines += ["", "# launch.slurm.setup", *parts.settings.setup, ""]
    if parts.settings.cpus is not None:
        lines.append(
            f"export SRUN_CPUS_PER_TASK={parts.settings.cpus}  # srun does not take it from the job"
        )
    return [*lines, "set -u"]


def _command(parts: ScriptParts) -> list[str]:
    settings, launch = parts.settings, parts.run_dir / FOLDER
    is_array = parts.num_elements is not None
    run_dir = f'"{parts.run_dir}/{INDEX}"' if is_array else str(parts.run_dir)
    recipe = f'"{launch}/recipe-{INDEX}.yaml"' if is_array else f'"${{1:-{launch}/recipe.yaml}}"'
    log = f"{parts.run_dir}/logs/{ARRAY_LOG_NAME if is_array else LOG_NAME}.%N.%n.log"
    own = [sys.executable, "-P", "-m", "headway.launch.slurm_job"]
    flags = [
        f"--max-restarts={settings.max_restarts}",
        *([] if settings.requeue else ["--no-requeue"]),
    ]
    srun = [
        "srun",
        f"--nodes={settings.nodes}",
        f"--ntasks={settings.nodes}",
        "--ntasks-per-node=1",
    ]
    # not --kill-on-bad-exit: the other launchers would have no time to save and to say what happened
    srun += [
        "--kill-on-bad-exit=0",
        f"--wait={WAIT_SECONDS}",
        f"--output={log}",
        "--open-mode=append",
    ]
    nodes = [] if settings.nodes == 1 else ["--nnodes", str(settings.nodes)]
    _, *train = headway_command(
        ["train", *nodes, "--nproc", str(settings.ranks), *parts.train_words]
    )
    return [
        "# One launcher per node. It saves and queues again before the time limit (SIGUSR1) and on preemption (SIGTERM).",
        f"recipe={recipe}",
        f'exec {shlex.join(own)} {run_dir} --recipe "$recipe" {shlex.join(flags)} -- \\',
        f"  {shlex.join([*srun, *_pyxis(parts)])} \\",
        f'  {shlex.join([*_apptainer(parts), _python(settings), *train])} "$recipe"',
    ]


def _python(settings: SlurmConfig) -> str:
    return settings.python or (sys.executable if settings.container is None else "python3")


def _mounts(parts: ScriptParts) -> list[str]:
    """Folders of the job first, then the user's; a folder inside another one of the job is visible with it."""
    own = [str(parts.working_dir)]
    if not parts.run_dir.is_relative_to(parts.working_dir):
        own.append(str(parts.run_dir))
    return [*own, *parts.settings.container_mounts]


def _apptainer(parts: ScriptParts) -> list[str]:
    settings = parts.settings
    if settings.container is None or settings.container_runtime != "apptainer":
        return []
    gpus = [] if settings.gpus_per_node is None else ["--nv"]
    binds = [word for one in _mounts(parts) for word in ("--bind", one)]
    return ["apptainer", "exec", *gpus, *binds, "--pwd", str(parts.working_dir), settings.container]


def _pyxis(parts: ScriptParts) -> list[str]:
    settings = parts.settings
    if settings.container is None or settings.container_runtime != "pyxis":
        return []
    mounts = ",".join(one if ":" in one else f"{one}:{one}" for one in _mounts(parts))
    return [
        f"--container-image={settings.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={parts.working_dir}",
    ]


def check_paths(paths: Sequence[Path]) -> None:
    """Refuse folders whose names SLURM or a shell would read as something else."""
    for path in paths:
        if SAFE_PATH.fullmatch(str(path)) is None:
            raise ConfigError(
                f"{path}: the name of a SLURM job's folder may have letters, digits and ._/+=@,:~- only. Rename it."
            )
