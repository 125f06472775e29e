"""A MediaWiki XML dump (pages-articles.xml.bz2) as plain-text articles, one page in memory at a
time.

Out: records with `id`, `title` and `text`. Redirects, other namespaces and pages without text
are skipped.

`clean_wikitext` removes tables, references, files and markup. It keeps prose, headings, and the
words of links and of templates inside sentences (`wiki_templates.py`). Formulas keep their TeX
between dollar signs. Of Chinese variant marks (`-{zh-hans:..;zh-hant:..}-`) it keeps the
simplified form. Unclosed braces and brackets stay as text, so that a mistake on a page does not
remove the rest of it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from xml.etree import ElementTree

from headway.errors import DataError
from headway.text.document import Record
from headway.text.formats.wiki_templates import PageFacts, template_text
from headway.text.raw import RawFile

# Sections that are lists of sources and links rather than prose.
DROPPED_SECTIONS = {
    "references", "external links", "see also", "further reading", "notes", "bibliography",
    "sources", "footnotes", "citations",
    "参考文献", "參考文獻", "外部链接", "外部連結", "参见", "參見", "参考资料", "參考資料",
    "注释", "註釋", "相关条目", "相關條目", "脚注", "腳註", "延伸阅读", "延伸閱讀",
    "参考来源", "參考來源",
}  # fmt: skip
# Link targets before a colon that bring a picture, a category or a page in another language, not
# words of the text.
DROPPED_LINKS = re.compile(
    r"(?:file|image|media|category|fichier|datei|bild"
    r"|文件|档案|檔案|图像|圖像|图片|圖片|分类|分類"
    r"|[a-z]{2,3}(?:-[a-z]+)*|simple)\s*:",
    re.I,
)
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
"""The attribute of a dump's root."""
MAX_DEPTH = 8
"""Nesting depth of templates; deeper ones contain no prose."""
GONE = "\0"
"""Placeholder for removed text until the surrounding brackets are processed."""
_NO_PLACES = dict.fromkeys(map(ord, f"{GONE}\x01\x02"))
"""Removes from a page the characters that mark places here."""

_COMMENT = re.compile(r"<!--")
_COMMENT_END = re.compile("-->")
_DROPPED_TAGS = re.compile(
    r"<(ref|gallery|timeline|score|imagemap|templatestyles|references|includeonly|hiero|graph"
    r"|mapframe|indicator)\b([^<>]*)>",
    re.I,
)
_FORMULA = re.compile(r"<(math|chem|ce)\b([^<>]*)>", re.I)
_FORMULA_PLACE = re.compile("\x01([0-9]+)\x02")
_BREAK = re.compile(r"<(?:br|hr)\b[^<>]*>", re.I)
_TAG = re.compile(r"</?[a-zA-Z][^<>]*>")
_VARIANT = re.compile(r"-\{([^{}]*)\}-")
_HIDDEN = re.compile(r"[A-Z;]*[HT-][A-Z;-]*")
"""Flags of a mark that only sets a rule, or the page's title."""
_WEB_LINK = re.compile(r"\[(?:https?:|ftp:)?//[^\s\]]+[ \t]*([^\]\n]*)\]")
_HEADING = re.compile(r"^(={1,6})\s*(.+?)\s*\1\s*$")
_LIST = re.compile(r"^[*#:;]+\s*")
_MAGIC = re.compile(r"__[A-Z\u4e00-\u9fff]+__")
_QUOTES = re.compile(r"'{2,5}")
_BRACKETS = re.compile(r"\[\[|\]\]")
_TABLE = re.compile(r"^[ :]*\{\||^[ \t]*\|\}", re.M)
_BRACE_RUN = re.compile(r"\{+|\}+")
_BLANKS = re.compile(r"[ \t\u00a0]+")
_SEPARATORS = r"[ \t\u00a0,，;；、:：/]{0,20}"
_EMPTY_BRACKETS = re.compile(
    rf"[ \t]?[(（]{_SEPARATORS}{GONE}[ \t\u00a0,，;；、:：/{GONE}]{{0,40}}[)）]"
)
_AFTER_BRACKET = re.compile(rf"([(（]){_SEPARATORS}{GONE}[ \t\u00a0,，;；、:：/{GONE}]{{0,40}}")
_BEFORE_BRACKET = re.compile(rf"{_SEPARATORS}{GONE}[ \t\u00a0,，;；、:：/{GONE}]{{0,40}}([)）])")


# Whether a mark opens or closes, and where it begins and ends.
Mark = tuple[bool, int, int]


def clean_wikitext(text: str, page: PageFacts | None = None) -> str:
    """The prose of a page, paragraphs and headings on separate lines.

    Ages and the current year are those of the page's date.
    """
    facts = page or PageFacts()
    # The order matters: comments may cut any markup in two, so they go first. Elements go before
    # braces and brackets, because what they hold (a citation) need not be balanced.
    text = _replace_elements(text.translate(_NO_PLACES), _COMMENT, lambda match, content: "")
    text = _replace_elements(text, _DROPPED_TAGS, lambda match, content: GONE)

    # Braces, quotes and signs of a formula are TeX, not markup: it waits under a number until all
    # markup is gone.
    formulas: list[str] = []
    text = _replace_elements(
        text, _FORMULA, lambda match, content: _set_aside(match, content, formulas)
    )

    # Templates before tables: a template may end a line with `|}}`, which looks like a table's end.
    text = _nested(text, _braces(text), lambda inner: _template(inner, facts))
    text = _nested(text, _marks(text, _TABLE, "{|"), lambda inner: "")
    text = _VARIANT.sub(lambda match: _variant(match[1]), text)
    text = _nested(text, _marks(text, _BRACKETS, "[["), _link)
    text = _WEB_LINK.sub(r"\1", text)
    text = _BREAK.sub("\n", text)
    text = html.unescape(_TAG.sub("", text))
    text = _QUOTES.sub("", _MAGIC.sub("", text))

    # "Ada (; born 1815)": the brackets lose the separators beside removed text, or go if nothing
    # else was in them.
    text = _EMPTY_BRACKETS.sub("", text)
    text = _AFTER_BRACKET.sub(r"\1", text)
    text = _BEFORE_BRACKET.sub(r"\1", text)
    text = text.replace(GONE, "")

    text = _sections(text)
    return _FORMULA_PLACE.sub(lambda match: formulas[int(match[1])], text)


def _replace_elements(
    text: str, opening: re.Pattern[str], replace: Callable[[re.Match[str], str], str]
) -> str:
    """Replace each comment or element, content included, by `replace(match, content)`; an unclosed
    one stays.

    An end that was not found once is not looked for again: a page of nothing but openings takes
    no quadratic time.
    """
    pieces: list[str] = []
    unclosed: set[str] = set()
    copied = 0
    position = 0
    while match := opening.search(text, position):
        name = ""
        if opening.groups:
            name = match[1].lower()

        position = match.end()
        if name in unclosed:
            continue

        content = ""
        if not match[0].endswith("/>"):
            if name:
                closing = re.compile(rf"</{name}\s*>", re.I)
            else:
                closing = _COMMENT_END

            ending = closing.search(text, position)
            if ending is None:
                unclosed.add(name)
                continue

            content = text[position : ending.start()]
            position = ending.end()

        pieces += [text[copied : match.start()], replace(match, content)]
        copied = position

    return "".join([*pieces, text[copied:]])


def _set_aside(match: re.Match[str], source: str, formulas: list[str]) -> str:
    """A number in place of a formula, which is appended to `formulas`."""
    kind, attributes = match.groups()
    content = " ".join(html.unescape(source).split())
    if not content:
        return GONE

    if kind.lower() != "math":
        formula = content
    elif "block" in attributes:
        formula = f"$${content}$$"
    else:
        formula = f"${content}$"

    formulas.append(formula)
    return f"\x01{len(formulas) - 1}\x02"


def _marks(text: str, pattern: re.Pattern[str], opening: str) -> Iterator[Mark]:
    for mark in pattern.finditer(text):
        yield mark[0].lstrip(" :").startswith(opening), mark.start(), mark.end()


def _braces(text: str) -> Iterator[Mark]:
    """Double braces; single ones inside (`{{math|{x}}}`) are matched first, so that they take no
    brace of the double ones.
    """
    # The open braces, innermost last: True for a single one, False for a double one.
    single: list[bool] = []
    for run in _BRACE_RUN.finditer(text):
        position, end = run.span()
        if run[0][0] == "{":
            for start in range(position, end - 1, 2):
                single.append(False)
                yield True, start, start + 2

            if (end - position) % 2:
                single.append(True)

            continue

        while position < end and single and (single[-1] or end - position >= 2):
            if single.pop():
                position += 1
            else:
                yield False, position, position + 2
                position += 2


def _nested(text: str, marks: Iterator[Mark], replace: Callable[[str], str]) -> str:
    """Replace every balanced pair of marks, outermost ones as a whole; an unclosed one stays
    unchanged.
    """
    begun: list[tuple[int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    for opens, mark_start, mark_end in marks:
        if opens:
            begun.append((mark_start, mark_end))
        elif begun:
            start, inner = begun.pop()
            # Pairs inside this one are part of its text.
            while spans and spans[-1][0] > start:
                spans.pop()

            spans.append((start, inner, mark_start, mark_end))

    pieces: list[str] = []
    copied = 0
    for start, inner, inner_end, end in spans:
        pieces += [text[copied:start], replace(text[inner:inner_end])]
        copied = end

    return "".join([*pieces, text[copied:]])


def _template(inner: str, page: PageFacts, depth: int = 0) -> str:
    """The words of a template, with those of the templates inside them."""
    text = None
    if depth < MAX_DEPTH:
        text = template_text(inner, page)
    if text is not None and "{{" in text:
        text = _nested(text, _braces(text), lambda below: _template(below, page, depth + 1))
    return text or GONE


def _link(inner: str) -> str:
    """The words of a link: `[[Target|shown]]` or `[[Target]]`; none for pictures and categories."""
    inner = _nested(inner, _marks(inner, _BRACKETS, "[["), _link)
    target, _, shown = inner.partition("|")
    if target.startswith(":"):
        return shown or target.lstrip(":")
    if DROPPED_LINKS.match(target.strip()):
        return ""
    # The last part is shown; the others are options (`thumb|left|...`).
    if shown:
        return shown.rpartition("|")[2]
    return target.partition("#")[0] or target


def _variant(inner: str) -> str:
    """One writing of Chinese variant markup: the simplified one where several are given, else
    the text itself.
    """
    flags, bar, body = inner.partition("|")
    if not bar:
        body = inner
    elif _HIDDEN.fullmatch(flags.strip()):
        return ""

    choices = dict(part.split(":", 1) for part in body.split(";") if ":" in part)
    named = {key.strip(): value.strip() for key, value in choices.items()}
    for key in ("zh-hans", "zh-cn", "zh-sg", "zh-my", "zh"):
        if key in named:
            return named[key]

    if named and all(key.startswith("zh") for key in named):
        return next(iter(named.values()))

    return body


def _sections(text: str) -> str:
    """Lines without list marks and table remains; headings without prose below them, and
    sections of sources, are dropped.
    """
    lines: list[str] = []
    # The last heading waits until there is prose below it.
    pending: list[str] = []
    # The level of a dropped section; its sub-sections (higher levels) are dropped with it.
    dropped_at: int | None = None
    for line in text.splitlines():
        heading = _HEADING.match(line.strip())
        if heading:
            level = len(heading[1])
            title = _BLANKS.sub(" ", heading[2]).strip()
            if dropped_at is not None and level > dropped_at:
                continue

            if title.lower() in DROPPED_SECTIONS:
                dropped_at = level
                pending = []
            else:
                dropped_at = None
                pending = [title]
            continue

        line = _BLANKS.sub(" ", _LIST.sub("", line)).strip()
        if dropped_at is not None or not line or line.startswith(("|", "!", "{|")):
            continue

        lines += pending
        pending = []
        lines.append(line)

    return "\n".join(lines)


def read_mediawiki(raw: RawFile, keys: Sequence[str] | None = None) -> Iterator[Record]:
    """The articles of a dump, numbered from 1 as pages."""
    with raw.open() as stream:
        number = 0
        root: ElementTree.Element | None = None
        language = "en"
        try:
            for event, element in ElementTree.iterparse(stream, events=("start", "end")):
                name = _local(element)
                if root is None:
                    root = element
                    language = element.get(LANGUAGE, "en")
                    if name != "mediawiki":
                        raise DataError(
                            f"{raw.name}: the XML begins with <{name}>; only MediaWiki dumps "
                            "(<mediawiki>) are read."
                        )
                elif event == "end" and name == "page":
                    number += 1
                    article = _article(element, language)
                    if article is not None:
                        yield Record(article, raw.name, number)

                    # The parser keeps all elements below the root; without this, the whole dump.
                    root.clear()
        except ElementTree.ParseError as error:
            raise DataError(
                f"{raw.name}:{error.position[0]}: not valid XML: {error}; the dump is damaged or "
                "cut short."
            ) from None


def _article(page: ElementTree.Element, language: str) -> dict[str, str] | None:
    """The record of a page; None for a redirect, another namespace or a page without prose."""
    fields = {_local(child): child for child in page}
    if "redirect" in fields or fields.get("ns") is None or fields["ns"].text != "0":
        return None

    revision = {_local(child): (child.text or "") for child in fields.get("revision", ())}
    if revision.get("model", "wikitext") != "wikitext":
        return None

    named = {"id": "", "title": ""}
    for key in named:
        if key in fields:
            named[key] = fields[key].text or ""

    facts = PageFacts(named["title"], language, _day(revision.get("timestamp", "")))
    text = clean_wikitext(revision.get("text", ""), facts)
    if text:
        return {**named, "text": text}

    return None


def _day(timestamp: str) -> date | None:
    """The day of a revision (`2024-04-16T10:00:00Z`); None if the dump does not say it."""
    try:
        return date.fromisoformat(timestamp[:10])
    except ValueError:
        return None


def _local(element: ElementTree.Element) -> str:
    """The name of an element without its namespace, which changes with the version of the dump."""
    return element.tag.rpartition("}")[2]
