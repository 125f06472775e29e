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
        None,
        help="Chat template (chatml with --tokenizer): chatml, llama3, qwen, alpaca, internlm, internlm_alpaca, zero2all, tokenizer, "
        "or a .jinja file.",
    ),
    keys: str = typer.Option(
        None, metavar="NAME=KEY,...", help="Chat, preference: which key of a record is what, e.g. prompt=question,response=answer."
    ),
    text_key: str = typer.Option(None, help="Text: key that holds the text of a record (text)."),
    text_template: str = typer.Option(None, help="Text: made of several keys, e.g. '{title}\\n{content}'."),
    json: bool = JSON_FLAG,
) -> None:
    """Read everything and report every bad record with file and line; exit code 1 if there is one."""
    from dataclasses import asdict

    from headway.errors import ConfigError
    from headway.prepare.masked_build import describe_unread
    from headway.prepare.validate import KINDS, Reading, validate
    from headway.text.document import TextOf
    from headway.text.record_keys import KeyMap
    from headway.tokenizer.load import load_tokenizer

    if kind not in KINDS:
        raise ConfigError(f"--kind is {kind!r}; it must be one of {', '.join(KINDS)}.")
    given = {"--template": template, "--keys": keys} if kind == "text" else {"--text-key": text_key, "--text-template": text_template}
    if without := [flag for flag, value in given.items() if value is not None]:
        raise ConfigError(f"{without[0]} has no meaning with --kind {kind}. Leave it out.")
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    reading = Reading(kind, loaded, template, KeyMap.parse(keys), TextOf(text_key or "text", text_template))
    report = validate(paths, reading)
    bins = report.histogram()
    if json:
        counts = {name: getattr(report, name) for name in ("kind", "files", "records", "good", "unit", "total", "longest")}
        counts |= {"unread": {key.partition(":")[2]: number for key, number in sorted(report.unread.items())}}
        print_json(counts | {"bad": [asdict(one) for one in report.bad], "histogram": [asdict(one) for one in bins]})
    else:
        for one in report.bad:
            typer.echo(f"{one.place}: {one.message}")
        typer.echo(f"{report.records} records in {report.files} files: {report.good} good, {len(report.bad)} bad")
        if (unread := describe_unread(report.unread)) is not None:
            typer.echo(unread)
        if report.good:
            typer.echo(f"{report.total} {report.unit}, {report.total / report.good:.0f} on average, {report.longest} at most")
        most = max((one.records for one in bins), default=1)
        for one in bins:
            bar = "█" * round(BAR_WIDTH * one.records / most) or ("▏" if one.records else "")
            typer.echo(f"{one.low:>9} to {one.high:>9} {report.unit}  {bar} {one.records}")
    if report.bad:
        raise typer.Exit(1)
