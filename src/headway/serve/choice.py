"""One answer as it grows: ids that arrived come in; text, tool calls and log-probabilities for the client go out.

An answer ends with the engine's request, at a stop text, or after one tool call where only one is wanted; then the engine's request is
cancelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from headway.infer.engine.text import RequestText
from headway.serve.engine_client import RequestStream
from headway.serve.tool_calls import ToolCall, ToolCallReader
from headway.tokenizer.load import Tokenizer

REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}


class ChoicePiece(NamedTuple):
    """What an answer gained."""

    text: str
    calls: list[ToolCall]
    logprobs: list[Any]


class Choice:
    """One answer of a request."""

    __slots__ = (
        "_one_call", "_reader", "_text", "call_number", "echo", "finish", "index", "is_begun", "num_tokens", "offset", "prompt", "stream",
        "was_cut",
    )  # fmt: skip

    def __init__(
        self, index: int, stream: RequestStream, text: RequestText, reader: ToolCallReader | None = None, *, one_call: bool = False
    ) -> None:
        self.index, self.stream, self._text, self._reader, self._one_call = index, stream, text, reader, one_call
        self.finish: str | None = None
        """OpenAI's reason of its end."""
        self.was_cut = False
        """It ended before the engine's request did."""
        self.num_tokens = 0
        self.is_begun = False
        self.call_number = 0
        self.offset = 0
        """Characters so far, for the offsets of log-probabilities."""
        self.echo = ""
        self.prompt: Sequence[int] = ()
        """The prompt's ids, where their log-probabilities are reported."""

    def take(self) -> ChoicePiece | None:
        """What arrived since the last call; None if nothing did or the answer has ended."""
        stream = self.stream
        if self.finish is not None or not (stream.tokens or stream.finished is not None):
            return None
        tokens, logprobs = stream.take()
        text = self._text.add(tokens)
        self.num_tokens += len(tokens)
        if self._text.stopped:
            logprobs = logprobs[: len(logprobs) - max(0, self.num_tokens - self._text.num_tokens)]
            self.num_tokens = self._text.num_tokens
            self.finish, self.was_cut = "stop", stream.finished is None
        elif stream.finished is not None:
            text += self._text.finish()
            self.finish = REASONS.get(stream.finished, stream.finished) if not self._text.stopped else "stop"
            if stream.finished in ("eos", "stop") and logprobs:
                logprobs = logprobs[:-1]  # the end token is no part of the text
        return self._with_calls(text, logprobs)

    def _with_calls(self, text: str, logprobs: list[Any]) -> ChoicePiece:
        reader = self._reader
        if reader is None:
            return ChoicePiece(text, [], logprobs)
        said, calls = reader.add(text)
        if self.finish is not None:
            rest, more = reader.finish()
            said, calls = said + rest, calls + more
        if self._one_call and calls:
            calls = calls[: 1 - self.call_number]
            self.was_cut = self.finish is None
            self.finish = "tool_calls"
        self.call_number += len(calls)
        if self.finish == "stop" and self.call_number:
            self.finish = "tool_calls"
        return ChoicePiece(said, calls, logprobs)


def chat_logprobs(tokenizer: Tokenizer, found: Sequence[Any]) -> dict[str, Any]:
    """Log-probabilities as chat completions have them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.decode_bytes([token])
        return {"token": spelled.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(spelled)}

    return {
        "content": [{**one(token, value), "top_logprobs": [one(*each) for each in top]} for token, value, top in found],
        "refusal": None,
    }


def text_logprobs(tokenizer: Tokenizer, found: Sequence[Any], offset: int) -> dict[str, Any]:
    """Log-probabilities as text completions have them; the first token of a prompt has none."""
    tokens: list[str] = []
    offsets: list[int] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, value, top in found:
        spelled = tokenizer.decode([token])
        tokens.append(spelled)
        offsets.append(offset)
        offset += len(spelled)
        values.append(None if value is None else max(value, -9999.0))
        tops.append({tokenizer.decode([each]): max(likely, -9999.0) for each, likely in top} if value is not None else None)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
