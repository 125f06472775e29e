"""Hosts over ssh as a target.

`submit` checks every host, writes the recipe into the run folder and starts the driver.

    driver ──supervises──▶ session ──ssh──▶ agent on each host
                                            ──▶ headway train --nnodes N --node-rank K
                                                              --master HOST:PORT

What must be on the hosts already: Python with the same headway and torch, the data, and code files
that the recipe names. The recipe itself is sent over the connection. See docs/cluster.md.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway.config.external_code import find_external_code
from headway.config.load import load, read_plain
from headway.config.user_code import is_file_name
from headway.errors import ConfigError, LaunchError
from headway.launch.nodes import parse_master
from headway.launch.ssh.checks import HostsFound, HostsNeed, check_hosts
from headway.launch.ssh.connection import SshOptions, address_of, ssh_words
from headway.launch.ssh.hosts import Host, parse_hosts
from headway.launch.ssh.rank_agent import RECIPE
from headway.launch.ssh.session import PROGRESS
from headway.launch.targets.base import Job, JobHandle, Target
from headway.launch.targets.driven import DrivenTarget, refuse_running, start_driver
from headway.runtime.json_file import load_json
from headway.runtime.storage import write_atomic, writing
from headway.text.hub import is_hub_id
from headway.train.config import Recipe
from headway.train.launch_config import SshConfig
from headway.train.stages import expand, steps_saved

log = logging.getLogger("headway")

MAX_HOSTS = 1024
"""Each has an ssh process and three threads here."""


@dataclass(frozen=True)
class SshPlan:
    """The hosts of a job and how they are reached."""

    hosts: tuple[Host, ...]
    ssh: SshOptions
    workdir: str
    master: tuple[str, int]


def plan_ssh(settings: SshConfig, hosts: Sequence[Host] | None = None) -> SshPlan:
    """The plan that the settings describe.

    `hosts` (from --hosts or --hostfile) win over those of the recipe.
    """
    chosen: list[Host] = []
    if hosts is not None:
        chosen = list(hosts)
    elif settings.hosts:
        chosen = parse_hosts(",".join(settings.hosts))
    if not chosen:
        raise ConfigError(
            "no hosts are given. Use --hosts a,b or --hostfile FILE, or set launch.ssh.hosts in "
            "the recipe."
        )
    if len(chosen) > MAX_HOSTS:
        raise ConfigError(
            f"{len(chosen)} hosts are given; at most {MAX_HOSTS} are supported over ssh. "
            "Use a scheduler, e.g. SLURM."
        )
    if settings.config is not None and not Path(settings.config).expanduser().is_file():
        raise ConfigError(f"--ssh-config is {settings.config!r}; there is no such file.")
    config = None
    if settings.config is not None:
        config = str(Path(settings.config).expanduser().absolute())
    # Without settings, the hosts have Python and the working directory at the same paths as here.
    ssh = SshOptions(settings.python or sys.executable, config)
    workdir = settings.workdir or os.getcwd()

    # Port 0: the first host chooses a free one. An IPv6 address stands in brackets.
    if settings.master is None:
        master = (address_of(chosen[0], ssh), 0)
    elif ":" in settings.master.rpartition("]")[2]:
        master = parse_master(settings.master)
    else:
        master = (settings.master.strip("[]"), 0)
    return SshPlan(tuple(chosen), ssh, workdir, master)


class SshTarget(DrivenTarget):
    """Ranks on hosts that ssh reaches."""

    detects_hangs = False
    """The agents do."""

    def __init__(self, plan: SshPlan | None = None) -> None:
        self.plan = plan

    def submit(self, job: Job) -> JobHandle:
        """Check the hosts and start the driver."""
        # Before the checks of the hosts, which may take minutes.
        refuse_running(Path(os.path.abspath(job.run_dir)))
        hosts = self.check(job)
        for check in hosts.checks:
            if check.state == "warn":
                log.warning("%s: %s. %s", check.name, check.detail.rstrip("."), check.remedy or "")
        handle = self.handle(job, hosts)
        with writing(handle.run_dir):
            handle.run_dir.mkdir(parents=True, exist_ok=True)
        write_atomic(handle.run_dir / RECIPE, job.recipe.read_text(encoding="utf-8"))
        start_driver(handle, {**os.environ, **job.environment})
        return handle

    def check(self, job: Job) -> HostsFound:
        """Check all hosts; one line for each that fails."""
        plan = self._require_plan()
        if job.setup:
            raise LaunchError(
                "setup lines were given; the ssh target starts no shell. "
                "Use the environment of --python."
            )
        recipe = load(Recipe, job.recipe, list(job.overrides))
        uses_gpus = None
        if recipe.device == "cpu" or job.gpus == "none":
            uses_gpus = False
        elif recipe.device == "cuda":
            uses_gpus = True
        need = HostsNeed(
            plan.workdir,
            str(job.run_dir),
            plan.master,
            paths=tuple(needed_paths(job, recipe)),
            ranks=tuple(job.ranks_per_node or host.slots for host in plan.hosts),
            uses_gpus=uses_gpus,
            # With --gpus, `headway train` starts one rank per GPU that it chooses there.
            keeps_ranks=job.gpus in (None, "none"),
            environment=job.environment,
        )
        return check_hosts(plan.hosts, plan.ssh, need)

    def handle(self, job: Job, hosts: HostsFound) -> JobHandle:
        """The record of a job on these hosts."""
        plan = self._require_plan()
        run_dir = Path(os.path.abspath(job.run_dir))
        options: dict[str, Any] = {
            "hosts": [host.to_json() for host in plan.hosts],
            "ranks": list(hosts.ranks),
            "python": plan.ssh.python,
            "config": plan.ssh.config,
            "workdir": plan.workdir,
            "run": str(job.run_dir),
            "master": list(plan.master),
            "env": sorted(job.environment),  # names, no values: they may be secrets
        }
        # The agents write the recipe into the run folder on their hosts.
        arguments = (str(run_dir / RECIPE), *job.train_arguments[1:])
        return JobHandle(
            "ssh",
            run_dir,
            arguments,
            hosts=tuple(host.label for host in plan.hosts),
            options=options,
        )

    def command(self, handle: JobHandle) -> list[str]:
        """What the driver supervises."""
        return [sys.executable, "-P", "-m", "headway.launch.ssh.session", str(handle.run_dir)]

    def saved_step(self, handle: JobHandle) -> int:
        """The newest checkpoint, as the first host reports it.

        The run folder here may be another one.
        """
        # Both: on a shared disk the folder here is newer than the last report.
        return max(steps_saved(handle.run_dir), progress(handle.run_dir, "saved"))

    def step(self, handle: JobHandle) -> int | None:
        """The newest step, as the hosts report it."""
        newest = progress(handle.run_dir, "step")
        return newest if newest >= 0 else None

    def _require_plan(self) -> SshPlan:
        if self.plan is None:
            raise LaunchError(
                "the ssh target was opened without hosts. Use `headway launch ssh`, or "
                "SshTarget(plan_ssh(...))."
            )
        return self.plan


def describe_commands(handle: JobHandle, plan: SshPlan) -> list[str]:
    """For --dry-run: how ssh would be called for each host."""
    import shlex

    from headway.launch.ssh.connection import AGENT

    return [
        shlex.join(ssh_words(host, plan.ssh, [plan.ssh.python, "-P", "-m", AGENT]))
        for host in plan.hosts
    ]


def progress(run_dir: Path, key: str) -> int:
    """A number of launch-progress.json; -1 if it is not there."""
    try:
        return int(load_json(run_dir / PROGRESS)[key])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def needed_paths(job: Job, recipe: Recipe) -> list[str]:
    """Local files and folders that a recipe reads, which must be on every host."""
    recipes = [recipe]
    if recipe.stages:
        recipes = [stage.recipe for stage in expand(recipe)]
    paths: list[str] = []
    for stage_recipe in recipes:
        paths += _paths_of(stage_recipe)
    for code in find_external_code(read_plain(job.recipe, list(job.overrides))):
        if code.module is not None and is_file_name(code.module):
            paths.append(code.module)

    # Not addresses, and not what an earlier stage of the run writes.
    inside = f"{job.run_dir}{os.sep}"
    local = [path for path in dict.fromkeys(paths) if "://" not in path]
    return [path for path in local if not path.startswith(inside)]


def _paths_of(recipe: Recipe) -> Iterator[str]:
    """The paths in the settings of one stage."""
    for source in recipe.data.train or ():
        yield from _local(source.path)
    sets = recipe.data.valid.sets if recipe.data.valid is not None else None
    if isinstance(sets, str):
        yield from _local(sets)
    elif sets is not None:
        for sources in sets.values():
            for source in sources:
                yield from _local(source.path)
    for setting in (recipe.tokenizer, recipe.init.source, recipe.init.adapter, recipe.init.masks):
        if setting is not None:
            yield from _local(str(setting))


def _local(text: str) -> list[str]:
    """The path, unless it may be the id of a model or data set of the hub."""
    if is_hub_id(text) and not os.path.exists(text):
        return []
    return [text]


def build() -> Target:
    """The target, for the verbs that look after a job."""
    return SshTarget()
