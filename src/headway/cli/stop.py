"""`headway stop`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    run: Path = typer.Argument(..., metavar="RUN", help="Folder of a run that goes on."),
    at_step: int | None = typer.Option(None, help="Wait until that many steps are done; default: after the step under way."),
    save_only: bool = typer.Option(False, "--save-only", help="Save a checkpoint and go on."),
    json: bool = JSON_FLAG,
) -> None:
    """Ask a run, from another shell, to save a checkpoint and leave; all its ranks do so after the same step."""
    from headway.train.request import Request, ask

    asked = ask(run, Request(at_step, save_only))
    if json:
        print_json(asked)
        return
    what = "saves and goes on" if save_only else "saves and leaves"
    when = "after the step under way" if at_step is None or at_step <= (asked["step"] or 0) else f"after step {at_step}"  # pyright: ignore
    typer.echo(f"{run} {what} {when}; it was at step {asked['step']}")
