"""The words that a template of MediaWiki puts into a sentence. In: `lang|en|Mathematics`, as
between double braces; out: `Mathematics`.

Templates that decorate a page (infoboxes, sources, sounds) have no words: None. What a template
computes from the day of reading (an age, the current year) is computed for the day on which the
page was written, so that a dump always gives the same text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date

Arguments = Mapping[str, str]
"""By name; those without one are called 1, 2, ..."""


@dataclass(frozen=True)
class PageFacts:
    """What templates may say about the page that holds them."""

    title: str = ""
    language: str = "en"
    written: date | None = None
    """The day of the revision; None = today, as a reader of the page would see it."""

    @property
    def day(self) -> date:
        """The day for which ages and current years are computed."""
        return self.written or date.today()

    @property
    def is_east_asian(self) -> bool:
        """Whether dates are written with 年, 月 and 日."""
        return self.language.split("-")[0] in ("zh", "ja", "yue", "wuu", "lzh", "gan")


_SPLIT = re.compile(r"\{\{|\}\}|\[\[|\]\]|-\{|\}-|\|")
_OPENING = ("{{", "[[", "-{")
_NAMED = re.compile(r"\s*([\w -]{1,30}?)\s*=")
"""`name =` at the beginning of an argument."""

# Names of templates, and the arguments that may hold the text: the first of them that is given and
# not empty.
_FIRST = (
    "nowrap", "nobr", "small", "smaller", "big", "larger", "bold", "em", "strong", "ruby", "abbr",
    "tooltip", "sub", "sup", "mvar", "math", "var", "kbd", "samp", "code", "mono", "smallcaps",
    "sc", "allcaps", "nihongo", "nihongo2", "sic", "linktext", "ipa", "flag", "chem2",
    "birth-date", "birth-date and age", "death-date", "death-date and age", "flagcountry",
    "proper name", "not a typo", "僻字", "补字", "補字", "korean", "jpn", "cjk", "uline",
    "underline", "strikethrough", "tq",
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
# Templates without arguments that stand for a sign or a space.
_SIGNS = {
    "ndash": "–", "mdash": "—", "snd": " – ", "spaced ndash": " – ", "·": " · ", "dot": " · ",
    "!": "|", "=": "=", "pi": "π",
    "nbsp": " ", "spaces": " ", "thin space": " ", "thinsp": " ", "hair space": " ",
    "hairsp": " ", "nbhyph": "-", "nbndash": "–",
    "'": "'", "' \"": "'\"", "'\"": "'\"", "\"'": "\"'", "\" '": "\"'", "sitename": "Wikipedia",
}  # fmt: skip
# `{{usd|100}}`: the sign before the amount.
_CURRENCIES = {
    "usd": "US$", "us$": "US$", "gbp": "£", "£": "£", "eur": "€", "€": "€", "inr": "₹", "jpy": "¥",
    "cny": "¥", "rmb": "¥", "aud": "A$", "a$": "A$", "cad": "C$", "c$": "C$", "nzd": "NZ$",
    "hkd": "HK$", "hk$": "HK$",
}  # fmt: skip
# `{{HMS|Victory}}`: the prefix before the ship's name.
_SHIPS = ("hms", "uss", "ss", "rms", "mv", "hmas", "hmcs", "usns", "uscgc", "ms", "ins")
_MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
_WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_BETWEEN = {"to", "and", "or", "by", "x", "-", "–", "+/-", "±"}
"""Second arguments of `convert` that join two numbers."""


def template_text(inner: str, page: PageFacts = PageFacts()) -> str | None:
    """The words of one template, as wikitext."""
    head = inner.partition("|")[0]
    name = " ".join(head.replace("_", " ").lower().split())
    if name in _SIGNS:
        return _SIGNS[name]
    if name in _VARIABLES:
        return _VARIABLES[name](page)
    if name.startswith("formatnum:"):
        return head.partition(":")[2]

    # Most templates of a page are none of these. They are recognised by name, before any work.
    keys = _TEXT.get(name) or next(
        (keys for pattern, keys in _FAMILIES if pattern.fullmatch(name)), ()
    )
    if not keys and not any(name in table for table in (_COMPOSED, _DATED, _CURRENCIES, _SHIPS)):
        return None

    arguments = _arguments(_split(inner)[1:])
    if name in _COMPOSED:
        return _COMPOSED[name](arguments)
    if name in _DATED:
        return _DATED[name](arguments, page)
    if name in _CURRENCIES and arguments.get("1"):
        return _CURRENCIES[name] + arguments["1"]
    if name in _SHIPS and arguments.get("1"):
        return f"{head.strip()} {arguments['1']}"

    # The first argument that is given and not empty.
    return next((arguments[key] for key in keys if arguments.get(key)), None)


def _split(inner: str) -> list[str]:
    """Cut at the bars that belong to this template and not to links, templates or variants
    inside it.
    """
    parts: list[str] = []
    start = 0
    depth = 0
    for mark in _SPLIT.finditer(inner):
        if mark[0] in _OPENING:
            depth += 1
        elif mark[0] != "|":
            depth = max(0, depth - 1)
        elif depth == 0:
            parts.append(inner[start : mark.start()])
            start = mark.end()

    return [*parts, inner[start:]]


def _arguments(parts: list[str]) -> Arguments:
    """The arguments of a template by name; those without a name are numbered from 1."""
    arguments: dict[str, str] = {}
    unnamed = 0
    for part in parts:
        # An argument may name itself (`1=x`); the others are numbered by their order.
        named = _NAMED.match(part)
        if named:
            arguments[named[1].strip().lower()] = part[named.end() :].strip()
        else:
            unnamed += 1
            arguments[str(unnamed)] = part.strip()

    return arguments


def _converted(given: Arguments) -> str | None:
    """`{{convert|10|km|mi}}`, `{{convert|5|to|10|km}}`: what was measured, not what it was
    converted to.
    """
    last = 2
    if given.get("2") in _BETWEEN:
        last = 4
    return " ".join(given.get(str(number), "") for number in range(1, last + 1)).strip() or None


def _fraction(given: Arguments) -> str | None:
    """`{{frac|2}}` is 1/2, `{{frac|2|3}}` is 2/3, `{{frac|1|2|3}}` is 1 2/3."""
    numbers = [given[key] for key in ("1", "2", "3") if given.get(key)]
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
    """`{{val|5|u=km}}`: the number and its unit."""
    return " ".join(given[key] for key in ("1", "u", "ul") if given.get(key)) or None


def _with_word(word: str) -> Callable[[Arguments], str | None]:
    """`{{circa|1900|1910}}`: the word before each of one or two years."""

    def text(given: Arguments) -> str | None:
        years = [given[key] for key in ("1", "2") if given.get(key)]
        return " – ".join(f"{word} {year}" for year in years) or None

    return text


def _span(word: str) -> Callable[[Arguments], str | None]:
    """`{{reign|1900|1910}}`: the word before a span of years."""

    def text(given: Arguments) -> str | None:
        years = [given[key] for key in ("1", "2") if given.get(key)]
        if not years:
            return None
        return f"{word} {'–'.join(years)}"

    return text


def _life(given: Arguments) -> str | None:
    """`{{bd|1867年|11月7日|1934年|7月4日}}` of the Chinese Wikipedia: years and days of birth and
    death.
    """
    born = given.get("1", "") + given.get("2", "")
    died = given.get("3", "") + given.get("4", "")
    if born or died:
        return f"（{born}—{died}）"
    return None


def _quoted(given: Arguments) -> str:
    """`{{"|x}}`: x in quotation marks; without x the mark alone."""
    if not given.get("1"):
        return '"'
    return f'"{given["1"]}"'


def _ordinal(given: Arguments) -> str | None:
    """`{{ordinal|2}}` is 2nd; 11th to 13th are not 11st to 13rd."""
    number = given.get("1", "")
    if not number.isdecimal():
        return number or None

    last = int(number[-1])
    is_teen = number[-2:-1] == "1"
    ending = "th"
    if last in (1, 2, 3) and not is_teen:
        ending = ("st", "nd", "rd")[last - 1]
    return number + ending


def _joined(given: Arguments) -> str | None:
    """`{{chem|H|2|O}}`: the parts without spaces."""
    parts: list[str] = []
    while (part := given.get(str(len(parts) + 1))) is not None:
        parts.append(part)
    return "".join(parts) or None


def _ship(given: Arguments) -> str | None:
    """`{{ship|HMS|Victory}}`."""
    return " ".join(given[key] for key in ("1", "2") if given.get(key)) or None


_COMPOSED: dict[str, Callable[[Arguments], str | None]] = {
    "convert": _converted,
    "cvt": _converted,
    "frac": _fraction,
    "sfrac": _fraction,
    "val": _value,
    "circa": _with_word("c."),
    "c.": _with_word("c."),
    "ca.": _with_word("c."),
    "floruit": _span("fl."),
    "fl.": _span("fl."),
    "reign": _span("r."),
    "r.": _span("r."),
    "bd": _life,
    '"': _quoted,
    "ordinal": _ordinal,
    "ord": _ordinal,
    "chem": _joined,
    "ship": _ship,
}
"""Templates whose words are made of several arguments."""


def _is_on(given: Arguments, name: str) -> bool:
    """Whether a switch of a template is on: `df=y`."""
    return given.get(name, "").lower() in ("y", "yes", "true", "1", "on")


def _dated(parts: list[str], page: PageFacts, *, day_first: bool = False) -> str | None:
    """Year, month and day as the page's language writes them; what is no number stays as it is."""
    parts = [part for part in parts if part]
    if not parts:
        return None

    # "May 2003" in one argument: somebody has written the date out.
    if not all(part.isdecimal() for part in parts):
        return " ".join(parts)

    numbers = [int(part) for part in parts]
    # The second number is no month, so this is no date.
    if len(numbers) > 1 and not 1 <= numbers[1] <= 12:
        return " ".join(parts)
    if page.is_east_asian:
        return "".join(f"{number}{sign}" for number, sign in zip(numbers, "年月日", strict=False))

    # Other languages get ISO dates, because the names of their months are not known here.
    if page.language.split("-")[0] not in ("en", "simple"):
        return "-".join([str(numbers[0]), *(f"{number:02}" for number in numbers[1:])])

    match numbers:
        case [year, month]:
            return f"{_MONTHS[month - 1]} {year}"
        case [year, month, day]:
            if day_first:
                return f"{day} {_MONTHS[month - 1]} {year}"
            return f"{_MONTHS[month - 1]} {day}, {year}"
        case _:
            return str(numbers[0])


def _date(given: Arguments, page: PageFacts) -> str | None:
    """`{{start date|2003|5|12}}`.

    An age that some of these templates add is that of the reader's day: it is left out.
    """
    return _dated(
        [given.get(key, "") for key in ("1", "2", "3")], page, day_first=_is_on(given, "df")
    )


def _year(given: Arguments, page: PageFacts) -> str | None:
    """`{{birth year and age|1990}}`."""
    return given.get("1") or None


def _death(given: Arguments, page: PageFacts) -> str | None:
    """`{{death date and age|2020|1|2|1950|3|4}}`: the age at death does not change."""
    day = _date(given, page)
    age = _years_between(_day_at(given, 4), _day_at(given, 1))
    if day is None or age is None:
        return day
    if page.is_east_asian:
        return f"{day}（{age}岁）"
    return f"{day} (aged {age})"


def _age(given: Arguments, page: PageFacts) -> str | None:
    """`{{age|1990|5|1}}` in years, on the day of the page or on a second day that is given."""
    end = page.day
    if given.get("4"):
        end = _day_at(given, 4)
    years = _years_between(_day_at(given, 1), end)
    if years is None:
        return None
    return str(years)


def _as_of(given: Arguments, page: PageFacts) -> str | None:
    """`{{as of|2019|5|lc=y}}`."""
    if given.get("alt"):
        return given["alt"]

    day = _date(given, page)
    if day is None:
        return None
    if page.is_east_asian:
        return f"截至{day}"

    word = "as of"
    if _is_on(given, "since"):
        word = "since"
    if not _is_on(given, "lc"):
        word = word.capitalize()

    return f"{word} {day}"


def _day_at(given: Arguments, first: int) -> date | None:
    """The date in three arguments; a missing month or day is the first one."""
    year = given.get(str(first), "")
    month = given.get(str(first + 1)) or "1"
    day = given.get(str(first + 2)) or "1"
    try:
        return date(int(year), int(month), int(day))
    except ValueError:
        return None


def _years_between(begin: date | None, end: date | None) -> int | None:
    if begin is None or end is None or end < begin:
        return None

    years = end.year - begin.year
    had_birthday = (end.month, end.day) >= (begin.month, begin.day)
    if not had_birthday:
        years -= 1
    return years


_DATED: dict[str, Callable[[Arguments, PageFacts], str | None]] = {
    **dict.fromkeys(
        ("start date", "start date and age", "start-date", "end date", "birth date",
         "birth date and age", "dob", "bda", "death date", "film date", "release date", "date",
         "dts", "opening date", "launch date"),
        _date,
    ),
    **dict.fromkeys(("birth year and age", "birth year", "death year"), _year),
    **dict.fromkeys(("death date and age", "dda"), _death),
    **dict.fromkeys(("age", "age in years", "years ago"), _age),
    **dict.fromkeys(("as of", "截至"), _as_of),
}  # fmt: skip
# `{{CURRENTMONTH}}` and its like, without the prefix.
_NAMES_OF_NOW: dict[str, Callable[[date], str]] = {
    "year": lambda day: str(day.year),
    "month": lambda day: f"{day.month:02}",
    "month1": lambda day: str(day.month),
    "month2": lambda day: f"{day.month:02}",
    "monthname": lambda day: _MONTHS[day.month - 1],
    "monthnamegen": lambda day: _MONTHS[day.month - 1],
    "monthabbrev": lambda day: _MONTHS[day.month - 1][:3],
    "day": lambda day: str(day.day),
    "day2": lambda day: f"{day.day:02}",
    "dayname": lambda day: _WEEKDAYS[day.weekday()],
}


def _now(name: str) -> Callable[[PageFacts], str]:
    """`{{CURRENTYEAR}}` and the like."""

    def text(page: PageFacts) -> str:
        if name.startswith("monthname") and page.is_east_asian:
            return f"{page.day.month}月"
        return _NAMES_OF_NOW[name](page.day)

    return text


_VARIABLES: dict[str, Callable[[PageFacts], str]] = {
    **{f"{prefix}{name}": _now(name) for prefix in ("current", "local") for name in _NAMES_OF_NOW},
    **dict.fromkeys(
        ("pagename", "fullpagename", "basepagename", "subpagename", "rootpagename"),
        lambda page: page.title,
    ),
}
"""What MediaWiki itself replaces, in lower case."""
