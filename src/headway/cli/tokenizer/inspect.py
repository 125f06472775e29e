"""`headway tokenizer inspect`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table


def command(
    tokenizer: Path = typer.Argument(..., metavar="TOKENIZER", help="A tokenizer folder, a tokenizer.json, a .model or a .tiktoken file."),
    data: list[str] = typer.Option([], help="Measure on these files as well; may be given several times."),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    template: str = typer.Option(None, help="Text made of several keys, e.g. '{title}\\n{content}'."),
    json: bool = JSON_FLAG,
) -> None:
    """Show size, special tokens, compression per language and longest tokens; exit code 1 if a text does not come back as it was."""
    from headway.text.read import read_documents
    from headway.tokenizer.inspect import inspect
    from headway.tokenizer.load import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    own = {name: ((d.place, d.text) for d in read_documents(name, text_key=text_key, template=template)) for name in data}
    found = inspect(loaded, own)
    if json:
        print_json(found.to_dict())
    else:
        special = ", ".join(f"{token} {number}" for token, number in list(found.special_tokens.items())[:12]) or "none"
        more = len(found.special_tokens) - 12
        typer.echo(f"{found.vocab_size} ids, {found.model_vocab_size} rows in a model; fingerprint {found.fingerprint[:16]}")
        typer.echo(f"special tokens: {special}{f' and {more} more' if more > 0 else ''}")
        typer.echo(f"roles: {', '.join(f'{role} {token}' for role, token in found.roles.items()) or 'none'}\n")
        rows = [(name, c.bytes, c.tokens, f"{c.bytes_per_token:.2f}") for name, c in found.compression.items()]
        print_table(("text", "bytes", "tokens", "bytes per token"), rows)
        typer.echo(f"\nlongest tokens: {'  '.join(repr(token) for _, token in found.longest)}")
        typer.echo("round trip: " + (f"{len(found.lost)} texts come back changed: {', '.join(found.lost[:5])}" if found.lost else "exact"))
    if found.lost:
        raise typer.Exit(1)
