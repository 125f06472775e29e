"""`headway data validate`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json

BAR_WIDTH = 40


def command(
    paths: list[str] = typer.Argument(..., metavar="PATH...", help="Raw files, folders or globs."),
    kind: str = typer.Option("text", help="What the records should be: text, chat or preference."),
    tokenizer: Path = typer.Option(None, help="Count lengths in tokens; chat and preference records are written with the template."),
    template: str = typer.Option(
        "chatml", help="Chat template: chatml, llama3, qwen, alpaca, internlm, zero2all, tokenizer, or a .jinja file."
    ),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    text_template: str = typer.Option(None, help="Text made of several keys, e.g. '{title}\\n{content}'."),
    json: bool = JSON_FLAG,
) -> None:
    """Read everything and report every bad record with file and line; exit code 1 if there is one."""
    from dataclasses import asdict

    from headway.data.validate import KINDS, Reading, validate
    from headway.errors import ConfigError
    from headway.text.document import TextOf
    from headway.tokenizer.load import load_tokenizer

    if kind not in KINDS:
        raise ConfigError(f"--kind is {kind!r}; it must be one of {', '.join(KINDS)}.")
    reading = Reading(kind, load_tokenizer(tokenizer) if tokenizer else None, template, TextOf(text_key, text_template))
    report = validate(paths, reading)
    bins = report.histogram()
    if json:
        counts = {name: getattr(report, name) for name in ("kind", "files", "records", "good", "unit", "total", "longest")}
        print_json(counts | {"bad": [asdict(one) for one in report.bad], "histogram": [asdict(one) for one in bins]})
    else:
        for one in report.bad:
            typer.echo(f"{one.place}: {one.message}")
        typer.echo(f"{report.records} records in {report.files} files: {report.good} good, {len(report.bad)} bad")
        if report.good:
            typer.echo(f"{report.total} {report.unit}, {report.total / report.good:.0f} on average, {report.longest} at most")
        most = max((one.records for one in bins), default=1)
        for one in bins:
            bar = "█" * round(BAR_WIDTH * one.records / most) or ("▏" if one.records else "")
            typer.echo(f"{one.low:>9} to {one.high:>9} {report.unit}  {bar} {one.records}")
    if report.bad:
        raise typer.Exit(1)
