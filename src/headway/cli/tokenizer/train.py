"""`headway tokenizer train`."""

from pathlib import Path

import typer

from headway.cli._output import JSON_FLAG, print_json


def command(
    more: list[str] = typer.Argument(None, metavar="[FILE]...", help="More input files, as `--input *.jsonl` expands to."),
    inputs: list[str] = typer.Option(..., "--input", help="Raw files, folders or globs; may be given several times."),
    vocab_size: int = typer.Option(..., help="How many ids, special tokens included."),
    out: Path = typer.Option(..., help="The folder of the new tokenizer."),
    kind: str = typer.Option("bpe", help="bpe (byte-level) or sentencepiece (BPE with byte fallback)."),
    max_memory: str = typer.Option("4GB", help="Stay within this much memory; counting goes through the disk where it must."),
    text_key: str = typer.Option("text", help="Key that holds the text of a record."),
    template: str = typer.Option(None, help="Text made of several keys, e.g. '{title}\\n{content}'."),
    split: str = typer.Option("file", help="A .txt file is one document (file), or each line is one (line)."),
    special: list[str] = typer.Option(
        None, help="A special token; may be given several times, the first ends documents. Default: <|endoftext|>, <|pad|> and chat marks."
    ),
    workers: int = typer.Option(1, min=1, help="Processes that count words."),
    json: bool = JSON_FLAG,
) -> None:
    """Train a tokenizer that gives every text back byte for byte."""
    from headway.errors import ConfigError
    from headway.runtime.storage import check_writable
    from headway.text.read import read_documents
    from headway.text.sample import parse_bytes
    from headway.tokenizer.train_bpe import SPECIAL_TOKENS, train_bpe
    from headway.tokenizer.train_sentencepiece import train_sentencepiece

    trainers = {"bpe": train_bpe, "sentencepiece": train_sentencepiece}
    if kind not in trainers:
        raise ConfigError(f"--kind is {kind!r}; it must be bpe or sentencepiece.")
    if split not in ("file", "line"):
        raise ConfigError(f"--split is {split!r}; it must be 'file' or 'line'.")
    memory = parse_bytes(max_memory, "--max-memory")
    check_writable(out)
    documents = read_documents([*inputs, *(more or [])], text_key=text_key, template=template, split=split)
    tokenizer = trainers[kind](
        (document.text for document in documents),
        vocab_size=vocab_size,
        out=out,
        special_tokens=special or SPECIAL_TOKENS,
        max_memory_bytes=memory,
        workers=workers,
    )
    if json:
        print_json({"out": out, "kind": kind, "vocab_size": tokenizer.vocab_size, "fingerprint": tokenizer.fingerprint})
    else:
        typer.echo(f"{out}: {kind} tokenizer with {tokenizer.vocab_size} ids; look at it with `headway tokenizer inspect {out}`")
