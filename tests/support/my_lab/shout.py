"""A data format of one's own: each line of a file is one text, in capitals."""

from collections.abc import Iterator

from headway.text.raw import RawFile, lines


def read(raw: RawFile) -> Iterator[dict[str, str]]:
    for _, text in lines(raw):
        if text:
            yield {"text": text.upper()}
