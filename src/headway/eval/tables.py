"""Results as rows of text, the same on a terminal and in a report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from headway.eval.perplexity import Part, Perplexity
from headway.model.head_masks.masks import in_words

if TYPE_CHECKING:
    from headway.eval.evaluate import Evaluation

NUMBERS = ("loss", "perplexity", "bits/byte", "accuracy", "ECE", "tokens", "documents")
MODELS = ("model", "rope_theta", "layers without RoPE", "masks", "begin token", "mean perplexity", "std", "range")
"""The spread is over the datasets."""
PART_NUMBERS = ("loss", "perplexity", "bits/byte", "accuracy", "tokens", "documents")
OTHER_TOKENIZERS = "The models have different tokenizers: compare bits per byte, not loss, perplexity or accuracy, which are per token."


def model_cells(one: Evaluation) -> list[str]:
    """The cells under `MODELS`: what a model is, and its perplexity over the datasets."""
    theta = "unknown" if one.rope_theta is None else f"{one.rope_theta:g}"
    layers = ", ".join(map(str, one.no_rope_layers)) or "none"
    found = one.perplexities
    over = ["", "", ""] if found is None else [f"{found.mean:.3f}", f"{found.std:.3f}", f"{found.min:.3f} - {found.max:.3f}"]
    return [one.model, theta, layers, in_words(one.masks), one.begin or "none", *over]


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
