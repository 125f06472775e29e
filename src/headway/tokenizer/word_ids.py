"""Ids of texts by a table of words, several times as fast on one core as encoding each text whole.

In: a byte-level BPE tokenizer, a text. Out: the same ids as the tokenizer's own, as an array; None
where that is not certain. No merge crosses the end of a word, so the ids of a text are those of its
words in a row, and texts repeat few words over and over: each is encoded once and looked up after.

    text --split at the tokenizer's pattern, by Python's `re`--> words --table--> ids
                                                                 new words --BPE--> table

The pattern is translated from the syntax and the Unicode tables of `tokenizers` to explicit classes
of characters. This is exact for characters whose properties are the same in every version of
Unicode since 3.2, and for emoji. A text that has others (or an added token, or what normalisation changes) is left
to the tokenizer, and so is every tokenizer with a step that is not known here.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache
from itertools import chain
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from headway.tokenizer.byte_level import GPT2
from headway.tokenizer.split_points import CASED, CLITIC, flat_steps, pattern_branches

Ids = NDArray[np.uint32]
MAX_WORDS = 1 << 18
"""Words in a table: about 50 MB. Later ones are encoded whenever they come up."""
MAX_WORD_CHARACTERS = 64
"""Longer words are hardly ever repeated."""
MAX_ADDED_TOKENS = 64
"""Each text is searched for every added token; with more of them nothing would be gained."""

_CLITICS = "'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])"
# What Python's `re` writes in another way; properties and white space are for `_marked`.
_REPLACED = {
    CLITIC: f"(?:{_CLITICS})",
    r"[\p{L}\p{M}&&[^\p{Han}]]": r"[\p{OtherThanHan}]",
    # Python's \s knows other characters than `tokenizers`' does.
    r"(?!\S)": r"(?![^\s])",
}
# Branches that mean the same in Python when that is done.
_KNOWN_BRANCHES = frozenset({
    *chain.from_iterable(CASED), CLITIC, _CLITICS,
    r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+",
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d",
    r" ?\p{L}+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
    r"\p{Han}+",
    r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r" ?\p{N}+",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
})  # fmt: skip
# Long s is an s to a pattern that ignores case. Radicals, numerals and compatibility forms are rare
# signs of Han script that `_is_han` does not list.
_ODD = re.compile("[\u017f\u2e80-\u2fff\u3021-\u3029\u3038-\u303b\uf900-\ufaff]")
_EMOJI = (range(0x1F300, 0x1F650), range(0x1F680, 0x1F6C6))
"""Complete since Unicode 8; all versions of `tokenizers` have later tables."""
_PROPERTY = re.compile(r"\\p\{(\w+)\}")


class WordIds:
    """The words of one tokenizer and their ids; it grows with the texts."""

    def __init__(
        self,
        words_of: Callable[[str], list[str]],
        model: Any,
        added: Iterable[str],
        composes: bool,
    ) -> None:
        self._words_of = words_of
        self._model = model
        """A backend that takes a text for one word."""
        self._added = tuple(added)
        self._composes = composes
        """Whether the tokenizer brings texts into the form NFC."""
        # The ids of a word as bytes: joining them is the fastest way to those of a text.
        self._known: dict[str, bytes] = {}

    def encode(self, text: str) -> Ids | None:
        """The ids of a text, or None where the tokenizer itself must encode it."""
        if not self._is_certain(text):
            return None

        words = self._words_of(text)
        # What no branch matches is a word of its own or left out, as the tokenizer has it.
        if sum(map(len, words)) != len(text):
            return None

        known = self._known
        try:
            joined = b"".join(map(known.__getitem__, words))
        except KeyError:
            learned = self._learned(set(words).difference(known))
            joined = b"".join([learned[word] if word in learned else known[word] for word in words])
        return np.frombuffer(joined, np.uint32)

    def _is_certain(self, text: str) -> bool:
        if not text.isascii():
            if _known_characters().fullmatch(text) is None:
                return False
            if self._composes and not unicodedata.is_normalized("NFC", text):
                return False
        return not any(token in text for token in self._added)

    def _learned(self, words: set[str]) -> dict[str, bytes]:
        """The ids of words that are not in the table; those with room and use are put into it."""
        new_words = list(words)
        # One call for all of them: one by one, each would cost as much as twenty merges.
        encoding = self._model.encode(new_words, is_pretokenized=True, add_special_tokens=False)
        ids = np.array(encoding.ids, np.uint32)
        counts = np.bincount(encoding.word_ids, minlength=len(new_words))
        ends = np.cumsum(counts).tolist()

        learned: dict[str, bytes] = {}
        begin = 0
        for word, end in zip(new_words, ends, strict=True):
            learned[word] = ids[begin:end].tobytes()
            if len(self._known) < MAX_WORDS and len(word) <= MAX_WORD_CHARACTERS:
                self._known[word] = learned[word]
            begin = end
        return learned


def word_ids(backend: Any) -> WordIds | None:
    """An empty table for a `tokenizers` tokenizer, or None where one cannot stand for it."""
    from tokenizers import Tokenizer, models

    content = json.loads(backend.to_str())
    model = cast(Any, backend.model)
    # Dropout splits words at random. A prefix or suffix of words goes with other pre-tokenizers.
    # Truncation and padding change what comes out.
    if (
        not isinstance(model, models.BPE)
        or model.dropout
        or model.continuing_subword_prefix
        or model.end_of_word_suffix
        or content["truncation"]
        or content["padding"]
    ):
        return None

    normaliser = flat_steps(content["normalizer"], "normalizers")
    if [step["type"] for step in normaliser] not in ([], ["NFC"]):
        return None

    pattern = _pattern(flat_steps(content["pre_tokenizer"], "pretokenizers"))
    if pattern is None:
        return None

    translated = _translated(pattern)
    # A special token written in a text is ordinary text (`encode_special_tokens`), others are not.
    added = [token["content"] for token in content["added_tokens"] if not token["special"]]
    if translated is None or len(added) > MAX_ADDED_TOKENS:
        return None

    if backend.normalizer is not None:
        added += [backend.normalizer.normalize_str(token) for token in added]

    one_word = {
        **content,
        "normalizer": None,
        "post_processor": None,
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": False,
            "use_regex": False,
        },
    }
    return WordIds(
        translated.findall,
        Tokenizer.from_str(json.dumps(one_word)),
        added,
        composes=bool(normaliser),
    )


def _pattern(steps: list[dict[str, Any]]) -> str | None:
    """The pattern at which a pre-tokenizer splits, None where it does anything else."""
    if not steps or steps[-1]["type"] != "ByteLevel" or steps[-1]["add_prefix_space"]:
        return None

    spells_and_splits = steps[-1].get("use_regex", True)
    if len(steps) == 1 and spells_and_splits:
        return GPT2

    if len(steps) != 2 or spells_and_splits or steps[0]["type"] != "Split":
        return None

    split = steps[0]
    # Both ways keep the matches as words: `Isolated`, or `Removed` of what is between the matches.
    way = (split["behavior"], bool(split.get("invert")))
    if way not in (("Isolated", False), ("Removed", True)):
        return None
    return split["pattern"].get("Regex")


@cache
def _translated(pattern: str) -> re.Pattern[str] | None:
    """A pattern of `tokenizers` for Python's `re`, None if it has a branch that is not known."""
    branches: list[str] = []
    for branch in pattern_branches(pattern):
        if branch not in _KNOWN_BRANCHES:
            return None
        branches.append(_marked(branch))

    translated = "|".join(branches)
    for name, members in _classes().items():
        translated = translated.replace("{" + name + "}", members)
    return re.compile(translated)


def _marked(branch: str) -> str:
    """A branch with a mark such as `{L}` for each property, in brackets everywhere."""
    for foreign, ours in _REPLACED.items():
        branch = branch.replace(foreign, ours)

    marked = ""
    in_brackets = False
    place = 0
    while place < len(branch):
        sign = branch[place]
        width = 1
        members = ""
        if match := _PROPERTY.match(branch, place):
            width = len(match[0])
            members = "{" + match[1] + "}"
        elif branch.startswith(r"\s", place):
            width = 2
            members = "{white}"
        elif sign in "[]":
            in_brackets = sign == "["

        if members and not in_brackets:
            members = f"[{members}]"
        marked += members or branch[place : place + width]
        place += width
    return marked


@cache
def _categories() -> dict[str, str]:
    """Characters whose general category never changed since Unicode 3.2, and later emoji, each with
    it; surrogates and private characters are left out.
    """
    oldest = unicodedata.ucd_3_2_0
    steady: dict[str, str] = {}
    for number in range(0x10000):
        character = chr(number)
        category = oldest.category(character)
        if category[0] == "C" and category not in ("Cc", "Cf"):
            continue
        if category == unicodedata.category(character) and not _ODD.match(character):
            steady[character] = category

    for number in chain(*_EMOJI):
        steady[chr(number)] = unicodedata.category(chr(number))
    return steady


def _is_han(character: str) -> bool:
    return (
        "\u4e00" <= character <= "\u9fa5"
        or "\u3400" <= character <= "\u4db5"
        or character in "\u3005\u3007"
    )


def _is_white(character: str, category: str) -> bool:
    """Unicode's property White_Space, among the characters above."""
    return category[0] == "Z" or character in "\t\n\v\f\r\x85"


@cache
def _classes() -> dict[str, str]:
    """The members of each class that patterns name, as they are written within brackets."""
    categories = _categories()
    members: defaultdict[str, list[str]] = defaultdict(list)
    for character, category in categories.items():
        members[category[0]].append(character)
        members[category].append(character)
        if _is_han(character):
            members["Han"].append(character)
        elif category[0] in "LM":
            members["OtherThanHan"].append(character)
        if _is_white(character, category):
            members["white"].append(character)
    return {name: _ranges(characters) for name, characters in members.items()}


@cache
def _known_characters() -> re.Pattern[str]:
    """Matches texts of characters that `_categories` has."""
    return re.compile(f"[{_ranges(list(_categories()))}]*")


def _ranges(characters: list[str]) -> str:
    """Sorted characters as ranges for within brackets."""
    ranges: list[list[int]] = []
    for number in map(ord, characters):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return "".join(rf"\U{first:08x}-\U{last:08x}" for first, last in ranges)
