"""`headway launch ssh`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._launch import DETACH, JOB, JobOptions, follow_job, read_job
from headway.cli._options import GROUP, JSON
from headway.cli._output import print_json
from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.launch.ssh.checks import HostsFound
    from headway.launch.targets.base import JobHandle
    from headway.launch.targets.ssh import SshPlan

HOSTS_HELP = "Hosts, each [USER@]HOST[:PORT]; default: launch.ssh.hosts."
FILE_HELP = "File of hosts: HOST, HOST slots=8 or HOST:8 on a line."
PYTHON_HELP = "Python on the hosts that has headway; default: the path of this one."
WORKDIR_HELP = "Working directory on the hosts; default: the path of this one."
MASTER_HELP = (
    "Where the first host listens for the others; default: its name for ssh, any free port."
)


def ssh(
    arguments: list[str] = JOB,
    hosts: str | None = typer.Option(None, metavar="a,b,user@c:2222", help=HOSTS_HELP),
    hostfile: Path | None = typer.Option(None, help=FILE_HELP),
    nproc: int | None = typer.Option(
        None, help="Ranks on each host; default: slots of the host file, one per GPU, else one."
    ),
    python: str | None = typer.Option(None, metavar="PATH", help=PYTHON_HELP),
    workdir: str | None = typer.Option(None, metavar="PATH", help=WORKDIR_HELP),
    ssh_config: str | None = typer.Option(
        None, metavar="FILE", help="Configuration file of ssh (ssh -F)."
    ),
    master: str | None = typer.Option(None, metavar="ADDRESS[:PORT]", help=MASTER_HELP),
    options: JobOptions = GROUP,
    dry_run: bool = typer.Option(
        False, "--dry-run", help="Check the hosts and show what would start there; start nothing."
    ),
    detach: bool = DETACH,
    json: bool = JSON,
) -> None:
    """Train on several hosts over ssh with keys. Hosts are checked first; a lost host restarts the job from its newest checkpoint."""
    from dataclasses import replace

    from headway.launch.ssh.hosts import parse_hosts, read_hostfile
    from headway.launch.targets.ssh import SshTarget, plan_ssh

    if hosts is not None and hostfile is not None:
        raise ConfigError("--hosts and --hostfile are both given. Give one of them.")

    # Options of the command line replace the settings of launch.ssh.
    job, recipe = read_job(arguments, options, nproc)
    overrides = {
        "python": python,
        "workdir": workdir,
        "config": ssh_config,
        "master": master,
        "nproc": nproc,
    }
    settings = recipe.launch.ssh.model_copy(
        update={name: value for name, value in overrides.items() if value is not None}
    )

    chosen = None
    if hosts is not None:
        chosen = parse_hosts(hosts)
    elif hostfile is not None:
        chosen = read_hostfile(hostfile)
    plan = plan_ssh(settings, chosen)

    # A variable of --env replaces one of the recipe.
    variables = {**options.named(settings.env, "launch.ssh.env"), **job.environment}
    job = replace(
        job, num_nodes=len(plan.hosts), ranks_per_node=settings.nproc, environment=variables
    )

    target = SshTarget(plan)
    if dry_run:
        host_checks = target.check(job)
        _show_plan(target.handle(job, host_checks), plan, host_checks, json=json)
        return
    follow_job(target, target.submit(job), detach=detach, json=json)


def _show_plan(handle: JobHandle, plan: SshPlan, host_checks: HostsFound, *, json: bool) -> None:
    from headway.launch.targets.ssh import describe_commands

    commands = describe_commands(handle, plan)
    if json:
        hosts = [
            {"host": host.label, "ranks": ranks, "command": command}
            for host, ranks, command in zip(plan.hosts, host_checks.ranks, commands, strict=True)
        ]
        print_json(
            {
                "run": str(handle.run_dir),
                "target": "ssh",
                "hosts": hosts,
                "arguments": list(handle.arguments),
                "master": list(plan.master),
                "checks": [check.to_json() for check in host_checks.checks],
            }
        )
        return

    for check in host_checks.checks:
        typer.echo(f"{check.state:4}  {check.name}: {check.detail}")
    for host, ranks, command in zip(plan.hosts, host_checks.ranks, commands, strict=True):
        # None: `headway train --gpus` on the host decides when it starts.
        ranks_text = "ranks by --gpus"
        if ranks is not None:
            ranks_text = f"{ranks} ranks"
        typer.echo(f"{host.label}: {ranks_text}: {command}")
    typer.echo("nothing was started")


VERBS = {"launch ssh": ssh}
