"""Results as rows of text, the same on a terminal and in a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headway.eval.perplexity import Part, Perplexity

NUMBERS = ("loss", "perplexity", "bits/byte", "accuracy", "ECE", "tokens", "documents")
PART_NUMBERS = ("loss", "perplexity", "bits/byte", "accuracy", "tokens", "documents")
OTHER_TOKENIZERS = "The models have different tokenizers: compare bits per byte, not loss, perplexity or accuracy, which are per token."


def numbers(result: Perplexity) -> list[str]:
    """The cells under `NUMBERS`."""
    cells = _cells(result)
    return [*cells[:4], f"{result.calibration_error:.4f}", *cells[4:]]


def part_numbers(part: Part) -> list[str]:
    """The cells under `PART_NUMBERS`."""
    return _cells(part)


def _cells(result: Perplexity | Part) -> list[str]:
    bits = "unknown" if result.bits_per_byte is None else f"{result.bits_per_byte:.4f}"
    return [f"{result.loss:.4f}", f"{result.perplexity:.3f}", bits, f"{result.accuracy:.1%}", str(result.tokens), str(result.documents)]


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterable[str]:
    """A table for a report, with an empty line behind it."""
    yield "| " + " | ".join(column.replace("|", r"\|") for column in columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |"
    yield ""
