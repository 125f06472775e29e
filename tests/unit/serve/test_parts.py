"""The parts of a server that need no process: tool calls in text, grammars, rates, names of models, frames."""

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import uvicorn
from support.chat_tokenizer import byte_tokenizer

from headway.cli.serve import ServedModels, split_adapter, split_model
from headway.errors import ConfigError
from headway.infer.engine.text import RequestText
from headway.serve import connections
from headway.serve.api_errors import ApiError
from headway.serve.choice import Choice
from headway.serve.constraints import call_grammar, constraint_factory, schema_grammar
from headway.serve.engine_client import Mailbox, RequestStream
from headway.serve.frames import FrameReader, pack
from headway.serve.limits import RateLimit
from headway.serve.metrics import Histogram
from headway.serve.server import RestartWaits, _http_server
from headway.serve.tool_calls import ToolCallReader, tool_format
from headway.tokenizer.chat_template import BUILT_IN

ANSWERS = {
    "a <b> c\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"<tool\"}}\n</tool_call>": ("a <b> c", ["f"]),
    "<tool_call>{\"name\": \"f\", \"parameters\": {}}</tool_call>\n<tool_call>{\"name\": \"g\", \"arguments\": \"{}\"}</tool_call>\n":
        ("", ["f", "g"]),
    "<tool_call>not json</tool_call> tail": ("<tool_call>not json</tool_call> tail", []),
    "<tool_call>{\"name\": \"f\", \"arguments\": {}}": ("", ["f"]),
    "<tool_call>{\"name\": \"f\", \"argum": ("<tool_call>{\"name\": \"f\", \"argum", []),
    "ends with <tool": ("ends with <tool", []),
    "lines\n\n": ("lines\n\n", []),
}  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS)
def test_calls_in_tags_are_found_however_the_text_is_cut(answer: str) -> None:
    for seed in range(20):
        rng, reader, at = random.Random(seed), ToolCallReader("tags"), 0
        said, names = "", []
        while at < len(answer):
            size = rng.randint(1, 9)
            text, calls = reader.add(answer[at : at + size])
            said, names, at = said + text, names + [call.name for call in calls], at + size
        text, calls = reader.finish()
        assert (said + text, names + [call.name for call in calls]) == ANSWERS[answer], seed


def test_an_answer_that_is_a_call_as_a_whole() -> None:
    for text, expected in {
        '{"name": "f", "parameters": {"a": 1}}': ("", ["f"]),
        '[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]': ("", ["f", "g"]),
        '{"name": 3}': ('{"name": 3}', []),
        "Hello {": ("Hello {", []),
        "": ("", []),
    }.items():
        reader = ToolCallReader("whole")
        pieces = [reader.add(character) for character in text] + [reader.finish()]
        assert (
            "".join(said for said, _ in pieces),
            [call.name for _, calls in pieces for call in calls],
        ) == expected


def test_the_format_of_calls_is_that_of_the_template() -> None:
    tokenizer = byte_tokenizer()
    found = {
        name: tool_format(BUILT_IN[name].export(tokenizer) or "")
        for name in ("chatml", "qwen", "llama3", "alpaca")
    }
    assert found == {"chatml": "tags", "qwen": "tags", "llama3": "whole", "alpaca": None}


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]


def generated(grammar: str, seed: int) -> str:
    """A text of tokens drawn at random among those that a grammar allows."""
    tokenizer, vocab = byte_tokenizer(), 320
    assert tokenizer.eos_id is not None
    factory = constraint_factory(tokenizer, vocab, frozenset([tokenizer.eos_id]))
    assert factory is not None
    constraint, rng, made = factory(grammar), np.random.default_rng(seed), []
    while not constraint.is_finished:
        mask = np.zeros(vocab // 32, np.int32)
        constraint.fill_mask(mask)
        token = int(
            rng.choice(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")))
        )
        if token == tokenizer.eos_id:
            break
        constraint.accept(token)
        made.append(token)
        assert len(made) < 500
    return tokenizer.decode(made)


def test_random_tokens_under_a_schema_are_a_valid_object() -> None:
    pytest.importorskip("llguidance")
    for seed in range(5):
        found = json.loads(generated(schema_grammar(SCHEMA), seed))
        assert found["city"] in ("Oslo", "Rome") and 1 <= found["days"] <= 9 and len(found) == 2
    found = json.loads(generated(call_grammar("whole", TOOLS, "weather"), 0))
    assert found["name"] == "weather" and set(found["parameters"]) == {"city", "days"}
    tagged = generated(call_grammar("tags", TOOLS, None), 1)
    reader = ToolCallReader("tags")
    calls = reader.add(tagged)[1]
    assert len(calls) == 1 and calls[0].name in ("weather", "now")


@pytest.mark.parametrize(
    ("reason", "reported"), [("grammar", 2), ("eos", 1), ("stop", 1), ("length", 2)]
)
def test_a_text_that_its_grammar_completes_keeps_the_log_probability_of_its_last_token(
    reason: Any, reported: int
) -> None:
    """An end id is no part of the text, and its log-probability is left out; the last token of a grammar's text is."""
    tokenizer = byte_tokenizer()
    assert tokenizer.eos_id is not None
    last = tokenizer.encode("b")[0] if reported == 2 else tokenizer.eos_id
    stream = RequestStream(1, Mailbox(), 3, False)
    stream.tokens = [tokenizer.encode("a")[0], last]
    stream.logprobs = [(stream.tokens[0], -1.0, ()), (last, -2.0, ())]
    stream.finished = reason
    choice = Choice(0, stream, RequestText(tokenizer, []), special_ids=[tokenizer.eos_id])
    piece = choice.take()
    assert piece is not None
    assert piece.text == "ab"[:reported]
    assert [logprob for _, logprob, _ in piece.logprobs] == [-1.0, -2.0][:reported]
    assert choice.finish == ("length" if reason == "length" else "stop")


def test_a_client_above_its_rate_waits() -> None:
    rate = RateLimit(60)
    for _ in range(60):
        rate.take("a", 100.0)
    with pytest.raises(ApiError) as caught:
        rate.take("a", 100.5)
    assert caught.value.status == 429 and caught.value.headers() == {"Retry-After": "2"}
    rate.take("b", 100.5)
    rate.take("a", 101.1)
    RateLimit(0).take("a")


def test_frames_survive_any_cut() -> None:
    messages = [("events", [(1, (2, 3), None, None, 0, None)]), "x" * 5000, {"a": 1}]
    data = b"".join(map(pack, messages))
    for size in (1, 7, 64, len(data)):
        reader = FrameReader()
        assert [
            one for at in range(0, len(data), size) for one in reader.feed(data[at : at + size])
        ] == messages


def test_restarts_wait_longer_each_time_until_the_engine_has_run_for_a_while() -> None:
    waits = RestartWaits()
    assert [waits.next(0.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    waits.started(100.0)
    assert waits.next(101.0) == 60
    waits.started(200.0)
    assert waits.next(900.0) == 0.5


def test_a_histogram_counts_what_is_below_each_bound() -> None:
    found = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 9.0):
        found.add(value)
    assert [line.split()[-1] for line in found.lines("x", 'm="a"')] == [
        "2",
        "3",
        "4",
        "9.650000",
        "4",
    ]


def test_names_of_models_and_adapters(tmp_path) -> None:
    (tmp_path / "runs" / "my run" / "final").mkdir(parents=True)
    assert split_model(str(tmp_path / "runs" / "my run" / "final"))[0] == "my-run"
    assert split_model("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B")
    assert split_model("small=Qwen/Qwen3-0.6B") == ("small", "Qwen/Qwen3-0.6B")
    assert split_adapter("law=/x/y", ["a"]) == ("a", "law", "/x/y")
    assert split_adapter("b:law=/x/y", ["a", "b"]) == ("b", "law", "/x/y")
    for given, models in (("law", ["a"]), ("law=/x", ["a", "b"])):
        with pytest.raises(ConfigError):
            split_adapter(given, models)


def test_masks_of_all_models_or_of_one() -> None:
    chosen = ServedModels(
        ["a", "b"],
        masks=["b=masks.tsv", "none"],
        adapter=[],
        equal_per_layer=False,
        stream_window=64,
        stream_sinks=None,
    )
    assert {name: choice.masks for name, choice in chosen._masks(["a", "b"]).items()} == {
        "a": "none",
        "b": "masks.tsv",
    }
    assert [choice.window for choice in chosen._masks(["a", "b"]).values()] == [None, 64]


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """Answers when the whole body has arrived."""
    while (await receive()).get("more_body"):
        continue
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]}
    )
    await send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def listening_with(most: int) -> AsyncIterator[tuple[str, int]]:
    """The address of a server with at most so many connections."""
    protocol = connections.bounded_protocol(most, 1.0)
    http = _http_server(
        uvicorn.Config(answer, http=protocol, lifespan="off", log_config=None, ws="none")
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(http.serve(sockets=[listening]))
        yield listening.getsockname()
        http.force_exit = http.should_exit = True
        await serving


@pytest.mark.parametrize(
    "begun",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost:",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf",
    ],
    ids=["silent", "half a head", "half a body"],
)
def test_half_open_connections_lock_nobody_out(begun: bytes) -> None:
    async def run() -> None:
        async with listening_with(8) as address:
            held = []
            for _ in range(20):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(begun)
                await writer.drain()
                held.append(writer)
            for _ in range(3):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody")
                assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"200"
                held.append(writer)
            for writer in held:
                writer.close()

    asyncio.run(run())


def test_connections_leave_room_for_the_other_files_of_a_server() -> None:
    found = {
        limit: connections.affordable_connections(1024, limit)
        for limit in (100, 256, 1024, 1152, 20_000)
    }
    assert found == {100: 1, 256: 128, 1024: 896, 1152: 1024, 20_000: 1024}


def test_many_honest_clients_share_the_connections() -> None:
    """64 clients of one address with a half-open flood beside them; every answer arrives."""

    async def ask(address: tuple[str, int]) -> int:
        answered = 0
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody")
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
            answered += head.split()[1] == b"200"
        writer.close()
        return answered

    async def run() -> None:
        async with listening_with(128) as address:
            flood = [await asyncio.open_connection(*address) for _ in range(150)]
            answered = await asyncio.gather(*(ask(address) for _ in range(64)))
            assert answered == [3] * 64
            for _, writer in flood:
                writer.close()

    asyncio.run(run())


def test_a_head_that_never_ends_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)

    async def run() -> None:
        async with listening_with(10) as address:
            for begun in (b"", b"GET / HTTP/1.1\r\nHost:"):
                reader, writer = await asyncio.open_connection(*address)
                writer.write(begun)
                try:
                    found = await asyncio.wait_for(reader.read(), 10)
                except ConnectionResetError:
                    found = b""
                assert found == b""
                writer.close()

    asyncio.run(run())
