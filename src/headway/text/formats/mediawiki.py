"""A MediaWiki XML dump (pages-articles.xml.bz2): the articles as clean text, one page in memory at a time.

Out: records with `id`, `title` and `text`; redirects, other namespaces and pages without text are passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from xml.etree import ElementTree

from headway.errors import DataError
from headway.text.document import Record
from headway.text.raw import RawFile
from headway.text.wiki import clean_wikitext


def read(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The articles of a dump, numbered from 1 as pages."""
    with raw.open() as stream:
        number = 0
        root: ElementTree.Element | None = None
        try:
            for event, element in ElementTree.iterparse(stream, events=("start", "end")):
                name = _local(element)
                if root is None:
                    root = element
                    if name != "mediawiki":
                        raise DataError(f"{raw.name}: the XML begins with <{name}>; only MediaWiki dumps (<mediawiki>) are read.")
                elif event == "end" and name == "page":
                    number += 1
                    article = _article(element)
                    if article is not None:
                        yield Record(article, raw.name, number)
                    root.clear()
        except ElementTree.ParseError as error:
            raise DataError(f"{raw.name}:{error.position[0]}: not valid XML: {error}; the dump is damaged or cut short.") from None


def _article(page: ElementTree.Element) -> dict[str, str] | None:
    fields = {_local(child): child for child in page}
    if "redirect" in fields or fields.get("ns") is None or fields["ns"].text != "0":
        return None
    revision = {_local(child): (child.text or "") for child in fields.get("revision", ())}
    if revision.get("model", "wikitext") != "wikitext":
        return None
    text = clean_wikitext(revision.get("text", ""))
    named = {key: (fields[key].text or "") if key in fields else "" for key in ("id", "title")}
    return {**named, "text": text} if text else None


def _local(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]
