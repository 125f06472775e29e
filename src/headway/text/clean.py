"""Drop documents that are too short, of poor quality or duplicates, and report how many were
dropped and why.

In: a stream of documents. Out: those that pass, unchanged and in order, and a `CleanReport`.
Each document is counted under the first rule it breaks. Lengths and shares are counted in
characters, so that languages without spaces work too.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, DataError
from headway.runtime.optional import need
from headway.runtime.progress import progress
from headway.text.characters import count_characters
from headway.text.clean_rules import CleanRules
from headway.text.dedup import ExactDuplicates, NearDuplicates
from headway.text.document import Document, TextSplit
from headway.text.read import expand, read_documents
from headway.text.write import record_file

TO_SIMPLIFIED = "t2s"
"""OpenCC's conversion from traditional to simplified characters, without replacing words."""
EXAMPLES = 3
"""Removed documents that a report names for each reason."""


def simplifier(option: str) -> Callable[[str], str]:
    """A function that converts Chinese text to simplified characters, by OpenCC (the extra
    `zh`).
    """
    need("opencc", option)
    opencc = importlib.import_module("opencc")
    return opencc.OpenCC(TO_SIMPLIFIED).convert


@dataclass
class CleanReport:
    """Counts of all, kept and removed documents, by reason, with file and line of some examples."""

    documents: int = 0
    bytes: int = 0
    kept_documents: int = 0
    kept_bytes: int = 0
    removed_documents: Counter[str] = field(default_factory=lambda: Counter[str]())
    removed_bytes: Counter[str] = field(default_factory=lambda: Counter[str]())
    examples: dict[str, list[str]] = field(default_factory=lambda: dict[str, list[str]]())
    forgotten_documents: int = 0
    """Documents that near duplicates were no longer compared with, because the index was full."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        reasons = {
            reason: {
                "documents": count,
                "bytes": self.removed_bytes[reason],
                "examples": self.examples[reason],
            }
            for reason, count in self.removed_documents.most_common()
        }
        totals = {
            "documents": self.documents,
            "bytes": self.bytes,
            "kept_documents": self.kept_documents,
            "kept_bytes": self.kept_bytes,
        }
        return {**totals, "removed": reasons, "forgotten_documents": self.forgotten_documents}

    def refuse_empty(self, out: Path) -> None:
        """Refuse an output without documents."""
        if not self.kept_documents:
            raise DataError(
                f"{out}: no document passed the rules ({', '.join(self.removed_documents)}); "
                "nothing was written."
            )


def clean(
    documents: Iterable[Document], rules: CleanRules, report: CleanReport
) -> Iterator[Document]:
    """The documents that pass all rules; `report` is filled on the way."""
    exact = None
    if rules.duplicates != "keep":
        exact = ExactDuplicates()

    near = None
    if rules.duplicates == "near":
        near = NearDuplicates(
            rules.similarity, seed=rules.seed, max_memory_bytes=rules.max_memory_bytes
        )

    for document in documents:
        size = len(document.text.encode())
        report.documents += 1
        report.bytes += size

        # The cheap checks first. A document that breaks a rule is not remembered: a later copy of
        # it is no duplicate, it breaks the same rule.
        reason = broken_rule(document.text, rules)
        if reason is None and exact is not None and not exact.is_new(document.text):
            reason = "duplicate"
        if reason is None and near is not None and not near.is_new(document.text):
            reason = "near duplicate"

        if reason is None:
            report.kept_documents += 1
            report.kept_bytes += size
            yield document
            continue

        report.removed_documents[reason] += 1
        report.removed_bytes[reason] += size
        places = report.examples.setdefault(reason, [])
        if len(places) < EXAMPLES:
            places.append(document.place)

    # Only known at the end: the index may be full at any time.
    if near is not None:
        report.forgotten_documents = near.forgotten


def clean_files(
    sources: Sequence[Path | str],
    out: Path,
    rules: CleanRules,
    *,
    text_key: str = "text",
    template: str | None = None,
    split: TextSplit = "file",
    convert: Callable[[str], str] | None = None,
) -> CleanReport:
    """Clean files into one new file.

    Records keep all their keys; a template's text goes under `text`. `convert` rewrites texts
    first.
    """
    # The output is written while the inputs are read.
    refuse_source(out, expand(sources))
    report = CleanReport()
    documents = read_documents(
        sources, text_key=text_key, template=template, split=split, keep_record=True
    )
    if convert is not None:
        documents = (replace(document, text=convert(document.text)) for document in documents)

    key = text_key
    if template is not None:
        key = "text"

    with progress("clean", unit="bytes") as advance, record_file(out) as write:
        reported_bytes = 0
        for document in clean(documents, rules, report):
            write(cleaned_record(document, key))
            advance(report.bytes - reported_bytes)
            reported_bytes = report.bytes

        report.refuse_empty(out)

    return report


def cleaned_record(document: Document, key: str) -> dict[str, Any]:
    """What is written for a document that stays: its whole record, with the text under `key`."""
    return {**(document.record or {"source": document.source}), key: document.text}


def refuse_source(out: Path, files: Sequence[Path]) -> None:
    """Refuse to write over an input."""
    if out.resolve() in {path.resolve() for path in files}:
        raise ConfigError(f"{out} is one of the sources; choose another output.")


def broken_rule(text: str, rules: CleanRules) -> str | None:
    """The first rule that a text breaks by itself, or None."""
    length = len(text)
    if not text or text.isspace():
        return "blank"
    if length < rules.min_characters:
        return "too short"
    if rules.max_characters is not None and length > rules.max_characters:
        return "too long"

    # Functions, so that the checks after the first broken one are not computed.
    counted = count_characters(text)
    visible = max(1, counted.visible)
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("control characters", lambda: counted.controls / visible > rules.max_controls),
        ("many digits", lambda: counted.digits / visible > rules.max_digits),
        ("many signs", lambda: counted.signs / visible > rules.max_signs),
        ("few letters", lambda: counted.letters / visible < rules.min_letters),
        ("repeated lines", lambda: repeated_share(text) > rules.max_repeated_lines),
        (
            "short lines",
            lambda: rules.min_line_length > 0 and mean_line_length(text) < rules.min_line_length,
        ),
    )
    return next((name for name, breaks in checks if breaks()), None)


def repeated_share(text: str) -> float:
    """The share of a text's characters in lines that repeat an earlier line."""
    seen: set[str] = set()
    total = 0
    repeated = 0
    for line in text.splitlines():
        line = line.strip()
        total += len(line)
        if line in seen:
            repeated += len(line)

        seen.add(line)

    return repeated / max(1, total)


def mean_line_length(text: str) -> float:
    """Characters per line that is not blank."""
    lengths = [len(line) for line in map(str.strip, text.splitlines()) if line]
    return sum(lengths) / max(1, len(lengths))
