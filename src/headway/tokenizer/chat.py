"""Conversations to ids with a loss mask: exactly the assistant's tokens, and the token that ends them, are targets.

In: turns, a template (see `templates`), a tokenizer. Out: `Rendered(ids, mask)`, mask True where the token is a target.
Invariant: text pieces are encoded without special tokens, split where the loss begins and ends, so that a prompt for generation has the
very ids the training example has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError, DataError
from headway.tokenizer.load import Tokenizer
from headway.tokenizer.templates import BUILT_IN, Call, Glued, Part, Piece, Role, Template, Token, Turn

__all__ = [
    "Call",
    "Piece",
    "Rendered",
    "Role",
    "Template",
    "Turn",
    "answer_end",
    "find_template",
    "render",
    "render_pieces",
    "render_prompt",
]

OWN = "tokenizer"


class Rendered(NamedTuple):
    """A conversation as tokens."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """True: this token is a loss target."""


def find_template(name: str, tokenizer: Tokenizer) -> Template:
    """A template by name: one of headway's own, `tokenizer` for the tokenizer's jinja template, or the path of a .jinja file."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    from headway.tokenizer.jinja_template import JinjaTemplate

    if name == OWN:
        if tokenizer.chat_template is None:
            raise ConfigError(f"template is {OWN!r}, but the tokenizer has no chat template; choose one of {', '.join(BUILT_IN)}.")
        return JinjaTemplate.of(name, tokenizer.chat_template, tokenizer)
    path = Path(name)
    if path.suffix in (".jinja", ".jinja2", ".j2") and path.is_file():
        return JinjaTemplate.of(name, path.read_text(encoding="utf-8"), tokenizer)
    raise ConfigError(f"template is {name!r}; it must be one of {', '.join(BUILT_IN)}, {OWN!r} for the tokenizer's own, or a .jinja file.")


def render(turns: Sequence[Turn], template: Template | str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> Rendered:
    """A whole conversation as ids and loss mask."""
    found = find_template(template, tokenizer) if isinstance(template, str) else template
    return _only(render_pieces([found.pieces(turns, tools)], found.name, tokenizer))


def render_prompt(
    turns: Sequence[Turn], template: Template | str, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()
) -> list[int]:
    """The ids of a conversation up to where the assistant's next answer begins."""
    found = find_template(template, tokenizer) if isinstance(template, str) else template
    return _only(render_pieces([found.prompt(turns, tools)], found.name, tokenizer)).ids.tolist()


def answer_end(template: Template | str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The id that ends an answer in a template, as a tuple; empty where the template ends answers with nothing."""
    found = find_template(template, tokenizer) if isinstance(template, str) else template
    targets = [piece for piece in found.pieces([Turn("user", "question"), Turn("assistant", "answer")]) if piece.target]
    ends = [piece for piece in targets if isinstance(piece.part, Token)] or targets
    rendered = render_pieces([[Piece(ends[-1].part, True)]], found.name, tokenizer)[0]
    return () if isinstance(rendered, DataError) or not len(rendered.ids) else (int(rendered.ids[-1]),)


def render_pieces(many: Sequence[Sequence[Piece]], name: str, tokenizer: Tokenizer, threads: bool = True) -> list[Rendered | DataError]:
    """Many conversations as ids and masks, encoded together; one whose text cannot be told from control tokens yields its error."""
    runs = [list(_runs(pieces)) for pieces in many]
    # Headers recur in every turn: each text is encoded once.
    texts = list(dict.fromkeys(part for one in runs for part, _ in one if isinstance(part, str)))
    encoded = tokenizer.encode_batch(texts) if threads else [ids for text in texts for ids in tokenizer.encode_batch([text])]
    ids: dict[Part, list[int]] = dict(zip(texts, encoded, strict=True))
    ids |= {part: _others(part, name, tokenizer) for one in runs for part, _ in one if not isinstance(part, str)}
    return [_assemble(one, ids, name, tokenizer) for one in runs]


def _only(found: list[Rendered | DataError]) -> Rendered:
    if isinstance(found[0], DataError):
        raise found[0]
    return found[0]


def _assemble(runs: list[tuple[Part, bool]], ids: Mapping[Part, list[int]], name: str, tokenizer: Tokenizer) -> Rendered | DataError:
    controls = {number for part, _ in runs if isinstance(part, Token) for number in ids[part]}
    for part, _ in runs:
        if isinstance(part, str) and not controls.isdisjoint(ids[part]):
            spelled = tokenizer.decode([next(number for number in ids[part] if number in controls)])
            return DataError(f"the text holds {spelled!r}, which this tokenizer reads as a control token of template {name}. Remove it.")
    mask = np.repeat(np.array([target for _, target in runs], dtype=np.bool_), [len(ids[part]) for part, _ in runs])
    return Rendered(np.array([number for part, _ in runs for number in ids[part]], dtype=np.int64), mask)


def _others(part: Part, name: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of what is not plain text."""
    if isinstance(part, Glued):
        return _continued(part.text, tokenizer)
    assert isinstance(part, Token)
    number = _special(part, name, tokenizer)
    return [] if number is None else [number]


def _runs(pieces: Sequence[Piece]) -> Iterator[tuple[Part, bool]]:
    """Pieces with neighbouring texts joined, because a tokenizer reads a text as a whole; never across the edge of the loss."""
    for (is_text, target), group in groupby(pieces, key=lambda piece: (isinstance(piece.part, str), piece.target)):
        if is_text:
            text = "".join(str(piece.part) for piece in group)
            if text:
                yield text, target
        else:
            yield from ((piece.part, target) for piece in group)


def _special(token: Token, template: str, tokenizer: Tokenizer) -> int | None:
    if token.role:
        number = tokenizer.bos_id if token.role == "bos" else tokenizer.eos_id
        spelled = f"{token.role} token"
    else:
        number, spelled = tokenizer.token_to_id(token.spelling), f"token {token.spelling!r}"
    if number is None and not token.optional:
        have = ", ".join(list(tokenizer.special_tokens)[:12]) or "none"
        raise ConfigError(f"template {template} needs the {spelled}, which the tokenizer lacks (it has {have}). Choose another template.")
    return number


def _continued(text: str, tokenizer: Tokenizer) -> list[int]:
    before, both = tokenizer.encode_batch(["x", "x" + text])
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode_batch([text])[0]
