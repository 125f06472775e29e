"""Conversations to ids with a loss mask: exactly the assistant's tokens, and the token that ends
them, are targets.

In: turns, a template (see `chat_template`), a tokenizer. Out: `Rendered(ids, mask)`, mask True
where the token is a target. Invariant: text is encoded without special tokens, and split where
the loss begins and ends, so that the ids of a prompt for generation are the ids of the training
example.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headway.errors import ConfigError, DataError, HeadwayError
from headway.tokenizer.chat_template import (
    BUILT_IN,
    FALLBACK_TEMPLATE,
    Call,
    ChatTemplate,
    ContinuedText,
    ControlToken,
    Role,
    Segment,
    Turn,
    unused_private_characters,
)
from headway.tokenizer.load import Tokenizer

__all__ = [
    "Call",
    "ChatTemplate",
    "Rendered",
    "Role",
    "Segment",
    "Turn",
    "answer_end",
    "bos_ids",
    "default_template",
    "encode_segments",
    "expected_bos_ids",
    "find_template",
    "prompt_segments",
    "render",
    "render_prompt",
]

TOKENIZER_TEMPLATE = "tokenizer"
"""The name of the template that the tokenizer brings."""
Part = str | ControlToken | ContinuedText


class Rendered(NamedTuple):
    """A conversation as tokens: ids [tokens] and loss mask [tokens]."""

    ids: npt.NDArray[np.int64]
    mask: npt.NDArray[np.bool_]
    """True: this token is a loss target."""


def default_template(tokenizer: Tokenizer | None) -> str:
    """The template of conversations for which none is named: the tokenizer's own where it has
    one.
    """
    if tokenizer is not None and tokenizer.chat_template is not None:
        return TOKENIZER_TEMPLATE
    return FALLBACK_TEMPLATE


def find_template(name: str, tokenizer: Tokenizer) -> ChatTemplate:
    """A template by name: a built-in one, `tokenizer` for the tokenizer's jinja template, or the
    path of a .jinja file.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]

    from headway.tokenizer.custom_template import CustomTemplate

    if name == TOKENIZER_TEMPLATE:
        if tokenizer.chat_template is None:
            raise ConfigError(
                f"template is {name!r}, but the tokenizer has no chat template; choose one of "
                f"{', '.join(BUILT_IN)}."
            )

        return CustomTemplate.of(name, tokenizer.chat_template, tokenizer)

    path = Path(name)
    if path.suffix in (".jinja", ".jinja2", ".j2") and path.is_file():
        return CustomTemplate.of(name, path.read_text(encoding="utf-8"), tokenizer)

    names = ", ".join(BUILT_IN)
    raise ConfigError(
        f"template is {name!r}; it must be one of {names}, 'tokenizer' for the tokenizer's, or a "
        ".jinja file."
    )


def render(
    turns: Sequence[Turn],
    template: ChatTemplate | str,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Rendered:
    """A whole conversation as ids and loss mask."""
    if isinstance(template, str):
        template = find_template(template, tokenizer)
    return _single(encode_segments([template.segments(turns, tools)], template.name, tokenizer))


def render_prompt(
    turns: Sequence[Turn],
    template: ChatTemplate | str,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    continues: bool = False,
) -> list[int]:
    """The ids of a conversation up to where the assistant's next answer begins; `continues`: up
    to the end of the words of its last one.
    """
    if isinstance(template, str):
        template = find_template(template, tokenizer)
    segments = prompt_segments(turns, template, tools, continues=continues)
    return _single(encode_segments([segments], template.name, tokenizer)).ids.tolist()


def prompt_segments(
    turns: Sequence[Turn],
    template: ChatTemplate,
    tools: Sequence[Mapping[str, Any]] = (),
    *,
    continues: bool = False,
) -> list[Segment]:
    """A conversation for generation. `continues`: its last turn is the beginning of the
    assistant's answer, and the model continues it.

    The beginning stands where training puts an answer: after what the template writes before it,
    without what ends it. Where a template does not say that (its loss mask is unclear), it
    stands after the generation prompt.
    """
    if not continues:
        return template.prompt(turns, tools)

    last = turns[-1]
    if last.role != "assistant" or last.calls:
        raise DataError(
            "the last turn is no text of the assistant, so there is nothing to continue."
        )

    if not last.content:
        return template.prompt(turns[:-1], tools)

    # A private character at the end of the words shows where the template ends them. Earlier
    # answers carry no loss, as in any prompt.
    mark = unused_private_characters(turns, tools, 1)[0]
    marked = [
        *(replace(turn, learn=False) for turn in turns[:-1]),
        replace(last, content=last.content + mark),
    ]
    try:
        whole = template.segments(marked, tools)
    except DataError:
        # The loss mask of this template is unclear, so it cannot say where an answer begins.
        whole = []

    segments: list[Segment] = []
    for part, target in whole:
        if isinstance(part, str) and mark in part:
            return [*segments, Segment(part[: part.index(mark)], target)]

        segments.append(Segment(part, target))

    return [*template.prompt(turns[:-1], tools), Segment(last.content, True)]


def answer_end(template: ChatTemplate | str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The id that ends an answer in a template, as a tuple; empty where the template ends
    answers with nothing.
    """
    if isinstance(template, str):
        template = find_template(template, tokenizer)

    # The last target of an example is what a model learns to end an answer with; the last control
    # token among the targets, where there is one.
    example = template.segments([Turn("user", "question"), Turn("assistant", "answer")])
    targets = [segment for segment in example if segment.target]
    ends = [segment for segment in targets if isinstance(segment.part, ControlToken)] or targets
    rendered = encode_segments([[Segment(ends[-1].part, True)]], template.name, tokenizer)[0]
    if isinstance(rendered, DataError) or not len(rendered.ids):
        return ()

    return (int(rendered.ids[-1]),)


def encode_segments(
    many: Sequence[Sequence[Segment]], name: str, tokenizer: Tokenizer, threads: bool = True
) -> list[Rendered | DataError]:
    """Many conversations as ids and masks, encoded together; one whose text holds control tokens
    yields its error.
    """
    runs = [list(_runs(pieces)) for pieces in many]
    # Headers recur in every turn: each text is encoded once.
    texts = list(
        dict.fromkeys(
            part for conversation in runs for part, _ in conversation if isinstance(part, str)
        )
    )

    # A batch would start threads for all cores in every worker process.
    if threads:
        encoded = tokenizer.encode_batch(texts)
    else:
        encoded = [_encode_on_one_core(text, tokenizer) for text in texts]

    ids: dict[Part, list[int]] = dict(zip(texts, encoded, strict=True))
    others = dict.fromkeys(
        part for conversation in runs for part, _ in conversation if not isinstance(part, str)
    )
    ids |= {part: _control_ids(part, name, tokenizer) for part in others}
    return [_assemble(conversation, ids, name, tokenizer) for conversation in runs]


def _encode_on_one_core(text: str, tokenizer: Tokenizer) -> list[int]:
    ids: list[int] = []
    for piece in tokenizer.pieces([text]):
        ids += tokenizer.encode_on_one_core(piece).tolist()
    return ids


def _single(rendered: list[Rendered | DataError]) -> Rendered:
    """The only conversation of a list, or its error raised."""
    if isinstance(rendered[0], DataError):
        raise rendered[0]
    return rendered[0]


def _assemble(
    runs: list[tuple[Part, bool]], ids: Mapping[Part, list[int]], name: str, tokenizer: Tokenizer
) -> Rendered | DataError:
    """The ids and mask of one conversation; `ids` has those of each part."""
    encoded = [ids[part] for part, _ in runs]

    # The tokenizer treats special tokens in texts as ordinary text. Some vocabularies have control
    # tokens as plain entries, though, and then a text could still become one.
    controls = {
        number
        for (part, _), part_ids in zip(runs, encoded, strict=True)
        if isinstance(part, ControlToken)
        for number in part_ids
    }

    for (part, _), part_ids in zip(runs, encoded, strict=True):
        if isinstance(part, str) and not controls.isdisjoint(part_ids):
            spelled = tokenizer.decode([next(number for number in part_ids if number in controls)])
            return DataError(
                f"the text holds {spelled!r}, which this tokenizer reads as a control token of "
                f"template {name}. Remove it."
            )

    mask = np.repeat(
        np.array([target for _, target in runs], dtype=np.bool_),
        [len(part_ids) for part_ids in encoded],
    )
    return Rendered(
        np.fromiter(chain.from_iterable(encoded), dtype=np.int64, count=len(mask)), mask
    )


def _control_ids(part: Part, name: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of what is not plain text."""
    if isinstance(part, ContinuedText):
        return _continued(part.text, tokenizer)
    assert isinstance(part, ControlToken)
    number = _special(part, name, tokenizer)
    if number is None:
        return []
    return [number]


def _runs(segments: Sequence[Segment]) -> Iterator[tuple[Part, bool]]:
    """Segments with neighbouring texts joined, because a tokenizer reads a text as a whole;
    never across the edge of the loss.
    """
    text = ""
    text_target = False
    for part, target in segments:
        is_text = isinstance(part, str)
        if text and not (is_text and target == text_target):
            yield text, text_target
            text = ""

        if is_text:
            text = text + part
            text_target = target
        else:
            yield part, target

    if text:
        yield text, text_target


def _special(token: ControlToken, template: str, tokenizer: Tokenizer) -> int | None:
    """The id of a control token; None for an optional one that the tokenizer lacks."""
    if token.role:
        number = tokenizer.bos_id if token.role == "bos" else tokenizer.eos_id
        spelled = f"{token.role} token"
    else:
        number = tokenizer.token_to_id(token.spelling)
        spelled = f"token {token.spelling!r}"

    if number is None and not token.optional:
        have = ", ".join(list(tokenizer.special_tokens)[:12]) or "none"
        raise ConfigError(
            f"template {template} needs the {spelled}, which the tokenizer lacks (it has {have}). "
            "Choose another template."
        )

    return number


def _continued(text: str, tokenizer: Tokenizer) -> list[int]:
    """The ids of a text after other text: what a letter and the text have more than the letter."""
    before, with_text = tokenizer.encode_batch(["x", "x" + text])
    if with_text[: len(before)] == before:
        return with_text[len(before) :]

    # The letter and the text became one token, so they cannot be separated.
    return tokenizer.encode_batch([text])[0]


def bos_ids(tokenizer: Tokenizer) -> list[int]:
    """The ids the tokenizer puts before every text."""
    if tokenizer.is_sentencepiece:
        if tokenizer.config.get("add_bos_token") and tokenizer.bos_id is not None:
            return [tokenizer.bos_id]
        return []

    # A tokenizer.json says what it adds in a post-processor of many forms. Encoding a letter with
    # and without it shows the result.
    bare = tokenizer.fast.encode("a", add_special_tokens=False).ids
    full = tokenizer.fast.encode("a", add_special_tokens=True).ids
    return next(
        full[:count] for count in range(len(full)) if full[count : count + len(bare)] == bare
    )


def expected_bos_ids(tokenizer: Tokenizer, bos: bool | None = None) -> list[int]:
    """The ids before a text for a model: its begin token (True), nothing (False), or what the
    model expects (None).

    A tokenizer may put its begin token there itself, as Llama's does. A chat model whose
    template begins with the begin token was never trained without it, whatever its tokenizer
    does: without it such a model scores any text as noise.
    """
    if bos is False:
        return []

    if bos:
        if tokenizer.bos_id is None:
            raise ConfigError(
                "--bos was given, but the model's tokenizer has no begin token. Remove --bos."
            )

        return [tokenizer.bos_id]

    return bos_ids(tokenizer) or _bos_of_chats(tokenizer)


def _bos_of_chats(tokenizer: Tokenizer) -> list[int]:
    """The begin token, if the tokenizer's chat template begins with it."""
    if tokenizer.chat_template is None or tokenizer.bos_id is None:
        return []
    try:
        first = render_prompt([Turn("user", "a")], TOKENIZER_TEMPLATE, tokenizer)[:1]
    except HeadwayError:
        # Rendering a conversation with this template reports the error.
        return []

    if first != [tokenizer.bos_id]:
        return []
    return first
