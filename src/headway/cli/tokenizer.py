"""`headway tokenizer`: train and inspect tokenizers."""

from dataclasses import asdict
from pathlib import Path

import typer

from headway.cli._options import (
    GROUP,
    INPUTS,
    JSON,
    MORE_INPUTS,
)
from headway.cli._output import print_json, print_table
from headway.errors import ConfigError
from headway.text.document import Reading, TextOf

SHOWN_SPECIAL_TOKENS = 12
SHOWN_LOST = 5
"""Texts that do not round-trip, of which the report names this many."""


def train(
    more: list[str] = MORE_INPUTS,
    inputs: list[str] = INPUTS,
    vocab_size: int = typer.Option(..., help="Number of ids, special tokens included."),
    out: Path = typer.Option(..., help="The folder of the new tokenizer."),
    kind: str = typer.Option(
        "bpe", help="bpe (byte-level) or sentencepiece (BPE with byte fallback)."
    ),
    max_memory: str = typer.Option(
        "4GB", help="Memory limit; beyond it, counts are written to the disk."
    ),
    reading: Reading = GROUP,
    special: list[str] = typer.Option(
        None,
        help="A special token; may be repeated. The first one ends documents. Default: "
        "<|endoftext|>, <|pad|> and chat marks.",
    ),
    workers: int = typer.Option(1, min=1, help="Processes that count words."),
    json: bool = JSON,
) -> None:
    """Train a tokenizer that decodes every text back byte for byte."""
    from headway.runtime.storage import check_writable
    from headway.text.read import read_documents
    from headway.text.sample import parse_bytes
    from headway.tokenizer.train import SPECIAL_TOKENS, train_bpe, train_sentencepiece

    trainers = {"bpe": train_bpe, "sentencepiece": train_sentencepiece}
    if kind not in trainers:
        raise ConfigError(f"--kind is {kind!r}; it must be bpe or sentencepiece.")
    memory = parse_bytes(max_memory, "--max-memory")
    check_writable(out)

    # Read as they are counted: the texts need not fit into memory.
    documents = read_documents([*inputs, *(more or [])], **asdict(reading))
    tokenizer = trainers[kind](
        (document.text for document in documents),
        vocab_size=vocab_size,
        out=out,
        special_tokens=special or SPECIAL_TOKENS,
        max_memory_bytes=memory,
        workers=workers,
    )
    if json:
        print_json(
            {
                "out": out,
                "kind": kind,
                "vocab_size": tokenizer.vocab_size,
                "fingerprint": tokenizer.fingerprint,
            }
        )
    else:
        typer.echo(
            f"{out}: {kind} tokenizer with {tokenizer.vocab_size} ids; inspect it with `headway "
            f"tokenizer inspect {out}`"
        )


def inspect(
    tokenizer: Path = typer.Argument(
        ...,
        metavar="TOKENIZER",
        help="A tokenizer folder, a tokenizer.json, a .model or a .tiktoken file.",
    ),
    data: list[str] = typer.Option([], help="Also measure on these files; may be repeated."),
    text: TextOf = GROUP,
    json: bool = JSON,
) -> None:
    """Show size, special tokens, compression per language and longest tokens; exit code 1 if a text does not round-trip."""
    from headway.text.read import read_documents
    from headway.tokenizer.inspect import inspect as inspect_tokenizer
    from headway.tokenizer.load import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    texts = {
        name: ((document.place, document.text) for document in read_documents(name, **asdict(text)))
        for name in data
    }
    report = inspect_tokenizer(loaded, texts)
    if json:
        print_json(report.to_dict())
    else:
        first_special = list(report.special_tokens.items())[:SHOWN_SPECIAL_TOKENS]
        special = ", ".join(f"{token} {number}" for token, number in first_special) or "none"
        hidden = len(report.special_tokens) - len(first_special)
        if hidden:
            special += f" and {hidden} more"
        roles = ", ".join(f"{role} {token}" for role, token in report.roles.items()) or "none"
        typer.echo(
            f"{report.vocab_size} ids, {report.model_vocab_size} rows in a model; fingerprint "
            f"{report.fingerprint[:16]}"
        )
        typer.echo(f"special tokens: {special}")
        typer.echo(f"roles: {roles}\n")
        rows = [
            (name, measured.bytes, measured.tokens, f"{measured.bytes_per_token:.2f}")
            for name, measured in report.compression.items()
        ]
        print_table(("text", "bytes", "tokens", "bytes per token"), rows)
        typer.echo(f"\nlongest tokens: {'  '.join(repr(token) for _, token in report.longest)}")
        round_trip = "exact"
        if report.lost:
            examples = ", ".join(report.lost[:SHOWN_LOST])
            round_trip = f"{len(report.lost)} texts come back changed: {examples}"
        typer.echo(f"round trip: {round_trip}")

    if report.lost:
        raise typer.Exit(1)


VERBS = {"tokenizer inspect": inspect, "tokenizer train": train}
