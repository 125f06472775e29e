"""Fuzz target over the bodies of a server's requests: each is turned into ids or refused as one of OpenAI's errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from headway.serve.chat_request import read_chat
from headway.serve.engine_setup import EngineFacts
from headway.serve.limits import ServeLimits
from headway.serve.served_model import ServedModel
from headway.serve.text_request import read_completion, read_embedding
from headway.tokenizer.chat_template import BUILT_IN
from support.chat_tokenizer import byte_tokenizer
from support.fuzzing import Target, hostile_text, mutate_bytes, mutate_value

CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}], "temperature": 0.5, "n": 2}),
    ("chat", {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": None, "tool_calls": [CALL]},
                                         {"role": "tool", "tool_call_id": "c", "content": "2"}], "tools": [TOOL], "tool_choice": "required"}),
    ("chat", {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url":
              {"url": "data:image/png;base64,aGVsbG8="}}, {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}]}]}),
    ("chat", {"model": "m", "messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_schema", "json_schema": {"name": "n",
              "schema": {"type": "object", "properties": {"a": {"type": "string", "pattern": "a+"}}}}}, "stop": ["a", "b"], "seed": 3}),
    ("chat", {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}],
              "continue_final_message": True, "add_generation_prompt": False}),
    ("text", {"model": "m", "prompt": ["a", "b"], "echo": True, "logprobs": 2, "max_tokens": 0, "stream": True, "stream_options": {"include_usage": True}}),
    ("text", {"model": "m", "prompt": [1, 2, 3], "logit_bias": {"5": -100}, "best_of": 1, "top_k": 3, "min_p": 0.1, "stop_token_ids": [4]}),
    ("embed", {"model": "m", "input": ["a", "b"], "encoding_format": "base64", "dimensions": 8}),
]  # fmt: skip


def serve_target() -> Target:
    """Bodies for every path."""
    return Target("bodies of requests", _case)


@cache
def _models() -> tuple[ServedModel, ...]:
    tokenizer = byte_tokenizer()
    chat = tokenizer.with_chat_template(BUILT_IN["chatml"].export(tokenizer))
    end = frozenset([tokenizer.eos_id or 0])
    plain = EngineFacts("m", chat, 2048, 320, 8, end, "cpu", "float32", 0, constraints=True)
    media = EngineFacts(
        "m",
        chat,
        2048,
        320,
        8,
        end,
        "cpu",
        "float32",
        0,
        media={"image": 4, "audio": 2},
        media_missing=True,
    )
    client: Any = SimpleNamespace(setup=SimpleNamespace(path="m"))
    return tuple(ServedModel(client, facts, None, ServeLimits()) for facts in (plain, media))


def _case(rng: random.Random, folder: Path) -> tuple[str, Callable[[], Any]]:
    kind, good = rng.choice(BODIES)
    value: Any = good
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = mutate_value(value, rng)
    if rng.random() < 0.2 and isinstance(value, dict):
        value = {**value, hostile_text(rng): hostile_text(rng)}
    body = json.dumps(value).encode()
    if rng.random() < 0.3:
        body = mutate_bytes(body, rng)
    model = rng.choice(_models())

    def run() -> None:
        if kind == "chat":
            model._chat(read_chat(body, 8))
        elif kind == "text":
            model._text(read_completion(body, 8))
        else:
            model._embeddings(read_embedding(body))

    return f"{kind} {body[:400]!r}", run
