"""Where a long text can be split for parallel encoding: the ids of its pieces, one after
another, are the ids of the whole text.

In: a tokenizer, a text in blocks. Out: pieces of about `PIECE_CHARACTERS`. A split is chosen by
the two characters around it alone, and only where one of two proofs holds, whatever the rest of
the text is:

    word end    the pre-tokenizer always ends a word there: a letter, then a space or sign, under
                patterns whose every branch is known
    no token    no entry of a BPE vocabulary holds the two characters side by side, so no merge
                ever joins the left and the right part

and where, besides, no added token holds the two characters and normalisation cannot join them. A
tokenizer for which neither can be shown (unigram models, unknown patterns or normalisers) has no
split points: its texts are encoded whole, at about 100 bytes of memory a byte.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

from headway.tokenizer.byte_level import spell

if TYPE_CHECKING:
    import tokenizers

    from headway.tokenizer.load import Tokenizer

PIECE_CHARACTERS = 1 << 16
"""About the length of a piece."""
BLOCK_CHARACTERS = 1 << 20
SPACE = "▁"
# What may follow the letter at a word's end: neither letter, mark, digit, Han nor apostrophe, and
# never joined to what is before it.
AFTER_WORD = frozenset(' \t\n\r,.;:!?()[]"/-，。！？；：、（）《》“”…—')
_FORMS: dict[str, Literal["NFC", "NFD", "NFKC", "NFKD"]] = {
    "NFC": "NFC",
    "NFD": "NFD",
    "NFKC": "NFKC",
    "NFKD": "NFKD",
}
# The normalisation rules that come with sentencepiece. A model may bring others, under other names.
_NORMALISED_MODELS = ("identity", "nfkc", "nmt_nfkc", "nfkc_cf", "nmt_nfkc_cf")
# Branches of patterns that match any letter; none continues from a letter to a character of
# AFTER_WORD.
_LETTERS = frozenset(
    {
        r" ?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+",
    }
)
# The same, where only both together match every letter.
_HAN_AND_OTHERS = frozenset({r"\p{Han}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}&&[^\p{Han}]]+"})
# GPT-4o's words: capitals then small letters, with or without a clitic at the end.
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CLITIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
CASED = [
    frozenset(
        {
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{end}",
            rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{end}",
        }
    )
    for end in ("", CLITIC + "?")
]
# Sets of branches of which each matches every letter.
_COVERS = [*(frozenset({branch}) for branch in _LETTERS), _HAN_AND_OTHERS, *CASED]
# Branches that match no letter before such a character, and look no further than one character past
# what they match.
_OTHERS = frozenset({
    # clitics
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d",
    CLITIC, r"'(?:[sStTmMdD]|[rR][eE]|[vV][eE]|[lL][lL])",
    # digits
    r"\p{N}", r"\p{N}{1,3}", r"\p{N}+", r" ?\p{N}+", r"[0-9]", r"[0-9][0-9][0-9]",
    # Chinese and Japanese
    r"[一-龥぀-ゟ゠-ヿ]+", r"\p{Han}+",
    # signs
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
    # white space
    r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]", r"[\r\n]+", r"\s+(?!\S)", r"\s+", r"\s",
})  # fmt: skip


class TextPiece(NamedTuple):
    """A part of a text, and whether the text begins and ends with it."""

    text: str
    first: bool = True
    last: bool = True


class SplitPoints:
    """The split points of one tokenizer, and how a piece after a split is encoded.

    `safe(before, after)` says whether a text may be split between two characters; None: nowhere.
    """

    def __init__(self, safe: Callable[[str, str], bool] | None, continued: Any) -> None:
        # Texts use few pairs of characters over and over, and each proof takes some work.
        self._safe = None
        if safe is not None:
            self._safe = lru_cache(1 << 16)(safe)
        self.continued = continued
        """The backend for all pieces but the first: it puts nothing before a text."""

    def between(self, before: str, after: str) -> bool:
        """Whether a text may be split between two neighbouring characters in any context."""
        return self._safe is not None and self._safe(before, after)

    def pieces(self, blocks: Iterable[str], size: int | None = None) -> Iterator[TextPiece]:
        """A text that comes in blocks as pieces of at most `size` characters, longer where there
        is no split point; nothing for no text.
        """
        size = size or PIECE_CHARACTERS
        waiting = ""
        first = True
        # Characters of `waiting` that are known to hold no split point. Without this, a text
        # without any would be searched again from its beginning with each block.
        searched = 0
        for block in blocks:
            waiting += block
            start = 0
            while len(waiting) - start > size and self._safe is not None:
                split = self._find(waiting, start, size, searched)
                if split is None:
                    searched = len(waiting) - start
                    break

                yield TextPiece(waiting[start:split], first, False)
                start = split
                first = False
                searched = 0

            if start:
                waiting = waiting[start:]

        if waiting or not first:
            yield TextPiece(waiting, first, True)

    def _find(self, text: str, start: int, size: int, searched: int) -> int | None:
        """The last split point within `size` characters of `start`, else the first one after
        them; `searched` characters hold none.
        """
        assert self._safe is not None, "the caller has looked"
        if searched <= size:
            for index in range(start + size, start, -1):
                if self._safe(text[index - 1], text[index]):
                    return index

        for index in range(start + max(size + 1, searched), len(text)):
            if self._safe(text[index - 1], text[index]):
                return index

        return None


def blocks_of(text: str) -> Iterator[str]:
    """A text in memory as blocks."""
    for start in range(0, len(text), BLOCK_CHARACTERS):
        yield text[start : start + BLOCK_CHARACTERS]


def split_points(tokenizer: Tokenizer) -> SplitPoints:
    """The split points of a tokenizer."""
    if tokenizer.is_sentencepiece:
        return _sentencepiece_points(tokenizer.backend)
    return _backend_points(tokenizer.fast)


def _sentencepiece_points(sp: Any) -> SplitPoints:
    """The split points of a sentencepiece model: between characters that no piece holds together."""
    from sentencepiece import SentencePieceProcessor

    from headway.tokenizer.sentencepiece_model import content_of

    proto = content_of(sp)
    rules = proto.normalizer_spec
    # Rules of a user may join or split any characters.
    if rules.precompiled_charsmap and rules.name not in _NORMALISED_MODELS:
        return SplitPoints(None, sp)

    joined = _pairs(piece.piece for piece in proto.pieces)
    known = {piece.piece for piece in proto.pieces if piece.type == piece.NORMAL}

    # The same model without the space in front, for all pieces but the first.
    rules.add_dummy_prefix = False
    continued = SentencePieceProcessor()
    continued.LoadFromSerializedProto(proto.SerializeToString())
    escaped: bool = rules.escape_whitespaces
    spaces_count = not rules.remove_extra_whitespaces

    def written(character: str) -> str | None:
        """A character as pieces spell it, or None where normalisation changes it."""
        if character == " ":
            # With remove_extra_whitespaces a space depends on the spaces around it.
            if not spaces_count:
                return None
            return SPACE if escaped else character

        if not rules.precompiled_charsmap:
            return character

        # Printable ASCII and common Chinese characters combine with nothing. The rest of the
        # rules are known only by trying them.
        plain = (character.isascii() and character.isprintable()) or "一" <= character <= "龥"
        if plain and sp.normalize(f"x{character}").endswith(f"x{character}"):
            return character
        return None

    def safe(before: str, after: str) -> bool:
        left = written(before)
        right = written(after)
        if left is None or right is None or before.isspace() or (left, right) in joined:
            return False

        # Neighbours that are both unknown become one unknown token, unless they fall back to bytes.
        return bool(proto.trainer_spec.byte_fallback) or right in known

    return SplitPoints(safe, continued)


def _backend_points(backend: tokenizers.Tokenizer) -> SplitPoints:
    """The split points of a `tokenizers` tokenizer: ends of words, or characters that no token
    holds side by side.
    """
    normaliser = _parts(backend.normalizer, "normalizers")
    splitter = _parts(backend.pre_tokenizer, "pretokenizers")
    added = backend.get_added_tokens_decoder().values()
    prefixed = any(part["type"] == "Prepend" for part in normaliser) or any(
        map(_puts_prefix, splitter)
    )
    # A token that counts only as a single word looks at the characters around it.
    simple = all(_is_simple(part) for part in normaliser) and not any(
        token.single_word for token in added
    )
    # What is put before a text is put after added tokens as well, so the pieces need it too.
    if not simple or (prefixed and any(not token.special for token in added)):
        return SplitPoints(None, backend)

    continued = backend
    if prefixed:
        continued = _without_prefix(backend)

    # An added token is searched in the text as it is, or after normalisation.
    contents = [token.content for token in added]
    spellings = list(contents)
    if backend.normalizer is not None:
        spellings += [backend.normalizer.normalize_str(content) for content in contents]

    in_added = _pairs(spellings)
    # Such a token takes the white space after it, so none may be cut off.
    greedy_ends = {token.content[-1] for token in added if token.rstrip and token.content}
    merged = _NoToken(backend)

    def safe(before: str, after: str) -> bool:
        left = _normalised(before, normaliser)
        right = _normalised(after, normaliser)
        # No piece ends with white space, because patterns look ahead from it (`\s+(?!\S)`).
        if (
            left is None
            or right is None
            or before.isspace()
            or (before, after) in in_added
            or (left[-1], right[0]) in in_added
        ):
            return False

        if before in greedy_ends and after.isspace():
            return False

        return _stays_apart(left[-1], right[0], splitter, merged)

    return SplitPoints(safe, continued)


def _stays_apart(before: str, after: str, splitter: list[dict[str, Any]], merged: _NoToken) -> bool:
    """Whether pre-tokenizer and model separate two characters in every text, and split the text
    around them the same without either.
    """
    bytes_spelled = False
    for step in splitter:
        # After ByteLevel the steps see spelled bytes, for which nothing is proved here.
        if bytes_spelled:
            return False

        ends = _ends_word(step, before, after)
        if ends is not False:
            return ends is True

        if step["type"] == "Metaspace":
            replacement = step.get("replacement", SPACE)
            before = before.replace(" ", replacement)
            after = after.replace(" ", replacement)

        bytes_spelled = step["type"] == "ByteLevel"

    return merged(before, after, bytes_spelled)


def _ends_word(step: dict[str, Any], before: str, after: str) -> bool | None:
    """Whether a step always splits between two characters; False: perhaps not, but it splits the
    rest as if it did; None: not known.
    """
    kind = step["type"]
    # Unicode 3.2 knows fewer letters than the tokenizer's tables. A letter of both is safe.
    word_end = after in AFTER_WORD and unicodedata.ucd_3_2_0.category(before)[0] == "L"
    if kind in ("Metaspace", "WhitespaceSplit", "Punctuation"):
        return kind == "WhitespaceSplit" and after.isspace()
    if kind == "Digits":
        return False if word_end else None

    if kind == "ByteLevel":
        if not step.get("use_regex", True):
            return False
        return word_end or None

    if kind != "Split":
        return None

    literal = step["pattern"].get("String")
    if literal is not None:
        return False if len(literal) == 1 else None

    # Both ways keep the matches as words: `Isolated`, or `Removed` of what is between the matches.
    plain = (step["behavior"], bool(step.get("invert"))) in (("Isolated", False), ("Removed", True))
    # Every branch must be known, and some of them together must match every letter.
    branches = frozenset(pattern_branches(step["pattern"]["Regex"]))
    covering = [branch_set for branch_set in _COVERS if branch_set <= branches]
    if not plain or not word_end or not branches <= _OTHERS.union(*covering):
        return None

    return bool(covering)


def pattern_branches(pattern: str) -> Iterator[str]:
    """The alternatives of a pattern's top level."""
    begin = 0
    depth = 0
    brackets = 0
    index = 0
    while index < len(pattern):
        sign = pattern[index]
        if sign == "\\":
            index += 1
        elif sign == "[":
            brackets += 1
        elif sign == "]" and brackets:
            brackets -= 1
        elif not brackets and sign in "()":
            depth += 1 if sign == "(" else -1
        elif not brackets and sign == "|" and depth == 0:
            yield pattern[begin:index]
            begin = index + 1

        index += 1

    yield pattern[begin:]


class _NoToken:
    """Whether no token of a BPE vocabulary holds two characters side by side; the vocabulary is
    read on first use.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._read: tuple[frozenset[tuple[str, str]], dict[str, int]] | None = None

    def __call__(self, before: str, after: str, bytes_spelled: bool) -> bool:
        from tokenizers import models

        model = cast(Any, self._backend.model)
        # Dropout splits at random; a prefix or suffix makes a token depend on its place in a word.
        if (
            not isinstance(model, models.BPE)
            or model.dropout
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
        ):
            return False

        if self._read is None:
            vocabulary = self._backend.get_vocab(with_added_tokens=False)
            self._read = _pairs(vocabulary), vocabulary

        joined, vocabulary = self._read
        if bytes_spelled:
            return (spell(before.encode())[-1], spell(after.encode())[0]) not in joined

        # Neighbours that are both unknown may become one token.
        known = after in vocabulary or (
            model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in after.encode())
        )
        return (before, after) not in joined and (known or not model.fuse_unk)


def _pairs(entries: Iterable[str]) -> frozenset[tuple[str, str]]:
    """The neighbouring characters in some texts."""
    return frozenset(pair for entry in entries for pair in pairwise(entry))


def _parts(step: Any, key: str) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer as a flat list of its steps."""
    if step is None:
        return []
    state: dict[str, Any] = json.loads(step.__getstate__())
    return flat_steps(state, key)


def flat_steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """A normaliser or pre-tokenizer of tokenizer.json as a list of steps without sequences."""
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [part for inner in step[key] for part in flat_steps(inner, key)]
    return [step]


def _is_simple(part: dict[str, Any]) -> bool:
    """Whether a normaliser's step changes each character by itself, apart from what combines
    with the one before it.
    """
    if part["type"] == "Replace":
        return len(part["pattern"].get("String", "")) == 1 and bool(part["content"])
    return part["type"] in _FORMS or part["type"] == "Prepend"


def _normalised(character: str, normaliser: list[dict[str, Any]]) -> str | None:
    """A character after normalisation; None where that could depend on its neighbours."""
    for part in normaliser:
        if part["type"] == "Replace":
            character = character.replace(part["pattern"]["String"], part["content"])
        elif part["type"] in _FORMS:
            # A character may combine with its neighbours if it changes by itself, has parts, is a
            # mark, or is a part of a Korean syllable (U+1100 to U+11FF).
            changes = unicodedata.normalize(_FORMS[part["type"]], character) != character
            decomposes = unicodedata.normalize("NFD", character) != character
            combines = any(
                unicodedata.category(c)[0] == "M" or "\u1100" <= c <= "\u11ff" for c in character
            )
            if changes or decomposes or combines:
                return None

    return character


def _puts_prefix(step: dict[str, Any]) -> bool:
    """Whether a step of a pre-tokenizer puts a space before the text."""
    if step["type"] == "ByteLevel":
        return bool(step.get("add_prefix_space"))
    return step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never"


def _without_prefix(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A clone that puts nothing before a text."""
    import tokenizers

    content = json.loads(backend.to_str())
    if content["normalizer"] is not None:
        kept = [
            part
            for part in flat_steps(content["normalizer"], "normalizers")
            if part["type"] != "Prepend"
        ]
        content["normalizer"] = None
        if kept:
            content["normalizer"] = {"type": "Sequence", "normalizers": kept}

    steps = []
    if content["pre_tokenizer"] is not None:
        steps = flat_steps(content["pre_tokenizer"], "pretokenizers")

    for step in filter(_puts_prefix, steps):
        if step["type"] == "ByteLevel":
            step["add_prefix_space"] = False
        else:
            step["prepend_scheme"] = "never"

    if steps:
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}

    clone = tokenizers.Tokenizer.from_str(json.dumps(content))
    clone.encode_special_tokens = True
    return clone
