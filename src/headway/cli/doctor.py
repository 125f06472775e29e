"""`headway doctor`: is this machine ready, are these hosts, this data and this recipe?"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json, print_table

if TYPE_CHECKING:
    from headway.diagnose.check import Check


def doctor(
    context: typer.Context,
    run_dir: Path | None = typer.Option(None, "--run-dir", help="Folder of future runs; default: the working folder."),
    fast: bool = typer.Option(False, "--fast", help="Only the checks that run before a job on several hosts: about a second, no GPU work."),
    port: int | None = typer.Option(None, help="Also check that this port is free.", min=1, max=65535),
    json: bool = JSON,
) -> None:
    """Check this machine: Python, packages, GPUs, attention kernels, memory, disk. Each line is ok, warn or fail, with a remedy."""
    if context.invoked_subcommand is not None:
        return
    if fast:
        from headway.diagnose.host import HostNeeds, host_checks

        facts, checks = host_checks(run_dir or Path.cwd(), HostNeeds(port=port), os.environ)
        show_checks(checks, json, {"facts": facts.to_json()})
        return
    from headway.diagnose.doctor import examine

    show_checks(examine(run_dir), json)


def show_checks(checks: "Sequence[Check]", json: bool, more: dict[str, Any] | None = None) -> None:
    """Print checks as a table or JSON; exit code 1 if one failed."""
    failed = any(check.state == "fail" for check in checks)
    if json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks], **(more or {})})
    else:
        print_table(["state", "check", "found", "remedy"], [(c.state, c.name, c.detail, c.remedy or "") for c in checks])
    if failed:
        raise typer.Exit(1)


VERBS = {"doctor": doctor}
