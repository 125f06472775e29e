"""`headway data convert`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    source: Path = typer.Argument(..., metavar="SRC", help="A token store of any kind: headway, InternLM, zero2all, MDS, Megatron."),
    out: Path = typer.Argument(..., metavar="DST", help="The folder of the new store."),
    to: str = typer.Option("headway", help="headway, internlm, zero2all or mds."),
    kind: str = typer.Option(
        None, "--from", help="What SRC is, where it cannot be found out: internlm, zero2all, zero2all-sft, mds, megatron."
    ),
    tokenizer: Path = typer.Option(
        None, help="Made the ids (checked against the vocabulary); a headway store then carries its fingerprint."
    ),
    rebuild_index: bool = typer.Option(
        False, "--rebuild-index", help="InternLM, zero2all: make the index from the data, ignore index files."
    ),
    begin_id: int = typer.Option(None, help="zero2all: the token every document begins with; default: taken from the data."),
    seq_len: int = typer.Option(2048, min=1, help="To zero2all: tokens of a sample in the index map."),
    type_name: str = typer.Option(
        None, "--type", help="To internlm: one data type (folder) for all; default: the source's types, else en."
    ),
    compression: str = typer.Option(None, help="To mds: zstd or zstd:LEVEL."),
    json: bool = JSON_FLAG,
) -> None:
    """Write a token store in another format."""
    from headway.store.convert import ConvertOptions, convert
    from headway.store.foreign.detect import checked_kind
    from headway.tokenizer.load import load_tokenizer

    options = ConvertOptions(checked_kind(kind) if kind else None, rebuild_index, begin_id, seq_len, type_name, compression)
    report = convert(source, out, to, options, load_tokenizer(tokenizer) if tokenizer else None)
    if json:
        print_json(vars(report))
    else:
        typer.echo(report.describe())
