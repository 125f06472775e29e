"""One answer as it grows: ids that arrived come in; text, tool calls and log-probabilities for the
client go out.

An answer ends with the engine's request, at a stop text, or after one tool call where only one is
wanted; then the engine's request is cancelled.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from headway.infer.engine.text import RequestText
from headway.serve.engine_client import RequestStream
from headway.serve.tool_calls import ToolCall, ToolCallReader
from headway.tokenizer.load import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for -inf, as in OpenAI's answers."""
REASONS = {
    "eos": "stop",
    "stop": "stop",
    "grammar": "stop",
    "length": "length",
    "context": "length",
}


class ChoicePiece(NamedTuple):
    """What an answer gained since the last look: text for the client, whole calls,
    log-probabilities.
    """

    text: str
    calls: list[ToolCall]
    logprobs: list[Any]


class Choice:
    """One answer of a request: the engine's stream of ids, and the text and calls made of it so
    far.
    """

    __slots__ = (
        "_one_call",
        "_reader",
        "_special_ids",
        "_text",
        "call_number",
        "echo",
        "finish",
        "index",
        "is_begun",
        "num_tokens",
        "offsets",
        "prompt",
        "sample",
        "stream",
        "was_cut",
    )

    def __init__(
        self,
        index: int,
        stream: RequestStream,
        text: RequestText,
        reader: ToolCallReader | None = None,
        *,
        one_call: bool = False,
        special_ids: Collection[int] = (),
    ) -> None:
        self.index = index
        self.stream = stream
        self._text = text
        self._reader = reader
        self._one_call = one_call
        self._special_ids = special_ids
        """Tokens that are no part of the text."""
        self.sample = 0
        """Its number among the answers to the same prompt."""
        self.finish: str | None = None
        """OpenAI's reason of its end."""
        self.was_cut = False
        """It ended before the engine's request did."""
        self.num_tokens = 0
        self.is_begun = False
        self.call_number = 0
        self.offsets: TokenOffsets | None = None
        """Where tokens stand in the text, for log-probabilities."""
        self.echo = ""
        self.prompt: Sequence[int] = ()
        """The prompt's ids, where their log-probabilities are reported."""

    def take(self) -> ChoicePiece | None:
        """What arrived since the last call; None if nothing did or the answer has ended."""
        stream = self.stream
        if self.finish is not None or not (stream.tokens or stream.finished is not None):
            return None

        # The text may lag behind the tokens: the end of it may be a part of a character or of a
        # stop text.
        tokens, logprobs = stream.take()
        text = self._text.add(tokens)
        self.num_tokens += len(tokens)
        if self._text.stopped:
            # Tokens behind the stop text arrived with it; they are no part of the answer.
            surplus = max(0, self.num_tokens - self._text.num_tokens)
            logprobs = logprobs[: len(logprobs) - surplus]
            self.num_tokens = self._text.num_tokens
            self.finish = "stop"
            self.was_cut = stream.finished is None
        elif stream.finished is not None:
            # The text that was kept back may hold a stop text after all.
            text += self._text.finish()
            self.finish = REASONS.get(stream.finished, stream.finished)
            if self._text.stopped:
                self.finish = "stop"

            # A grammar ends an answer after a token of its text; an end token is no part of it.
            if (
                stream.finished in ("eos", "stop")
                and logprobs
                and logprobs[-1][0] in self._special_ids
            ):
                logprobs = logprobs[:-1]

        return self._with_calls(text, logprobs)

    def _with_calls(self, text: str, logprobs: list[Any]) -> ChoicePiece:
        """A piece with the calls of tools taken out of its text."""
        reader = self._reader
        if reader is None:
            return ChoicePiece(text, [], logprobs)

        visible_text, calls = reader.add(text)
        if self.finish is not None:
            last_text, last_calls = reader.finish()
            visible_text += last_text
            calls = calls + last_calls

        if self._one_call and calls:
            # parallel_tool_calls: false. The first call ends the answer, whatever would follow.
            calls = calls[: 1 - self.call_number]
            self.was_cut = self.finish is None
            self.finish = "tool_calls"

        self.call_number += len(calls)
        # OpenAI's reason for an answer that ends with calls.
        if self.finish == "stop" and self.call_number:
            self.finish = "tool_calls"
        return ChoicePiece(visible_text, calls, logprobs)


class TokenOffsets:
    """How many characters of the text precede each token.

    A token inside a character has the offset of that character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_tail: Sequence[int] = ()) -> None:
        self._text = RequestText(tokenizer, prompt_tail)
        self._count = 0

    def next(self, token: int) -> int:
        """The offset of the next token."""
        offset = self._count
        self._count += len(self._text.add([token]))
        return offset


def _json_logprob(logprob: float) -> float:
    """JSON has no infinity: a token that cannot follow has OpenAI's -9999."""
    if math.isnan(logprob):
        return LEAST_LOGPROB
    return max(logprob, LEAST_LOGPROB)


def _spelled(tokenizer: Tokenizer, token: int) -> str:
    """A token as text, or as OpenAI spells the bytes of a part of a character: two tokens never
    look the same.
    """
    data = tokenizer.decode_bytes([token])
    try:
        return data.decode()
    except UnicodeDecodeError:
        # A key of `top_logprobs` is the token's text: two parts of characters must not become one.
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[Any]) -> dict[str, Any]:
    """Log-probabilities as chat completions have them, from (token, value, likely tokens)."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.decode_bytes([token])
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": _json_logprob(logprob),
            "bytes": list(spelled),
        }

    content: list[dict[str, Any]] = []
    for token, value, top in logprobs:
        likely = [entry(likely_token, logprob) for likely_token, logprob in top]
        content.append({**entry(token, value), "top_logprobs": likely})
    return {"content": content, "refusal": None}


def text_logprobs(
    tokenizer: Tokenizer, logprobs: Sequence[Any], offsets: TokenOffsets
) -> dict[str, Any]:
    """Log-probabilities as text completions have them; the first token of a prompt has none."""
    tokens: list[str] = []
    starts: list[int] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    for token, value, top in logprobs:
        tokens.append(_spelled(tokenizer, token))
        starts.append(offsets.next(token))
        if value is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_json_logprob(value))
        tops.append(
            {_spelled(tokenizer, likely): _json_logprob(logprob) for likely, logprob in top}
        )

    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": starts}
