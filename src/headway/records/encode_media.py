"""Conversations with pictures and sounds become tokens: K equal tokens stand where an item does,
and carry no loss.

    content     "<image>\\nWhat is it?"
                marks say where items stand; items without a mark come first: images, then sounds
    segments    [user header] M [\\nWhat is it?] [assistant header] [answer]
                the chat template writes them; M splits the text
    tokens      u u M M M M t t t a a A A A
                loss on A alone

In: turns and their media, a template, a tokenizer. Out: ids, loss mask and items.

A document that is too long loses text of the prompt first, and keeps the beginning and the end of
each text. Where that is not enough, the end of the document is cut, but never inside an item. The
prompt for generation is that of training.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from headway.errors import DataError
from headway.media.items import MediaRef
from headway.media.patches import Grid, PictureSpec, grid_of
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
KEPT_FIRST = 8
"""Tokens that stay at the beginning of a text of the prompt that is shortened."""
KEPT_TEXT = 16
"""Tokens of such a text that stay in all: its first ones, and as many at its end."""
T = TypeVar("T")


@dataclass(frozen=True)
class MediaPositions:
    """How items stand in a document. Its repr is part of cache keys."""

    tokens: Mapping[str, int]
    """Tokens of one item, by modality."""
    missing: bool
    """Every conversation has positions for each modality; absent items stand there."""

    @property
    def after_marks(self) -> str:
        """What stands between marks that are put before a question, and its text."""
        return "\n"

    def grid(self, ref: MediaRef) -> Grid | None:
        """Rows and columns of positions of an item whose number follows from its size."""
        return None

    def count(self, modality: str, grid: Grid | None) -> int:
        """Positions of an item."""
        return self.tokens[modality]

    def around(self) -> tuple[list[int], list[int]]:
        """Ids before and behind the positions of an item."""
        return [], []


@dataclass(frozen=True)
class NativePositions(MediaPositions):
    """How pictures stand in documents of a model with its own vision tower: one position for each
    cell (media/patches.py), between two tokens of the model."""

    picture: PictureSpec
    begin_id: int
    pad_id: int
    end_id: int

    @property
    def after_marks(self) -> str:
        # As in the chat templates of these models.
        return ""

    def grid(self, ref: MediaRef) -> Grid | None:
        # `place_media` refuses other modalities.
        if ref.modality not in self.tokens:
            return None
        return grid_of(ref, self.picture)

    def count(self, modality: str, grid: Grid | None) -> int:
        assert grid is not None, "pictures come with their sizes"
        rows, columns = grid
        return rows * columns

    def around(self) -> tuple[list[int], list[int]]:
        return [self.begin_id], [self.end_id]


class PlacedMedia(NamedTuple, Generic[T]):
    """A conversation with a mark for every item, and the items in the order of their marks;
    None: absent.
    """

    turns: tuple[Turn, ...]
    items: tuple[tuple[str, T | None], ...]


def place_media(
    turns: Sequence[Turn], media: Sequence[tuple[str, T]], positions: MediaPositions
) -> PlacedMedia[T]:
    """Give every item a mark.

    The n-th mark of a modality is its n-th item; items beyond the marks stand before the first
    question.
    """
    waiting = {
        name: [item for modality, item in media if modality == name] for name in positions.tokens
    }

    unknown = next((modality for modality, _ in media if modality not in positions.tokens), None)
    if unknown is not None:
        raise DataError(f"holds {unknown}, and the model takes {', '.join(positions.tokens)} only.")

    marks: Counter[str] = Counter()
    for turn in turns:
        modalities = MARK.findall(turn.content)
        if modalities and turn.role != "user":
            raise DataError(
                f"a mark <{modalities[0]}> stands in a turn of the {turn.role}; media stand in "
                "questions of the user."
            )

        marks.update(modalities)

    for name, count in marks.items():
        if count > len(waiting.get(name, ())):
            raise DataError(
                f"has {count} marks <{name}> and {len(waiting.get(name, ()))} files for them."
            )

    # Items beyond the marks stand before the first question, so they come first in the list.
    items: list[tuple[str, T | None]] = []
    for name, available in waiting.items():
        items += [(name, item) for item in available[marks[name] :]]
        # A model that was trained with missing items expects positions for each modality in every
        # conversation; an absent item fills them.
        if positions.missing and not available:
            items.append((name, None))

    placed = _with_marks_first(turns, [name for name, _ in items], positions.after_marks)

    # Then the marked items, in the order of the marks in the text.
    marked = {name: iter(available[: marks[name]]) for name, available in waiting.items()}
    for turn in turns:
        items += [(name, next(marked[name])) for name in MARK.findall(turn.content)]
    return PlacedMedia(tuple(placed), tuple(items))


def _with_marks_first(turns: Sequence[Turn], names: Sequence[str], between: str) -> list[Turn]:
    """The turns with a mark for each of `names` (modalities) before the first question."""
    if not names:
        return list(turns)

    question = next((number for number, turn in enumerate(turns) if turn.role == "user"), None)
    if question is None:
        raise DataError("no question of the user, before which media could stand.")

    marks = "".join(f"<{name}>" for name in names)
    return [
        *turns[:question],
        replace(turns[question], content=f"{marks}{between}{turns[question].content}"),
        *turns[question + 1 :],
    ]


def media_pieces(segments: Sequence[Segment], num_items: int, template: str) -> list[list[Segment]]:
    """The segments between the marks of `num_items` items: `num_items` + 1 lists, some empty."""
    pieces: list[list[Segment]] = [[]]
    for part, target in segments:
        text = None
        if isinstance(part, str):
            text = part
        elif isinstance(part, ContinuedText):
            text = part.text

        # A mark in an answer is text that the model learns to write, and stands for no item.
        if text is None or target:
            pieces[-1].append(Segment(part, target))
            continue

        if not MARK.search(text):
            if text:
                pieces[-1].append(Segment(part, target))
            continue

        first, *texts_after = MARK.sub("\0", text).split("\0")
        if first:
            pieces[-1].append(Segment(_like(part, first), target))

        for text_after in texts_after:
            pieces.append([])
            if text_after:
                pieces[-1].append(Segment(_like(part, text_after), target))

    # A custom template may leave out the content of some turn, or write it twice.
    if len(pieces) != num_items + 1:
        raise DataError(
            f"the chat template {template} writes {len(pieces) - 1} of {num_items} marks of media."
        )

    return pieces


def _like(part: object, text: str) -> str | ContinuedText:
    """A text of the same type as the segment it is cut from."""
    if isinstance(part, str):
        return text
    return ContinuedText(text)


class MediaDocument(NamedTuple):
    """A conversation as tokens."""

    ids: Ids
    """[tokens], with `MediaPositions.tokens` equal ids for each item."""
    mask: Flags
    """[tokens]: True for loss targets."""
    items: tuple[MediaItem, ...]


@dataclass(frozen=True)
class MediaEncoder:
    """Writes conversations with media as tokens."""

    tokenizer: Tokenizer
    template: ChatTemplate
    positions: MediaPositions
    max_length: int | None = None
    counts: Counter[str] = field(default_factory=Counter)
    grids: Mapping[str, Grid] = field(default_factory=dict)
    """By content hash: rows and columns of positions of items of any size."""

    def fill_id(self, modality: str) -> int:
        """The token that stands where an item does.

        Any id will do, because its embedding is replaced by features. A token `<image>` of the
        tokenizer is preferred.
        """
        if isinstance(self.positions, NativePositions):
            return self.positions.pad_id
        tokenizer = self.tokenizer
        candidates = (tokenizer.token_to_id(f"<{modality}>"), tokenizer.pad_id, tokenizer.eos_id, 0)
        return next(token_id for token_id in candidates if token_id is not None)

    def _count(self, modality: str, content_hash: str | None) -> int:
        """Positions of an item."""
        grid = None
        if content_hash is not None:
            grid = self.grids.get(content_hash)
        return self.positions.count(modality, grid)

    def document(
        self, pieces: Sequence[Rendered], items: Sequence[tuple[str, str | None]]
    ) -> MediaDocument | None:
        """The document of a conversation, whose texts between items are `pieces`; None: nothing
        to learn is left of it.
        """
        document = self._fitted(self._joined(pieces, items))
        if document is None:
            self.counts["dropped"] += 1
        return document

    def prompt(self, placed: PlacedMedia[str], *, continues: bool = False) -> MediaDocument:
        """A conversation up to where the next answer begins, for generation.

        `continues`: the last turn is the beginning of the answer, and the prompt ends with its
        words.
        """
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
        """Text, item, text, item, ..., text as one sequence of tokens."""
        ids = [pieces[0].ids]
        masks = [pieces[0].mask]
        media_items = list[MediaItem]()
        length = len(pieces[0].ids)
        before, behind = self.positions.around()
        for (modality, content_hash), piece in zip(items, pieces[1:], strict=True):
            count = self._count(modality, content_hash)
            media_items.append(MediaItem(length + len(before), modality, content_hash))
            item_ids = [*before, *[self.fill_id(modality)] * count, *behind]
            ids += [np.array(item_ids, np.int64), piece.ids]
            masks += [np.zeros(len(item_ids), np.bool_), piece.mask]
            length += len(item_ids) + len(piece.ids)

        return MediaDocument(np.concatenate(ids), np.concatenate(masks), tuple(media_items))

    def _fitted(self, document: MediaDocument) -> MediaDocument | None:
        """At most `max_length` tokens, at least one of them a target behind a prompt."""
        limit = self.max_length
        if limit is not None and len(document.ids) > limit:
            document = self._shortened(document, limit)

        # Nothing predicts the first token, so a target there does not count.
        if not document.mask[1:].any():
            return None
        return document

    def _shortened(self, document: MediaDocument, limit: int) -> MediaDocument:
        """Take text out of the prompt until the document fits; if that is not enough, cut its end.

        `keep` [tokens]: what stays. `removable` [tokens]: text of the prompt, which may go.
        """
        ids, mask, items = document
        answer_start = len(ids)
        answer_end = len(ids)
        if mask.any():
            answer_start = int(np.argmax(mask))
            answer_end = len(mask) - int(np.argmax(mask[::-1]))

        # A template may write something after the last answer, from which nothing is learned.
        keep = np.ones(len(ids), np.bool_)
        keep[answer_end:] = False

        # Special tokens carry the structure of the conversation, so they stay. The -1 keeps the
        # array of integers where a tokenizer has none.
        special = np.array([*self.tokenizer.special_tokens.values(), -1])
        removable = ~np.isin(ids, special)
        removable[answer_start:] = False
        for item in items:
            end = item.offset + self._count(item.modality, item.content_hash)
            removable[item.offset : end] = False

        # The longest text first: an instruction that was pasted in is cut before a short question.
        while (excess := int(keep.sum()) - limit) > 0:
            begin, length = _longest_run(removable & keep)
            removed = min(excess, length - KEPT_TEXT)
            if removed <= 0:
                break

            keep[begin + KEPT_FIRST : begin + KEPT_FIRST + removed] = False
            # The kept beginning of this text is final. Otherwise it would count as text that may
            # still go in the next round.
            removable[begin : begin + KEPT_FIRST] = False
            # Only the cut that makes the document fit counts, so that each document counts once.
            self.counts["prompts_truncated"] += excess == removed

        # A token moves to the left by as many tokens as were removed before it.
        new_offsets = np.cumsum(keep) - keep
        ids = ids[keep]
        mask = mask[keep]
        kept_items = [
            item._replace(offset=int(new_offsets[item.offset]))
            for item in items
            if keep[item.offset]
        ]

        if len(ids) > limit:
            self.counts["answers_truncated"] += 1
            # An item that would be cut in two is left out as a whole, with all that follows it:
            # the model replaces all positions of an item or none.
            cut_items = [
                item.offset
                for item in kept_items
                if item.offset + self._count(item.modality, item.content_hash) > limit
            ]
            end = min([limit, *cut_items])
            ids = ids[:end]
            mask = mask[:end]
            kept_items = [item for item in kept_items if item.offset < end]

        return MediaDocument(ids, mask, tuple(kept_items))


def _longest_run(flags: Flags) -> tuple[int, int]:
    """(begin, length) of the longest run of True; length 0 where there is none."""
    # With False at both ends, the places where the flag changes are begin, end, begin, end, ...
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    begins = edges[::2]
    ends = edges[1::2]
    if not len(begins):
        return 0, 0
    longest = int(np.argmax(ends - begins))
    return int(begins[longest]), int(ends[longest] - begins[longest])
