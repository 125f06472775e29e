"""`headway data inspect`."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._output import JSON_FLAG, print_json, print_table

if TYPE_CHECKING:
    from headway.prepare.inspect import Sample


def command(
    path: str = typer.Argument(..., metavar="PATH", help="A token store of any kind, or raw files."),
    tokenizer: Path = typer.Option(None, help="Show samples as text, with the loss mask in colour; count raw text in tokens."),
    samples: int = typer.Option(3, min=0, help="How many samples to show."),
    kind: str = typer.Option(
        None, "--from", help="What it is, where it cannot be found out: internlm, zero2all, zero2all-sft, mds, megatron."
    ),
    json: bool = JSON_FLAG,
) -> None:
    """Say what a path holds: its kind, how many documents and tokens, and what they look like."""
    from dataclasses import asdict

    from headway.prepare.inspect import inspect
    from headway.prepare.inspect import samples as take_samples
    from headway.store.foreign.detect import checked_kind
    from headway.tokenizer.load import load_tokenizer

    chosen = checked_kind(kind) if kind else None
    loaded = load_tokenizer(tokenizer) if tokenizer else None
    found = inspect(path, chosen, loaded)
    if json:
        print_json(asdict(found))
        return
    rows = [(name, value) for name, value in asdict(found).items() if name not in ("types", "files") and value is not None]
    print_table(("", ""), [*rows, ("files", len(found.files))], title=path)
    if found.types:
        print_table(("type", "documents", "tokens"), [(name or "(none)", one.documents, one.tokens) for name, one in found.types.items()])
    if loaded is not None and found.kind != "raw" and samples:
        for sample in take_samples(path, loaded, samples, kind=chosen):
            _print_sample(sample, bool(found.masked))


def _print_sample(sample: "Sample", masked: bool) -> None:
    """Loss targets are green on a terminal, and between ⟦ ⟧ elsewhere; text that is no target is dim."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    shown = Text()
    for stretch in sample.stretches:
        if not masked:
            shown.append(stretch.text)
        elif stretch.target:
            shown.append(stretch.text if console.is_terminal else f"⟦{stretch.text}⟧", style="green")
        else:
            shown.append(stretch.text, style="dim")
    rest = f", the first {sample.shown} shown" if sample.shown < sample.tokens else ""
    console.print(f"\n— document {sample.document}: {sample.tokens} tokens{rest}")
    console.print(shown, soft_wrap=True)
