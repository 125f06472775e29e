"""`headway board`: a web page of all runs."""

from __future__ import annotations

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json, print_table

RUNS = typer.Argument(
    None, metavar="[RUNS]...", help="Folders with runs, ssh://[user@]host[:port]/path or s3://bucket/prefix; default: runs."
)


def board(
    runs: list[str] = RUNS,
    host: str = typer.Option("127.0.0.1", help="Address to listen on. Any other than loopback needs a token, which is printed."),
    port: int = typer.Option(6080, help="Port to listen on; 0: any free one.", min=0, max=65535),
    allow_host: list[str] = typer.Option([], help="Another name under which browsers reach this machine; may be repeated."),
    list_only: bool = typer.Option(False, "--list", help="Print the runs and their state, and exit."),
    json: bool = JSON,
) -> None:
    """Show all runs on a web page: live curves, settings, logs, alerts, checkpoints, reports and samples."""
    from headway.board.open import list_runs, open_sources, serve

    sources = open_sources(runs)
    if list_only:
        rows = list_runs(sources)
        if json:
            print_json(rows)
        else:
            columns = ("run", "state", "step", "loss", "tokens/s", "source")
            print_table(
                columns,
                [
                    [row["name"], row["state"], *(_cell(row[key]) for key in ("step", "loss", "tokens_per_second")), row["source"]]
                    for row in rows
                ],
            )
        return

    def started(facts: dict[str, object]) -> None:
        if json:
            print_json(facts)
        else:
            typer.echo(f"board: {facts['url']}")
            typer.echo(f"{facts['runs']} runs; Ctrl-C ends it", err=True)

    serve(sources, host, port, allow_host, started)


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


VERBS = {"board": board}
