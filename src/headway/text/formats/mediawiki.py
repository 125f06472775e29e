"""A MediaWiki XML dump (pages-articles.xml.bz2) as plain-text articles, one page in memory at a time.

Out: records with `id`, `title` and `text`. Redirects, other namespaces and pages without text are skipped.

`clean_wikitext` removes tables, references, files and markup. It keeps prose, headings, and the words of links and of templates inside
sentences (`{{lang|en|Mathematics}}`). Of Chinese variant marks (`-{zh-hans:..;zh-hant:..}-`) it keeps the simplified form. Unclosed
braces and brackets stay as text, so that a mistake on a page does not remove the rest of it.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from xml.etree import ElementTree

from headway.errors import DataError
from headway.text.document import Record
from headway.text.raw import RawFile

Arguments = Mapping[str, str]
"""By name; those without one are called 1, 2, ..."""

_SPLIT = re.compile(r"\{\{|\}\}|\[\[|\]\]|-\{|\}-|\|")
_OPENING = ("{{", "[[", "-{")
_NAMED = re.compile(r"\s*([\w -]{1,30}?)\s*=")

# Names of templates, and the arguments that may hold the text: the first of them that is given and not empty.
_FIRST = (
    "nowrap", "nobr", "small", "smaller", "big", "larger", "bold", "em", "strong", "ruby", "abbr", "tooltip", "sub", "sup", "mvar", "math",
    "var", "kbd", "samp", "code", "mono", "smallcaps", "sc", "allcaps", "nihongo", "nihongo2", "sic", "as of", "linktext", "ipa", "flag",
    "flagcountry", "proper name", "not a typo", "僻字", "补字", "補字", "korean", "jpn", "cjk", "uline", "underline", "strikethrough", "tq",
)  # fmt: skip
_TEXT: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(_FIRST, ("1",)),
    **dict.fromkeys(("lang", "langx", "script", "rtl-lang", "lang-x"), ("text", "2")),
    **dict.fromkeys(("transl", "transliteration"), ("3", "2")),
    **dict.fromkeys(("le", "internal link helper"), ("3", "1")),
    **dict.fromkeys(("ill", "illm", "interlanguage link", "interlanguage link multi"), ("lt", "1")),
    **dict.fromkeys(("tsl", "translink", "translation link"), ("4", "3", "2")),
    **dict.fromkeys(("quote", "cquote", "blockquote", "quotation"), ("text", "quote", "1")),
    "zh": ("s", "c", "t", "1"),
}
# Families of names: one template for each language.
_FAMILIES: tuple[tuple[re.Pattern[str], tuple[str, ...]], ...] = (
    (re.compile(r"lang-[a-z]{2,3}(?:-[a-z]+)*"), ("text", "1")),
    (re.compile(r"(?:link-|internal link helper/)[a-z]{2,3}(?:-[a-z]+)*"), ("3", "1")),
    (re.compile(r"ipa-[a-z]{2,3}"), ("1",)),
)
_SIGNS = {"ndash": "–", "mdash": "—", "snd": " – ", "spaced ndash": " – ", "·": " · ", "dot": " · ", "!": "|", "=": "=", "pi": "π"}
_BETWEEN = {"to", "and", "or", "by", "x", "-", "–", "+/-", "±"}


def template_text(inner: str) -> str | None:
    """The words of one template, as wikitext."""
    head = inner.partition("|")[0]
    name = " ".join(head.replace("_", " ").lower().split())
    if name in _SIGNS:
        return _SIGNS[name]
    if name.startswith("formatnum:"):
        return head.partition(":")[2]
    places = _TEXT.get(name) or next((places for pattern, places in _FAMILIES if pattern.fullmatch(name)), ())
    if not places and name not in _COMPOSED:
        return None
    given = _arguments(_split(inner)[1:])
    if name in _COMPOSED:
        return _COMPOSED[name](given)
    return next((given[place] for place in places if given.get(place)), None)


def _split(inner: str) -> list[str]:
    """Cut at the bars that belong to this template and not to links, templates or variants inside it."""
    parts: list[str] = []
    at = depth = 0
    for mark in _SPLIT.finditer(inner):
        if mark[0] != "|":
            depth = max(0, depth + (1 if mark[0] in _OPENING else -1))
        elif depth == 0:
            parts.append(inner[at : mark.start()])
            at = mark.end()
    return [*parts, inner[at:]]


def _arguments(parts: list[str]) -> Arguments:
    found: dict[str, str] = {}
    unnamed = 0
    for part in parts:
        named = _NAMED.match(part)
        if named:
            found[named[1].strip().lower()] = part[named.end() :].strip()
        else:
            unnamed += 1
            found[str(unnamed)] = part.strip()
    return found


def _converted(given: Arguments) -> str | None:
    """`{{convert|10|km|mi}}`, `{{convert|5|to|10|km}}`: what was measured, not what it was converted to."""
    last = 4 if given.get("2") in _BETWEEN else 2
    return " ".join(given.get(str(place), "") for place in range(1, last + 1)).strip() or None


def _fraction(given: Arguments) -> str | None:
    numbers = [given[place] for place in ("1", "2", "3") if given.get(place)]
    match numbers:
        case [below]:
            return f"1/{below}"
        case [above, below]:
            return f"{above}/{below}"
        case [whole, above, below]:
            return f"{whole} {above}/{below}"
        case _:
            return None


def _value(given: Arguments) -> str | None:
    return " ".join(given[key] for key in ("1", "u", "ul") if given.get(key)) or None


def _about(given: Arguments) -> str | None:
    return f"c. {given['1']}" if given.get("1") else None


def _life(given: Arguments) -> str | None:
    """`{{bd|1867年|11月7日|1934年|7月4日}}` of the Chinese Wikipedia: years and days of birth and death."""
    born, died = (given.get(year, "") + given.get(day, "") for year, day in (("1", "2"), ("3", "4")))
    return f"（{born}—{died}）" if born or died else None


_COMPOSED: dict[str, Callable[[Arguments], str | None]] = {
    "convert": _converted, "cvt": _converted, "frac": _fraction, "sfrac": _fraction, "val": _value, "circa": _about, "c.": _about,
    "bd": _life,
}  # fmt: skip


# Sections that are lists of sources and links rather than prose.
DROPPED_SECTIONS = {
    "references", "external links", "see also", "further reading", "notes", "bibliography", "sources", "footnotes", "citations",
    "参考文献", "參考文獻", "外部链接", "外部連結", "参见", "參見", "参考资料", "參考資料", "注释", "註釋", "相关条目", "相關條目", "脚注",
    "腳註", "延伸阅读", "延伸閱讀", "参考来源", "參考來源",
}  # fmt: skip
# Link targets before a colon that bring a picture, a category or a page in another language, not words of the text.
DROPPED_LINKS = re.compile(
    r"(?:file|image|media|category|fichier|datei|bild|文件|档案|檔案|图像|圖像|图片|圖片|分类|分類|[a-z]{2,3}(?:-[a-z]+)*|simple)\s*:", re.I
)
MAX_DEPTH = 8
"""Nesting depth of templates; deeper ones contain no prose."""
GONE = "\0"
"""Placeholder for removed text until the surrounding brackets are processed."""

_COMMENT = re.compile(r"<!--.*?-->", re.S)
_DROPPED_TAGS = re.compile(
    r"<(ref|gallery|math|timeline|score|imagemap|templatestyles|references|includeonly|chem|hiero|graph|mapframe|indicator)\b"
    r"(?:[^<>]*/>|[^<>]*>.*?</\1\s*>)",
    re.S | re.I,
)
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
_EMPTY_BRACKETS = re.compile(rf"[ \t]?[(（]{_SEPARATORS}{GONE}[ \t\u00a0,，;；、:：/{GONE}]{{0,40}}[)）]")
_AFTER_BRACKET = re.compile(rf"([(（]){_SEPARATORS}{GONE}[ \t\u00a0,，;；、:：/{GONE}]{{0,40}}")
_BEFORE_BRACKET = re.compile(rf"{_SEPARATORS}{GONE}[ \t\u00a0,，;；、:：/{GONE}]{{0,40}}([)）])")


# Whether a mark opens or closes, and where it begins and ends.
Mark = tuple[bool, int, int]


def clean_wikitext(text: str) -> str:
    """The prose of a page, paragraphs and headings on separate lines."""
    text = _COMMENT.sub("", text.replace(GONE, ""))
    text = _DROPPED_TAGS.sub(GONE, text)
    text = _nested(text, _braces(text), _template)
    text = _nested(text, _marks(text, _TABLE, "{|"), lambda inner: "")
    text = _VARIANT.sub(lambda found: _variant(found[1]), text)
    text = _nested(text, _marks(text, _BRACKETS, "[["), _link)
    text = _WEB_LINK.sub(r"\1", text)
    text = _BREAK.sub("\n", text)
    text = html.unescape(_TAG.sub("", text))
    text = _QUOTES.sub("", _MAGIC.sub("", text))
    text = _BEFORE_BRACKET.sub(r"\1", _AFTER_BRACKET.sub(r"\1", _EMPTY_BRACKETS.sub("", text))).replace(GONE, "")
    return _sections(text)


def _marks(text: str, pattern: re.Pattern[str], opening: str) -> Iterator[Mark]:
    for mark in pattern.finditer(text):
        yield mark[0].lstrip(" :").startswith(opening), mark.start(), mark.end()


def _braces(text: str) -> Iterator[Mark]:
    """Double braces; single ones inside (`{{math|{x}}}`) are matched first, so that they take no brace of the double ones."""
    single: list[bool] = []
    for run in _BRACE_RUN.finditer(text):
        at, end = run.span()
        if run[0][0] == "{":
            for start in range(at, end - 1, 2):
                single.append(False)
                yield True, start, start + 2
            if (end - at) % 2:
                single.append(True)
            continue
        while at < end and single and (single[-1] or end - at >= 2):
            if single.pop():
                at += 1
            else:
                yield False, at, at + 2
                at += 2


def _nested(text: str, marks: Iterator[Mark], replace: Callable[[str], str]) -> str:
    """Replace every balanced pair of marks, outermost ones as a whole; an unclosed one stays unchanged."""
    begun: list[tuple[int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    for opens, mark_start, mark_end in marks:
        if opens:
            begun.append((mark_start, mark_end))
        elif begun:
            start, inner = begun.pop()
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, inner, mark_start, mark_end))
    pieces: list[str] = []
    at = 0
    for start, inner, inner_end, end in spans:
        pieces += [text[at:start], replace(text[inner:inner_end])]
        at = end
    return "".join([*pieces, text[at:]])


def _template(inner: str, depth: int = 0) -> str:
    text = template_text(inner) if depth < MAX_DEPTH else None
    if text is not None and "{{" in text:
        text = _nested(text, _braces(text), lambda below: _template(below, depth + 1))
    return text or GONE


def _link(inner: str) -> str:
    inner = _nested(inner, _marks(inner, _BRACKETS, "[["), _link)
    target, _, shown = inner.partition("|")
    if target.startswith(":"):
        return shown or target.lstrip(":")
    if DROPPED_LINKS.match(target.strip()):
        return ""
    return shown.rpartition("|")[2] if shown else target.partition("#")[0] or target


def _variant(inner: str) -> str:
    """One writing of Chinese variant markup: the simplified one where several are given, else the text itself."""
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
    return next(iter(named.values())) if named and all(key.startswith("zh") for key in named) else body


def _sections(text: str) -> str:
    """Lines without list marks and table remains; headings without prose below them, and sections of sources, are dropped."""
    lines: list[str] = []
    pending: list[str] = []
    dropped_at: int | None = None
    for line in text.splitlines():
        heading = _HEADING.match(line.strip())
        if heading:
            level, title = len(heading[1]), _BLANKS.sub(" ", heading[2]).strip()
            if dropped_at is not None and level > dropped_at:
                continue
            dropped_at = level if title.lower() in DROPPED_SECTIONS else None
            pending = [] if dropped_at is not None else [title]
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
