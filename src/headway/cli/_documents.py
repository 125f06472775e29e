"""How a document is printed with its loss mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headway.prepare.inspect import DocumentPreview


def print_document(sample: DocumentPreview, masked: bool) -> None:
    """Loss targets are green on a terminal, and between ⟦ ⟧ elsewhere; other text is dim."""
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    shown = Text()
    for run in sample.runs:
        if not masked:
            shown.append(run.text)
        elif run.target:
            shown.append(run.text if console.is_terminal else f"⟦{run.text}⟧", style="green")
        else:
            shown.append(run.text, style="dim")
    rest = f", the first {sample.shown} shown" if sample.shown < sample.tokens else ""
    console.print(f"\n— document {sample.document}: {sample.tokens} tokens{rest}")
    console.print(shown, soft_wrap=True)
