"""`headway launch local|status|logs|cancel`. The verb of another target is in a file of its own."""

from pathlib import Path

import typer

from headway.cli._launch import DETACH, JOB, NPROC, JobOptions, describe_job, follow_job, read_job
from headway.cli._options import GROUP, JSON
from headway.cli._output import exit_with, print_json, print_table

RUN = typer.Argument(..., metavar="RUN", help="Folder of a run that `headway launch` started.")


def local(
    arguments: list[str] = JOB,
    nproc: int | None = NPROC,
    options: JobOptions = GROUP,
    detach: bool = DETACH,
    json: bool = JSON,
) -> None:
    """Train on this machine under a supervisor, in a process that outlives this shell."""
    from headway.launch.targets.local import LocalTarget

    job, _ = read_job(arguments, options, nproc)
    target = LocalTarget()
    follow_job(target, target.submit(job), detach=detach, json=json)


def status(run: Path = RUN, json: bool = JSON) -> None:
    """Where a job is: state, attempt, hosts, step, exit code. Exit code 1 if it failed."""
    from headway.launch.targets.base import open_target, read_handle

    handle = read_handle(run)
    job_status = open_target(handle.kind).status(handle)
    if json:
        print_json(describe_job(handle, job_status))
    else:
        facts = {
            "run": handle.run_dir,
            "target": handle.kind,
            **handle.ids,
            "state": job_status.state,
            "attempt": job_status.attempt,
            "hosts": ", ".join(job_status.hosts),
            "step": job_status.step,
            "exit code": job_status.exit_code,
            "message": job_status.message,
        }
        known = [(name, value) for name, value in facts.items() if value not in (None, "")]
        print_table(("", ""), known)

    if job_status.state in ("failed", "unknown"):
        exit_with(1)


def logs(
    run: Path = RUN,
    lines: int = typer.Option(50, min=0, help="Lines from the end."),
    follow: bool = typer.Option(
        False, "--follow", "-f", help="Print new lines until the job has ended."
    ),
) -> None:
    """What a job printed, on all its hosts."""
    from headway.launch.targets.base import open_target, read_handle

    handle = read_handle(run)
    for line in open_target(handle.kind).logs(handle, lines=lines, follow=follow):
        typer.echo(line)


def cancel(run: Path = RUN, json: bool = JSON) -> None:
    """Make a job save a checkpoint and stop; the second call kills it."""
    from headway.launch.targets.base import open_target, read_handle

    # The run folder says which target the job was submitted to, from whichever shell.
    handle = read_handle(run)
    target = open_target(handle.kind)
    target.cancel(handle)
    job_status = target.status(handle)
    if json:
        print_json(describe_job(handle, job_status))
        return
    typer.echo(
        f"{run}: a stop was requested; the job is {job_status.state}. Cancel it again to kill it "
        "without a save."
    )


VERBS = {
    "launch cancel": cancel,
    "launch local": local,
    "launch logs": logs,
    "launch status": status,
}
