"""`headway data pack`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    source: Path = typer.Argument(..., metavar="SRC", help="A token store of any kind."),
    out: Path = typer.Argument(..., metavar="DST", help="The folder of the new store of packs."),
    pack_length: int = typer.Option(..., help="Tokens of a pack."),
    mode: str = typer.Option("concat", help="concat: one after another, cut; best_fit: whole documents; prulong: as ProLong's tools pack."),
    min_length: int = typer.Option(1, help="concat, best_fit: shorter documents are left out; prulong: shorter rests of cut documents."),
    overlap: int = typer.Option(0, help="prulong: the rest of a cut document begins this many tokens earlier."),
    split_by_lengths: str = typer.Option("", metavar="N,N", help="prulong: cut documents to these lengths first, e.g. 1024,4096."),
    intact: bool = typer.Option(False, "--intact", help="prulong: drop the rest of a cut document."),
    keep_last: bool = typer.Option(
        None, "--keep-last/--drop-last", help="The last, partly filled pack; default: kept, dropped in prulong."
    ),
    to: str = typer.Option("headway", help="Format of the result: headway or mds."),
    compression: str = typer.Option(None, help="To mds: zstd or zstd:LEVEL."),
    workers: int = typer.Option(2, min=1, help="Threads that read."),
    json: bool = JSON_FLAG,
) -> None:
    """Pack documents into pieces of one length ahead of training; each pack knows the documents inside it."""
    from dataclasses import asdict

    from headway.errors import ConfigError
    from headway.prepare.pack import PackOptions, pack

    parts = [part.strip() for part in split_by_lengths.split(",") if part.strip()]
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"--split-by-lengths is {split_by_lengths!r}; it must be numbers, e.g. 1024,4096.")
    lengths = tuple(map(int, parts))
    options = PackOptions(pack_length, mode, min_length, overlap, lengths, intact, keep_last, workers, to, compression)  # pyright: ignore[reportArgumentType] - checked there
    report = pack(source, out, options)
    if json:
        print_json({"out": out, **asdict(report), "utilisation": report.utilisation})
    else:
        typer.echo(f"{out}: {report.describe()}")
