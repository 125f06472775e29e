"""`headway doctor`."""

from pathlib import Path
from typing import Optional

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    run_dir: Optional[Path] = typer.Option(None, "--run-dir", help="Where runs are to be written; default: the working folder."),  # noqa: UP045
    json: bool = JSON_FLAG,
) -> None:
    """Check this machine: Python, packages, GPUs, attention kernels, memory, disk. Each line is ok, warn or fail, with a remedy."""
    from dataclasses import asdict

    from headway.diagnose.doctor import examine

    checks = examine(run_dir)
    failed = any(check.state == "fail" for check in checks)
    if json:
        print_json({"ok": not failed, "checks": [asdict(check) for check in checks]})
    else:
        print_table(["state", "check", "found", "remedy"], [(c.state, c.name, c.detail, c.remedy or "") for c in checks])
    if failed:
        raise typer.Exit(1)
