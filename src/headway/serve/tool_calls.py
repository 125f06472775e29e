"""Calls of tools in an answer: text comes in piece by piece; text for the reader and whole calls go
out.

    tags     <tool_call>{"name": "f", "arguments": {}}</tool_call>
             ChatML, Qwen, Hermes: calls stand between text
    whole    {"name": "f", "parameters": {}}, or a list of them
             Llama 3, Mistral: the answer is the call

The format is that of the chat template. What does not parse as a call stays text: nothing of an
answer is lost.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, cast

ToolFormat = Literal["tags", "whole"]
OPEN = "<tool_call>"
CLOSE = "</tool_call>"
MAX_CALLS = 128
"""Of one list of calls."""


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer; the arguments are JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's object; with an index in a stream."""
        body = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        if index is None:
            return body
        return {"index": index, **body}


def tool_format(template_source: str) -> ToolFormat | None:
    """How a template writes calls; None where that is not known."""
    if OPEN in template_source:
        return "tags"
    if (
        "<|python_tag|>" in template_source
        or "[TOOL_CALLS]" in template_source
        or '"parameters": ' in template_source
    ):
        return "whole"
    return None


def parse_call(text: str) -> list[ToolCall] | None:
    """The calls that a text of JSON stands for; None where it is no call."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None

    entries = [value]
    if isinstance(value, list):
        entries = cast(list[Any], value)

    calls: list[ToolCall] = []
    for entry in entries[:MAX_CALLS]:
        if not isinstance(entry, dict):
            return None

        call = cast(dict[str, Any], entry)
        name = call.get("name")
        # ChatML's templates write `arguments`, Llama 3's `parameters`.
        arguments = call.get("arguments", call.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, (dict, str)):
            return None

        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(name, arguments))

    return calls or None


class ToolCallReader:
    """Separates the text and the calls of one answer.

    Text that may still become a call is buffered: a client cannot take back what it has shown.
    """

    def __init__(self, form: ToolFormat) -> None:
        self.form = form
        self._buffer = ""
        self._has_text = False
        self.num_calls = 0

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain to be no call, and the calls that are complete."""
        self._buffer += text
        if self.form == "tags":
            return self._tagged()

        # The first character that is no space decides: a whole answer is JSON or text.
        begun = self._buffer.lstrip()
        if not self._has_text and (not begun or begun[0] in "{["):
            return "", []
        self._has_text = True
        visible = self._buffer
        self._buffer = ""
        return visible, []

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end of the answer."""
        last_text = self._buffer
        self._buffer = ""

        calls = None
        if self.form == "whole" and last_text.strip():
            calls = parse_call(last_text)
        elif self.form == "tags" and last_text.lstrip().startswith(OPEN):
            # The model ended the answer in place of the closing tag.
            calls = parse_call(last_text.lstrip()[len(OPEN) :])
        if calls is not None:
            self.num_calls += len(calls)
            return "", calls

        # Line breaks behind a call are no text.
        if self.num_calls and not last_text.strip():
            last_text = ""
        return last_text, []

    def _tagged(self) -> tuple[str, list[ToolCall]]:
        """Take text and complete calls from the buffer, up to a tag that is still open."""
        visible: list[str] = []
        calls: list[ToolCall] = []
        while True:
            start = self._buffer.find(OPEN)
            if start < 0:
                certain = len(self._buffer) - self._possible_tag()
                visible.append(self._buffer[:certain])
                self._buffer = self._buffer[certain:]
                break

            before = self._buffer[:start]
            end = self._buffer.find(CLOSE, start)
            # The call is not complete yet; what stands before it is.
            if end < 0:
                visible.append(_before_call(before))
                self._buffer = self._buffer[start:]
                break

            tagged = self._buffer[start : end + len(CLOSE)]
            parsed = parse_call(self._buffer[start + len(OPEN) : end])
            self._buffer = self._buffer[end + len(CLOSE) :]
            # Not a call after all: the client gets the tags as the model wrote them.
            if parsed is None:
                visible.append(before + tagged)
                continue

            visible.append(_before_call(before))
            calls += parsed

        self.num_calls += len(calls)
        return "".join(visible), calls

    def _possible_tag(self) -> int:
        """How many last characters may become a tag; line breaks before one are part of it."""
        buffer = self._buffer
        size = min(len(OPEN) - 1, len(buffer))
        while not buffer.endswith(OPEN[:size]):
            size -= 1
        text = buffer[: len(buffer) - size]
        num_breaks = len(text) - len(text.rstrip("\n"))
        return size + num_breaks


def _before_call(text: str) -> str:
    """Text before a call, without the line breaks that templates put between them."""
    if not text.strip():
        return ""
    return text.rstrip("\n")
