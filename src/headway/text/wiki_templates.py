"""Which words of a template are part of the sentence it stands in: `{{lang|en|Mathematics}}` is Mathematics, an infobox is nothing.

In: what stands between the braces. Out: its words, templates inside still unresolved; None where the template is not part of the prose.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

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
