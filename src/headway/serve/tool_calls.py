"""Calls of tools in an answer: text comes in piece by piece; text for the reader and whole calls go out.

    tags     <tool_call>{"name": "f", "arguments": {}}</tool_call>      ChatML, Qwen, Hermes: calls stand between text
    whole    {"name": "f", "parameters": {}}, or a list of them         Llama 3, Mistral: the answer is the call

The format is that of the chat template. What does not parse as a call stays text: nothing of an answer is lost.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, field
from typing import Any, Literal, cast

ToolFormat = Literal["tags", "whole"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_CALLS = 128


@dataclass(frozen=True)
class ToolCall:
    """A call in an answer; the arguments are JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    def as_json(self, index: int | None = None) -> dict[str, Any]:
        """OpenAI's object; with an index in a stream."""
        found = {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }
        return found if index is None else {"index": index, **found}


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
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    listed = cast(list[Any], found) if isinstance(found, list) else [found]
    calls: list[ToolCall] = []
    for one in listed[:MAX_CALLS]:
        if not isinstance(one, dict):
            return None
        named = cast(dict[str, Any], one)
        arguments = named.get("arguments", named.get("parameters"))
        if not isinstance(named.get("name"), str) or not isinstance(arguments, (dict, str)):
            return None
        calls.append(
            ToolCall(
                named["name"],
                arguments
                if isinstance(arguments, str)
                else json.dumps(arguments, ensure_ascii=False),
            )
        )
    return calls or None


class ToolCallReader:
    """Separates the text and the calls of one answer."""

    def __init__(self, form: ToolFormat) -> None:
        self.form = form
        self._held = ""
        self._has_text = False
        self.num_calls = 0

    def add(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain to be no call, and the calls that are complete."""
        self._held += text
        if self.form == "whole":
            begun = self._held.lstrip()
            if self._has_text or (begun and begun[0] not in "{["):
                self._has_text = True
                said, self._held = self._held, ""
                return said, []
            return "", []
        return self._tagged()

    def finish(self) -> tuple[str, list[ToolCall]]:
        """What is left at the end of the answer."""
        rest, self._held = self._held, ""
        if self.form == "whole":
            calls = parse_call(rest) if rest.strip() else None
            if calls is not None:
                self.num_calls += len(calls)
                return "", calls
        elif (
            rest.lstrip().startswith(OPEN)
            and (calls := parse_call(rest.lstrip()[len(OPEN) :])) is not None
        ):
            self.num_calls += len(calls)  # the model ended the answer in place of the closing tag
            return "", calls
        return ("" if self.num_calls and not rest.strip() else rest), []

    def _tagged(self) -> tuple[str, list[ToolCall]]:
        said: list[str] = []
        calls: list[ToolCall] = []
        while True:
            at = self._held.find(OPEN)
            if at < 0:
                keep = self._beginning()
                said.append(self._held[: len(self._held) - keep])
                self._held = self._held[len(self._held) - keep :]
                break
            end = self._held.find(CLOSE, at)
            if end < 0:
                said.append(self._held[:at].rstrip("\n") if self._held[:at].strip() else "")
                self._held = self._held[at:]
                break
            found = parse_call(self._held[at + len(OPEN) : end])
            before, whole = self._held[:at], self._held[at : end + len(CLOSE)]
            self._held = self._held[end + len(CLOSE) :]
            if found is None:
                said.append(before + whole)
                continue
            said.append(before.rstrip("\n") if before.strip() else "")
            calls += found
        self.num_calls += len(calls)
        return "".join(said), calls

    def _beginning(self) -> int:
        """How many last characters may become a tag; line breaks before one are part of it."""
        held = self._held
        found = next(
            (
                size
                for size in range(min(len(OPEN) - 1, len(held)), 0, -1)
                if held.endswith(OPEN[:size])
            ),
            0,
        )
        rest = held[: len(held) - found]
        return found + len(rest) - len(rest.rstrip("\n"))
