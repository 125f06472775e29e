"""Answers in OpenAI's shapes: choices and their pieces come in; JSON objects and server-sent events
go out.

    data: {"id":...,"model":...,     "choices":[{"index":0,"delta":{...},...}]     }\n\n
    _head, once per request          _event, per piece                             _end, per request

The text of an event is put together from parts that are made once: a stream of tens of thousands of
tokens per second leaves a few microseconds for each.
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
    generated = sum(choice.num_tokens for choice in choices)
    cached = sum(choice.stream.cached for choice in choices if choice.sample == 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class AnswerForm:
    """What chat and text completions have in common: the object of an answer, and the events of a
    stream.
    """

    object_name = ""
    chunk_name = ""
    prefix = ""

    def __init__(self, model: ServedModel, include_usage: bool, wants_logprobs: bool) -> None:
        self.model = model
        self.include_usage = include_usage
        self.wants_logprobs = wants_logprobs
        self.id = f"{self.prefix}-{secrets.token_hex(14)}"
        self.created = int(time.time())
        self._head = (
            f'data: {{"id":"{self.id}","object":"{self.chunk_name}","created":{self.created},'
            f'"model":{ENCODE(model.name)},'
        )
        self._end = "}\n\n"
        if include_usage:
            # OpenAI: with include_usage every event has the key, and the last one its value.
            self._end = ',"usage":null}\n\n'

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
    """Answers of /v1/chat/completions: a message, or its deltas."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    prefix = "chatcmpl"

    def begin(self, choice: Choice) -> bytes:
        """The role, before any text."""
        return self._event(choice, '{"role":"assistant","content":""}', "null", "null")

    def events(self, choice: Choice, piece: ChoicePiece) -> bytes:
        """Text, calls and the reason of the end."""
        logprobs = "null"
        if self.wants_logprobs and piece.logprobs:
            logprobs = ENCODE(chat_logprobs(self.model.tokenizer, piece.logprobs))

        events = b""
        # Log-probabilities without text (a token inside a character) get an event, too. Beside
        # calls they do not: their tokens are no text.
        if piece.text or (logprobs != "null" and not piece.calls):
            delta = f'{{"content":{ENCODE(piece.text)}}}'
            events += self._event(choice, delta, logprobs, "null")

        if piece.calls:
            first = choice.call_number - len(piece.calls)
            calls = ENCODE(
                [call.as_json(first + offset) for offset, call in enumerate(piece.calls)]
            )
            events += self._event(choice, f'{{"tool_calls":{calls}}}', "null", "null")

        # Clients expect the reason in an event of its own, with nothing in its delta.
        if choice.finish is not None:
            events += self._event(choice, "{}", "null", f'"{choice.finish}"')
        return events

    def _event(self, choice: Choice, delta: str, logprobs: str, reason: str) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{choice.index},"delta":{delta},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{self._end}'
        ).encode()

    def collect(self, choice: Choice, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The message of an answer."""
        text = "".join(piece.text for piece in pieces)
        calls: list[ToolCall] = [call for piece in pieces for call in piece.calls]
        logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            # OpenAI: an answer that only calls tools has no content.
            message["content"] = text or None
            message["tool_calls"] = [call.as_json() for call in calls]

        reported = None
        if self.wants_logprobs:
            reported = chat_logprobs(self.model.tokenizer, logprobs)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": reported,
            "finish_reason": choice.finish,
        }


class TextForm(AnswerForm):
    """Answers of /v1/completions: a text, or its parts."""

    object_name = "text_completion"
    chunk_name = "text_completion"
    prefix = "cmpl"

    def begin(self, choice: Choice) -> bytes:
        """The prompt, where the answer repeats it; else nothing: a text has no role."""
        if not choice.echo:
            return b""
        return self._event(choice, choice.echo, "null", "null")

    def events(self, choice: Choice, piece: ChoicePiece) -> bytes:
        """Text and the reason of the end."""
        reason = "null"
        if choice.finish is not None:
            reason = f'"{choice.finish}"'
        logprobs = self._logprobs(choice, piece)
        if not piece.text and reason == "null" and logprobs is None:
            return b""
        return self._event(
            choice, piece.text, "null" if logprobs is None else ENCODE(logprobs), reason
        )

    def _event(self, choice: Choice, text: str, logprobs: str, reason: str) -> bytes:
        return (
            f'{self._head}"choices":[{{"index":{choice.index},"text":{ENCODE(text)},'
            f'"logprobs":{logprobs},"finish_reason":{reason}}}]{self._end}'
        ).encode()

    def _logprobs(self, choice: Choice, piece: ChoicePiece) -> dict[str, Any] | None:
        """Log-probabilities of a piece; with the first one, those of the prompt, if asked for."""
        if not self.wants_logprobs:
            return None

        logprobs = list(piece.logprobs)
        stream = choice.stream
        if stream.prompt_logprobs is not None:
            prompt_logprobs: list[Any] = []
            for token, logprob in zip(choice.prompt, stream.prompt_logprobs, strict=True):
                # Nothing precedes the first token, so it has no probability.
                prompt_logprobs.append((token, None, ()) if logprob is None else logprob)
            stream.prompt_logprobs = None
            logprobs = prompt_logprobs + logprobs

        if not logprobs:
            return None

        assert choice.offsets is not None
        return text_logprobs(self.model.tokenizer, logprobs, choice.offsets)

    def collect(self, choice: Choice, pieces: Sequence[ChoicePiece]) -> dict[str, Any]:
        """The text of an answer."""
        text = choice.echo + "".join(piece.text for piece in pieces)
        joined = ChoicePiece(text, [], [logprob for piece in pieces for logprob in piece.logprobs])
        return {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, joined),
            "finish_reason": choice.finish,
        }
