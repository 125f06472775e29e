"""`headway data sample`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    inputs: list[str] = typer.Option(
        ..., "--input", help="PATH@SHARE, e.g. a.jsonl@0.7; may be given several times. Without @: equal shares."
    ),
    size: str = typer.Option(..., "--bytes", help="How much text to take in all, e.g. 100MB."),
    out: Path = typer.Option(..., help="The output: .jsonl (also .gz, .zst) or .parquet."),
    seed: int = typer.Option(0, help="Seed of the choice."),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    template: str = typer.Option(None, help="Text made of several keys, e.g. '{title}\\n{content}'."),
    split: str = typer.Option("file", help="A .txt file is one document (file), or each line is one (line)."),
    json: bool = JSON_FLAG,
) -> None:
    """Take a random sample of many sources in given shares, in one pass."""
    from headway.errors import ConfigError
    from headway.text.sample import SourceShare, parse_bytes, sample

    if split not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    shares = [SourceShare.parse(text) for text in inputs]
    taken = sample(shares, parse_bytes(size, "--bytes"), out, seed=seed, text_key=text_key, template=template, split=split)
    if json:
        print_json(
            {
                "out": out,
                "documents": sum(t.documents for t in taken),
                "bytes": sum(t.bytes for t in taken),
                "sources": [vars(t) for t in taken],
            }
        )
        return
    rows = [(t.path, t.documents, t.bytes, t.available_documents, t.available_bytes) for t in taken]
    print_table(("source", "documents taken", "bytes taken", "of documents", "of bytes"), rows)
    typer.echo(f"{out}: {sum(t.documents for t in taken)} documents, {sum(t.bytes for t in taken)} bytes")
