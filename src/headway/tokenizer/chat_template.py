"""Conversations, and how a chat template writes them as segments: plain text or a control token,
each a loss target or not.

    chatml, one turn    <|im_start|> "assistant\\n" | "Hello." <|im_end|> | "\\n"
                                no loss             |   loss (target)     | no loss

The built-in templates are the jinja files in chat_templates/. Text inside {% generation %} is
the assistant's and carries the loss. Invariant: while headway renders a built-in template, each
control token is one private character that no text of the conversation holds, so text that a
person typed never becomes a control token. For export the same source spells the tokens out.
`chat.py` finds a template by name and turns segments into ids and a loss mask.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer

Role = Literal["system", "user", "assistant", "tool"]
ROLES: tuple[Role, ...] = ("system", "user", "assistant", "tool")
FALLBACK_TEMPLATE = "chatml"
"""The chat template where the tokenizer brings none."""
FOLDER = Path(__file__).parent / "chat_templates"
ALL_PRIVATE = "".join(map(chr, range(0xE000, 0xF900)))
"""Unicode's private use area: characters without a meaning, which texts hardly ever hold."""
PRIVATE = re.compile(f"[{ALL_PRIVATE[0]}-{ALL_PRIVATE[-1]}]")
GENERATION_TAG = re.compile(r"\{%- (?:end)?generation -%\}")
"""As the built-in templates write it."""


@dataclass(frozen=True)
class Call:
    """A tool the assistant calls."""

    name: str
    arguments: Any


@dataclass(frozen=True)
class Turn:
    """What one speaker says."""

    role: Role
    content: str
    context: str = ""
    """Material an instruction refers to (Alpaca's `input`); templates without a section for it
    write it below the content."""
    calls: tuple[Call, ...] = ()
    learn: bool = True
    """False: an assistant turn that is context only and carries no loss."""


class ControlToken(NamedTuple):
    """A special token: by its spelling, or by its role (`bos`, `eos`) in the tokenizer.

    An optional one is left out where the tokenizer lacks it; any other is an error then.
    """

    spelling: str = ""
    role: Literal["", "bos", "eos"] = ""
    optional: bool = False


class ContinuedText(NamedTuple):
    """Text that continues the text before it: a sentencepiece tokenizer adds no space in front."""

    text: str


class Segment(NamedTuple):
    """A stretch of text or one special token, and whether it is a loss target."""

    part: str | ControlToken | ContinuedText
    target: bool = False


class ChatTemplate(Protocol):
    """Writes conversations as segments."""

    @property
    def name(self) -> str:
        """What `--template` calls it."""
        ...

    @property
    def cache_key(self) -> str:
        """What decides how it writes; part of the key of cached token stores."""
        ...

    def segments(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """A whole conversation, for training."""
        ...

    def prompt(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """A conversation up to where the assistant's next answer begins, for generation."""
        ...

    def export(self, tokenizer: Tokenizer) -> str | None:
        """The template as jinja for a tokenizer folder; None where no text is read back as its
        tokens.
        """
        ...


@dataclass(frozen=True, eq=False)
class BuiltInTemplate:
    """A template of headway: a jinja source in which each of `controls` is a variable."""

    name: str
    controls: Mapping[str, ControlToken | ContinuedText]
    file: str = ""
    is_text: bool = True
    """False: the tokenizer reads no text as its control tokens, so jinja, which writes text, cannot
    express it and it is not exported."""
    has_input_section: bool = False
    """The template writes the context of a turn itself."""

    def segments(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """A whole conversation, for training."""
        return self._write(turns, tools, prompt=False)

    def prompt(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """A conversation up to where the assistant's next answer begins, for generation."""
        return self._write(turns, tools, prompt=True)

    def export(self, tokenizer: Tokenizer) -> str | None:
        """The template as jinja with its tokens spelled out, without {% generation %}, which not
        every server knows.
        """
        if not self.is_text:
            return None

        lines = [
            f"{{%- set {variable} = {json.dumps(_spelled(part, tokenizer))} -%}}\n"
            for variable, part in self.controls.items()
        ]
        return "".join(lines) + GENERATION_TAG.sub("", self.source)

    @cached_property
    def source(self) -> str:
        """The jinja source."""
        return (FOLDER / f"{self.file or self.name}.jinja").read_text(encoding="utf-8")

    @property
    def cache_key(self) -> str:
        """The key that earlier versions gave the same template, or its source if it was changed
        since.

        Earlier versions had templates in Python, whose repr is in the keys of existing caches.
        cache_keys.json has, for each template, that key and the hash of the jinja source that
        writes the same text.
        """
        known = _known_keys().get(self.name, {})
        content = repr((self.source, dict(self.controls)))
        if known.get("sha256") == hashlib.sha256(content.encode()).hexdigest():
            return known["key"]
        return content

    @cached_property
    def _render(self) -> Callable[..., str]:
        from headway.tokenizer.jinja_sandbox import render, trusted_environment

        return partial(render, trusted_environment().from_string(self.source), self.name)

    def _write(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], prompt: bool
    ) -> list[Segment]:
        """Render with one private character for each control token and for the two edges of a loss
        region, then split the text at these characters.
        """
        start, end, *characters = unused_private_characters(turns, tools, 2 + len(self.controls))
        text = self._render(
            messages=[self._message(turn) for turn in turns],
            tools=tools,
            add_generation_prompt=prompt,
            generation_start=start,
            generation_end=end,
            **dict(zip(self.controls, characters, strict=True)),
        )

        parts = dict(zip(characters, self.controls.values(), strict=True))
        # {% generation %} encloses each answer in turn; a prompt carries no loss at all.
        learned = iter([turn.learn and not prompt for turn in turns if turn.role == "assistant"])
        segments: list[Segment] = []
        target = False
        for piece in _pattern(start, end, *characters).split(text):
            if (part := parts.get(piece)) is not None:
                segments.append(Segment(part, target))
            elif piece == start:
                target = next(learned)
            elif piece == end:
                target = False
            elif piece:
                segments.append(Segment(piece, target))

        return segments

    def _message(self, turn: Turn) -> dict[str, Any]:
        """A turn as the template sees it."""
        calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        if turn.context and not self.has_input_section:
            return {
                "role": turn.role,
                "content": f"{turn.content}\n{turn.context}",
                "tool_calls": calls,
            }

        return {
            "role": turn.role,
            "content": turn.content,
            "context": turn.context,
            "tool_calls": calls,
        }


@cache
def _pattern(*characters: str) -> re.Pattern[str]:
    """Splits a text at some characters; the group keeps them in the result."""
    return re.compile(f"([{''.join(characters)}])")


@cache
def _known_keys() -> dict[str, dict[str, str]]:
    return json.loads((FOLDER / "cache_keys.json").read_text(encoding="utf-8"))


def _spelled(part: ControlToken | ContinuedText, tokenizer: Tokenizer) -> str:
    if isinstance(part, ContinuedText):
        return part.text
    return part.spelling or tokenizer.roles.get(part.role, "")


def unused_private_characters(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], count: int, source: str = ""
) -> Sequence[str]:
    """Characters for private use that nothing in a conversation or template holds."""
    texts = [
        source,
        *(turn.content for turn in turns),
        *(turn.context for turn in turns if turn.context),
    ]
    calls = [[call.name, call.arguments] for turn in turns for call in turn.calls]
    if tools or calls:
        texts.append(json.dumps([list(tools), calls], ensure_ascii=False))

    # Most texts are ASCII, which has no private characters and is quickly recognised.
    used = {
        character for text in texts if not text.isascii() for character in PRIVATE.findall(text)
    }
    if used:
        return [
            character for character in ALL_PRIVATE[: count + len(used)] if character not in used
        ][:count]

    return ALL_PRIVATE[:count]


IM_START = ControlToken("<|im_start|>")
IM_END = ControlToken("<|im_end|>")
BOS = ControlToken(role="bos")
EOS = ControlToken(role="eos")

BUILT_IN: dict[str, ChatTemplate] = {
    template.name: template
    for template in (
        BuiltInTemplate("chatml", {"im_start": IM_START, "im_end": IM_END}),
        BuiltInTemplate("qwen", {"im_start": IM_START, "im_end": IM_END}),
        BuiltInTemplate(
            "llama3",
            {
                "begin_of_text": ControlToken("<|begin_of_text|>"),
                "start_header": ControlToken("<|start_header_id|>"),
                "end_header": ControlToken("<|end_header_id|>"),
                "eot": ControlToken("<|eot_id|>"),
            },
        ),
        BuiltInTemplate(
            "alpaca",
            {"bos_token": ControlToken(role="bos", optional=True), "eos_token": EOS},
            has_input_section=True,
        ),
        BuiltInTemplate(
            "internlm",
            {
                "bos_token": BOS,
                "eos_token": EOS,
                "eoh": ControlToken("<eoh>"),
                "eoa": ControlToken("<eoa>"),
                "line_break": ContinuedText("\n"),
            },
        ),
        # The ids that InternLM's tools/alpaca_tokenizer.py writes (103167, 103166, 13), as
        # V7_sft.model spells them.
        BuiltInTemplate(
            "internlm_alpaca",
            {
                "bos_token": BOS,
                "eos_token": EOS,
                "eoh": ControlToken("<TOKENS_UNUSED_140>"),
                "eoa": ControlToken("<TOKENS_UNUSED_139>"),
                "line_break": ControlToken("<0x0A>"),
            },
            file="internlm",
            is_text=False,
        ),
        BuiltInTemplate(
            "zero2all",
            {
                "begin_of_text": ControlToken("<|beginoftext|>"),
                "im_start": IM_START,
                "role_end": ControlToken("<|role_end|>"),
                "im_end": IM_END,
            },
        ),
    )
}
