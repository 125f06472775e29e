"""Conversations with pictures and sounds become tokens: K equal tokens stand where an item does, and carry no loss.

    content     "<image>\\nWhat is it?"        marks say where items stand; items without a mark come first: images, then sounds
    segments    [user header] M [\\nWhat is it?] [assistant header] [answer]       the chat template writes them; M splits the text
    tokens      u u M M M M t t t a a A A A         loss on A alone

In: turns and their media, a template, a tokenizer; out: ids, loss mask and items. What is too long loses text of the prompt first: never
an item, never all of its text, never the answer as long as there is text to drop. The prompt for generation is that of training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from headway.errors import DataError
from headway.store.media_items import MediaItem
from headway.store.source import Flags, Ids
from headway.tokenizer.chat import (
    ChatTemplate,
    Rendered,
    Segment,
    Turn,
    encode_segments,
    prompt_segments,
)
from headway.tokenizer.chat_template import ContinuedText
from headway.tokenizer.load import Tokenizer

MARK = re.compile(r"<(image|audio|video)>")
KEPT_FIRST, KEPT_TEXT = 8, 16
"""Of the longest text of a prompt that is too long, these many tokens stay: the first ones, and in all."""
T = TypeVar("T")


@dataclass(frozen=True)
class MediaPositions:
    """How items stand in a document. Its repr is part of cache keys."""

    tokens: Mapping[str, int]
    """Tokens of one item, by modality."""
    missing: bool
    """Every conversation has positions for each modality; absent items stand there."""


class PlacedMedia(NamedTuple, Generic[T]):
    """A conversation with a mark for every item, and the items in the order of their marks; None: absent."""

    turns: tuple[Turn, ...]
    items: tuple[tuple[str, T | None], ...]


def place_media(
    turns: Sequence[Turn], media: Sequence[tuple[str, T]], positions: MediaPositions
) -> PlacedMedia[T]:
    """Give every item a mark. The n-th mark of a modality is its n-th item; items beyond the marks stand before the first question."""
    waiting = {
        name: [one for modality, one in media if modality == name] for name in positions.tokens
    }
    unknown = next((modality for modality, _ in media if modality not in positions.tokens), None)
    if unknown is not None:
        raise DataError(f"holds {unknown}, and the model takes {', '.join(positions.tokens)} only.")
    marks: Counter[str] = Counter()
    for turn in turns:
        found = MARK.findall(turn.content)
        if found and turn.role != "user":
            raise DataError(
                f"a mark <{found[0]}> stands in a turn of the {turn.role}; media stand in questions of the user."
            )
        marks.update(found)
    for name, count in marks.items():
        if count > len(waiting.get(name, ())):
            raise DataError(
                f"has {count} marks <{name}> and {len(waiting.get(name, ()))} files for them."
            )
    items: list[tuple[str, T | None]] = []
    for name, given in waiting.items():
        unmarked = given[marks[name] :]
        items += [(name, one) for one in unmarked] or (
            [(name, None)] if positions.missing and not given else []
        )
    placed = _prepended(turns, [name for name, _ in items])
    marked = {name: iter(given[: marks[name]]) for name, given in waiting.items()}
    items += [(name, next(marked[name])) for turn in turns for name in MARK.findall(turn.content)]
    return PlacedMedia(tuple(placed), tuple(items))


def _prepended(turns: Sequence[Turn], names: Sequence[str]) -> list[Turn]:
    if not names:
        return list(turns)
    at = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if at is None:
        raise DataError("no question of the user, before which media could stand.")
    marks = "".join(f"<{name}>" for name in names)
    return [
        *turns[:at],
        replace(turns[at], content=f"{marks}\n{turns[at].content}"),
        *turns[at + 1 :],
    ]


def media_pieces(segments: Sequence[Segment], num_items: int, template: str) -> list[list[Segment]]:
    """The segments between the marks of `num_items` items."""
    pieces: list[list[Segment]] = [[]]
    for part, target in segments:
        text = None
        if isinstance(part, str):
            text = part
        elif isinstance(part, ContinuedText):
            text = part.text
        if text is None or target:
            pieces[-1].append(Segment(part, target))
            continue
        if not MARK.search(text):
            if text:
                pieces[-1].append(Segment(part, target))
            continue
        first, *rest = MARK.sub("\0", text).split("\0")
        if first:
            pieces[-1].append(Segment(_like(part, first), target))
        pieces += [[Segment(_like(part, one), target)] if one else [] for one in rest]
    if len(pieces) != num_items + 1:
        raise DataError(
            f"the chat template {template} writes {len(pieces) - 1} of {num_items} marks of media."
        )
    return pieces


def _like(part: object, text: str) -> str | ContinuedText:
    """A text that is written as the part it comes from."""
    return text if isinstance(part, str) else ContinuedText(text)


class MediaDocument(NamedTuple):
    """A conversation as tokens."""

    ids: Ids
    mask: Flags
    items: tuple[MediaItem, ...]


@dataclass(frozen=True)
class MediaEncoder:
    """Writes conversations with media as tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    positions: MediaPositions
    max_length: int | None = None
    counts: Counter[str] = field(default_factory=Counter)

    def fill_id(self, modality: str) -> int:
        """The token that stands where an item does; its embedding is replaced."""
        tokenizer = self.tokenizer
        known = (tokenizer.token_to_id(f"<{modality}>"), tokenizer.pad_id, tokenizer.eos_id, 0)
        return next(number for number in known if number is not None)

    def document(
        self, pieces: Sequence[Rendered], items: Sequence[tuple[str, str | None]]
    ) -> MediaDocument | None:
        """The document of a conversation, whose texts between items are `pieces`; None: nothing to learn is left of it."""
        document = self._fitted(self._joined(pieces, items))
        if document is None:
            self.counts["dropped"] += 1
        return document

    def prompt(self, placed: PlacedMedia[str], *, continues: bool = False) -> MediaDocument:
        """A conversation up to where the next answer begins; `continues`: up to the end of the words of the last one."""
        segments = prompt_segments(placed.turns, self.template, continues=continues)
        pieces = media_pieces(segments, len(placed.items), self.template.name)
        rendered: list[Rendered] = []
        for piece in encode_segments(pieces, self.template.name, self.tokenizer):
            if isinstance(piece, DataError):
                raise piece
            rendered.append(piece)
        return self._joined(rendered, placed.items)

    def _joined(
        self, pieces: Sequence[Rendered], items: Sequence[tuple[str, str | None]]
    ) -> MediaDocument:
        ids, masks, listed, length = (
            [pieces[0].ids],
            [pieces[0].mask],
            list[MediaItem](),
            len(pieces[0].ids),
        )
        for (modality, content_hash), piece in zip(items, pieces[1:], strict=True):
            count = self.positions.tokens[modality]
            listed.append(MediaItem(length, modality, content_hash))
            ids += [np.full(count, self.fill_id(modality)), piece.ids]
            masks += [np.zeros(count, np.bool_), piece.mask]
            length += count + len(piece.ids)
        return MediaDocument(np.concatenate(ids), np.concatenate(masks), tuple(listed))

    def _fitted(self, document: MediaDocument) -> MediaDocument | None:
        """At most `max_length` tokens, at least one of them a target behind a prompt."""
        limit = self.max_length
        if limit is not None and len(document.ids) > limit:
            document = self._shortened(document, limit)
        return document if document.mask[1:].any() else None

    def _shortened(self, document: MediaDocument, limit: int) -> MediaDocument:
        ids, mask, items = document
        answer = int(np.argmax(mask)) if mask.any() else len(ids)
        last = len(mask) - int(np.argmax(mask[::-1])) if mask.any() else len(ids)
        keep = np.ones(len(ids), np.bool_)
        keep[last:] = (
            False  # a template may write something after the last answer, which nothing is learned from
        )
        special = np.array([*self.tokenizer.special_tokens.values(), -1])
        text = ~np.isin(ids, special)
        text[answer:] = False
        for item in items:
            text[item.offset : item.offset + self.positions.tokens[item.modality]] = False
        while (excess := int(keep.sum()) - limit) > 0:
            begin, length = _longest_run(text & keep)
            removed = min(excess, length - KEPT_TEXT)
            if removed <= 0:
                break
            keep[begin + KEPT_FIRST : begin + KEPT_FIRST + removed] = False
            text[begin : begin + KEPT_FIRST] = (
                False  # the next look finds what is left behind the cut
            )
            self.counts["prompts_truncated"] += begin >= 0 and excess == removed
        moved = np.cumsum(keep) - keep
        ids, mask = ids[keep], mask[keep]
        listed = [
            item._replace(offset=int(moved[item.offset])) for item in items if keep[item.offset]
        ]
        if len(ids) > limit:
            self.counts["answers_truncated"] += 1
            cut = [
                item.offset
                for item in listed
                if item.offset + self.positions.tokens[item.modality] > limit
            ]
            end = min([limit, *cut])
            ids, mask, listed = (
                ids[:end],
                mask[:end],
                [item for item in listed if item.offset < end],
            )
        return MediaDocument(ids, mask, tuple(listed))


def _longest_run(flags: Flags) -> tuple[int, int]:
    """(begin, length) of the longest run of True; length 0 where there is none."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    begins, ends = edges[::2], edges[1::2]
    if not len(begins):
        return 0, 0
    at = int(np.argmax(ends - begins))
    return int(begins[at]), int(ends[at] - begins[at])
