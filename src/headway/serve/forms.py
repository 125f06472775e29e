"""Answers in OpenAI's shapes: choices and their pieces come in; JSON objects and server-sent events go out.

The text of an event is put together from parts that are made once per choice: a stream of tens of thousands of tokens per second leaves a
few microseconds for each.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Sequence
from typing import Any

from headway.serve.choice import Choice, ChoicePiece, chat_logprobs, text_logprobs
from headway.serve.served_model import ServedModel
from headway.serve.tool_calls import ToolCall

ENCODE = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
DONE = b"data: [DONE]\n\n"


def usage(choices: Sequence[Choice], prompt_tokens: int) -> dict[str, Any]:
    """How many tokens a request took; a prompt with several samples counts once."""
    made = sum(one.num_tokens for one in choices)
    cached = sum(one.stream.cached for one in choices if one.sample == 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": made,
        "total_tokens": prompt_tokens + made,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class AnswerForm:
    """What chat and text completions have in common."""

    object_name = ""
    chunk_name = ""
    prefix = ""

    def __init__(self, model: ServedModel, include_usage: bool, wants_logprobs: bool) -> None:
        self.model, self.include_usage, self.wants_logprobs = model, include_usage, wants_logprobs
        self.id = f"{self.prefix}-{secrets.token_hex(14)}"
        self.created = int(time.time())
        self._head = f'data: {{"id":"{self.id}","object":"{self.chunk_name}","created":{self.created},"model":{ENCODE(model.name)},'
        self._end = ',"usage":null}\n\n' if include_usage else "}\n\n"

    def whole(self, choices: Sequence[dict[str, Any]], used: dict[str, Any]) -> dict[str, Any]:
        """The object of an answer that is not streamed."""
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model.name,
            "choices": list(choices),
            "usage": used,
        }

    def usage_event(self, used: dict[str, Any]) -> bytes:
        """The last event of a stream that was asked for the number of tokens."""
        return f'{self._head}"choices":[],"usage":{ENCODE(used)}}}\n\n'.encode()

    def begin(self, choice: Choice) -> bytes:
        """The first event of a choice."""
        raise NotImplementedError

    def events(self, choice: Choice, piece: ChoicePiece) -> bytes:
        """A piece of an answer as events."""
        raise NotImplementedError

    def collect(self, choice: Choice, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """All pieces of an answer as one choice."""
        raise NotImplementedError


class ChatForm(AnswerForm):
    """/v1/chat/completions."""

    object_name, chunk_name, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def begin(self, choice: Choice) -> bytes:
        """The role, before any text."""
        return self._event(choice, '{"role":"assistant","content":""}', "null", "null")

    def events(self, choice: Choice, piece: ChoicePiece) -> bytes:
        """Text, calls and the reason of the end."""
        reason = "null" if choice.finish is None else f'"{choice.finish}"'
        found = (
            ENCODE(chat_logprobs(self.model.tokenizer, piece.logprobs))
            if self.wants_logprobs and piece.logprobs
            else "null"
        )
        if not piece.calls:
            if choice.finish is None:
                return (
                    self._event(choice, f'{{"content":{ENCODE(piece.text)}}}', found, "null")
                    if piece.text or found != "null"
                    else b""
                )
            # clients expect the reason in an event of its own, with nothing in its delta
            said = (
                self._event(choice, f'{{"content":{ENCODE(piece.text)}}}', found, "null")
                if piece.text or found != "null"
                else b""
            )
            return said + self._event(choice, "{}", "null", reason)
        first = choice.call_number - len(piece.calls)
        said = (
            self._event(choice, f'{{"content":{ENCODE(piece.text)}}}', found, "null")
            if piece.text
            else b""
        )
        calls = ENCODE([call.as_json(first + at) for at, call in enumerate(piece.calls)])
        called = self._event(choice, f'{{"tool_calls":{calls}}}', "null", "null")
        return (
            said
            + called
            + (self._event(choice, "{}", "null", reason) if choice.finish is not None else b"")
        )

    def _event(self, choice: Choice, delta: str, logprobs: str, reason: str) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{choice.index},"delta":{delta},"logprobs":{logprobs},"finish_reason":{reason}}}]{self._end}'
        ).encode()

    def collect(self, choice: Choice, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The message of an answer."""
        text = "".join(piece.text for piece in pieces)
        calls: list[ToolCall] = [call for piece in pieces for call in piece.calls]
        logprobs = [one for piece in pieces for one in piece.logprobs]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text if text or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [call.as_json() for call in calls]
        return {
            "index": choice.index,
            "message": message,
            "logprobs": chat_logprobs(self.model.tokenizer, logprobs)
            if self.wants_logprobs
            else None,
            "finish_reason": choice.finish,
        }


class TextForm(AnswerForm):
    """/v1/completions."""

    object_name, chunk_name, prefix = "text_completion", "text_completion", "cmpl"

    def begin(self, choice: Choice) -> bytes:
        """The prompt, where the answer repeats it; else nothing: a text has no role."""
        return b"" if not choice.echo else self._event(choice, choice.echo, "null", "null")

    def events(self, choice: Choice, piece: ChoicePiece) -> bytes:
        """Text and the reason of the end."""
        reason = "null" if choice.finish is None else f'"{choice.finish}"'
        found = self._logprobs(choice, piece)
        if not piece.text and reason == "null" and found is None:
            return b""
        return self._event(choice, piece.text, "null" if found is None else ENCODE(found), reason)

    def _event(self, choice: Choice, text: str, logprobs: str, reason: str) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{choice.index},"text":{ENCODE(text)},"logprobs":{logprobs},"finish_reason":{reason}}}]'
            f"{self._end}"
        ).encode()

    def _logprobs(self, choice: Choice, piece: ChoicePiece) -> dict[str, Any] | None:
        if not self.wants_logprobs:
            return None
        found = list(piece.logprobs)
        if choice.stream.prompt_logprobs is not None:
            given, choice.stream.prompt_logprobs = choice.stream.prompt_logprobs, None
            # nothing precedes the first token, so it has no probability
            found = [
                (token, None, ()) if one is None else one
                for token, one in zip(choice.prompt, given, strict=True)
            ] + found
        if not found:
            return None
        assert choice.offsets is not None
        return text_logprobs(self.model.tokenizer, found, choice.offsets)

    def collect(self, choice: Choice, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The text of an answer."""
        text = choice.echo + "".join(piece.text for piece in pieces)
        joined = ChoicePiece(text, [], [one for piece in pieces for one in piece.logprobs])
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, joined),
            "finish_reason": choice.finish,
        }
