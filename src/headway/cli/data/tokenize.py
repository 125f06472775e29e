"""`headway data tokenize`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    more: list[str] = typer.Argument(None, metavar="[FILE]...", help="More input files, as `--input *.jsonl` expands to."),
    inputs: list[str] = typer.Option(..., "--input", help="Raw files, folders or globs; may be given several times."),
    tokenizer: Path = typer.Option(..., help="A tokenizer folder, a tokenizer.json or a sentencepiece .model."),
    out: Path = typer.Option(..., help="The folder of the new token store."),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    template: str = typer.Option(None, help="Text made of several keys, e.g. '{title}\\n{content}'."),
    split: str = typer.Option("file", help="A .txt file is one document (file), or each line is one (line)."),
    eos: bool = typer.Option(None, "--append-eos/--no-eos", help="End each document with the end token; default: where there is one."),
    bos: bool = typer.Option(False, "--bos", help="Begin each document with the begin token."),
    workers: int = typer.Option(None, min=1, help="Worker processes; default: one per core."),
    shard: str = typer.Option(None, metavar="I/N", help="Do only part I (from 0) of N; `headway data merge` joins the parts."),
    json: bool = JSON_FLAG,
) -> None:
    """Turn raw text into a token store. Killed and started again, it continues where it was."""
    from headway.data.tokenize import TokenizeOptions, tokenize
    from headway.errors import ConfigError

    if split not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    options = TokenizeOptions(text_key, template, split, eos, bos, workers, None if shard is None else part_of(shard))
    report = tokenize([*inputs, *(more or [])], tokenizer, out, options)
    if json:
        print_json(vars(report))
    else:
        typer.echo(report.describe())


def part_of(text: str) -> tuple[int, int]:
    """`2/8` -> (2, 8)."""
    from headway.errors import ConfigError

    part, slash, parts = text.partition("/")
    if not slash or not part.isdigit() or not parts.isdigit() or int(part) >= int(parts):
        raise ConfigError(f"--shard is {text!r}; it must be I/N with I from 0 to N - 1, e.g. 0/8.")
    return int(part), int(parts)
