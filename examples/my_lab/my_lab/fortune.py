"""A data format: texts separated by lines that hold only a percent sign, as in the files of `fortune`."""

from __future__ import annotations

from collections.abc import Iterator

from headway.plugin import RawFile, lines


def read(raw: RawFile) -> Iterator[dict[str, str]]:
    """One record for each text; bounded memory."""
    text: list[str] = []
    for _, line in lines(raw):
        if line == "%":
            yield {"text": "\n".join(text)}
            text = []
        else:
            text.append(line)
    if text:
        yield {"text": "\n".join(text)}
