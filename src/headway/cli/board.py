"""`headway board`, `headway top` and `headway report`: all runs on a web page, in a terminal, in
one file.
"""

from __future__ import annotations

from pathlib import Path

import typer

from headway.cli._options import JSON
from headway.cli._output import print_json, print_table

PLACES = "folders with runs, ssh://[user@]host[:port]/path or s3://bucket/prefix"
RUNS = typer.Argument(None, metavar="[RUNS]...", help=f"{PLACES.capitalize()}; default: runs.")
SSH_CONFIG = typer.Option(
    None, help="A configuration file for ssh (ssh -F); default: the user's own."
)
READ_SECONDS = 60.0
"""How long `headway top` waits for the first answer of another machine, and when it prints once,
for runs to be read.
"""


def board(
    runs: list[str] = RUNS,
    host: str = typer.Option(
        "127.0.0.1",
        help="Address to listen on. An address other than loopback requires a token, which is printed.",
    ),
    port: int = typer.Option(6080, help="Port to listen on; 0: any free one.", min=0, max=65535),
    allow_host: list[str] = typer.Option(
        [], help="Another name under which browsers reach this machine; may be repeated."
    ),
    ssh_config: Path | None = SSH_CONFIG,
    list_only: bool = typer.Option(
        False, "--list", help="Print the runs and their state, and exit."
    ),
    json: bool = JSON,
) -> None:
    """Show all runs on a web page: live curves, settings, logs, alerts, checkpoints, reports and samples."""
    from headway.board.open import list_runs, open_sources, serve

    sources = open_sources(runs, ssh_config)
    if list_only:
        rows = list_runs(sources)
        if json:
            print_json(rows)
        else:
            keys = ("step", "loss", "tokens_per_second")
            cells = [
                [row["name"], row["state"], *(_cell(row[key]) for key in keys), row["source"]]
                for row in rows
            ]
            print_table(("run", "state", "step", "loss", "tokens/s", "source"), cells)
        return

    # Called when the server listens: with port 0 its address is known only then.
    def started(facts: dict[str, object]) -> None:
        if json:
            print_json(facts)
        else:
            typer.echo(f"board: {facts['url']}")
            typer.echo(f"{facts['runs']} runs; Ctrl-C ends it", err=True)

    serve(sources, host, port, allow_host, started)


def top(
    runs: list[str] = RUNS,
    once: bool = typer.Option(
        False, "--once", help="Print once and exit; the default if the output is no terminal."
    ),
    every: float = typer.Option(1.0, help="Seconds between two looks.", min=0.2, max=3600),
    ssh_config: Path | None = SSH_CONFIG,
    json: bool = JSON,
) -> None:
    """Watch runs in the terminal: state, step, loss, speed, and the curve of the loss."""
    from rich.console import Console

    from headway.board.open import list_runs, open_sources
    from headway.board.terminal import show_once, watch_in_terminal
    from headway.board.watch import Board

    sources = open_sources(runs, ssh_config)
    if json:
        print_json(list_runs(sources))
        return
    console = Console(highlight=False)
    with Board(sources) as opened:
        # The first screen has the runs of other machines already, if they answer in time.
        for source in sources:
            if source.is_here:
                continue
            opened.wait_until(lambda source=source: source.problem != "connecting", READ_SECONDS)
            opened.look(source)

        if once or not console.is_terminal:
            show_once(opened, console, READ_SECONDS)
        else:
            watch_in_terminal(opened, console, every)


def report(
    runs: list[str] = typer.Argument(..., metavar="RUN...", help=f"Run folders, or {PLACES}."),
    out: Path = typer.Option(Path("report.html"), help="File to write."),
    ssh_config: Path | None = SSH_CONFIG,
    json: bool = JSON,
) -> None:
    """Write one HTML file that opens offline: curves, final numbers, settings, evaluations, masks and samples of runs."""
    from headway.board.open import open_sources
    from headway.board.report import write_html_report

    written = write_html_report(open_sources(runs, ssh_config), out)
    if json:
        print_json(written)
    else:
        count = len(written["runs"])
        unit = "run" if count == 1 else "runs"
        typer.echo(
            f"report: {written['report']}  ({count} {unit}, {written['bytes'] / 1e6:.1f} MB)"
        )


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return str(value)


VERBS = {"board": board, "report": report, "top": top}
