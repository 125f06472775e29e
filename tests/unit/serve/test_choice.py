"""What clients get of a real engine with a tiny model: where texts stop, what log-probabilities belong to, how tokens are counted."""

import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from support.chain_model import END, write_chain_model
from support.chat_tokenizer import byte_tokenizer
from support.local_server import LocalServer, local_server

from headway.infer.engine.request import EngineOptions
from headway.infer.engine.text import RequestText
from headway.serve.choice import Choice, TokenOffsets, chat_logprobs, text_logprobs
from headway.serve.engine_client import Mailbox, RequestStream
from headway.serve.engine_setup import EngineSetup
from headway.serve.forms import ENCODE, usage

CALL = '<tool_call>\n{{"name": "add", "arguments": {{"a": {0}}}}}\n</tool_call>'
CALLS = [CALL.format(number) for number in (1, 2, 3)]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CHAINS = (
    ("a", "one ", "two ", "three ", "four", END),
    # A character of three tokens stands between words.
    ("b", "né ", "bytes:你", "x ", "ü", END),
    ("c", "I add.", "\n" + CALLS[0] + "\n" + CALLS[1], "\n" + CALLS[2], END),
    ("d", "say ", "over ", "again ", "say "),
)
CONTEXT = 640
PAGE = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    folder = write_chain_model(tmp_path_factory.mktemp("chain"), *CHAINS, context=CONTEXT)
    options = EngineOptions(max_running=4, page_tokens=PAGE, cache_bytes=4 << 20)
    with local_server(EngineSetup("m", str(folder), options, device="cpu")) as running:
        yield running


def complete(server: LocalServer, prompt: Any, **fields: Any) -> dict[str, Any]:
    return server.ask("/v1/completions", model="m", prompt=prompt, temperature=0, **fields)


def continued(server: LocalServer, beginning: str, **fields: Any) -> dict[str, Any]:
    """A chat whose answer begins with these words."""
    return {
        "model": "m",
        "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": beginning}],
        "continue_final_message": True,
        "add_generation_prompt": False,
        "temperature": 0,
        **fields,
    }


@pytest.mark.parametrize("steps", [1, 4])
def test_of_several_stop_texts_the_earliest_ends_the_answer(
    server: LocalServer, steps: int
) -> None:
    server.engines[0].steps_at_once = steps
    for stops, text in {
        ("four", "two"): "one ",
        ("two", "four"): "one ",
        # Both are complete with the same token; the one that begins first counts.
        ("wo", "two"): "one ",
        ("e tw", "ne t"): "o",
        ("ee four", "three"): "one two ",
        ("nowhere", "hree"): "one two t",
    }.items():
        choice = complete(server, "a", stop=list(stops))["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop"), stops
        streamed = server.events(
            "/v1/completions", model="m", prompt="a", temperature=0, stop=list(stops)
        )
        assert "".join(event["choices"][0]["text"] for event in streamed) == text, stops
    server.engines[0].steps_at_once = 1


@pytest.mark.parametrize("steps", [1, 4])
def test_log_probabilities_end_with_the_token_that_completes_a_stop_text(
    server: LocalServer, steps: int
) -> None:
    server.engines[0].steps_at_once = steps
    answer = complete(server, "a", stop="wo", logprobs=0)
    assert answer["choices"][0]["logprobs"]["tokens"] == ["one ", "two "]
    assert answer["usage"]["completion_tokens"] == 2
    chat = server.ask("/v1/chat/completions", **continued(server, "a", stop=["wo"], logprobs=True))
    assert [entry["token"] for entry in chat["choices"][0]["logprobs"]["content"]] == [
        "one ",
        "two ",
    ]
    assert chat["choices"][0]["message"]["content"] == "one t"
    # The end token is no part of the text, so it has no log-probability either.
    whole = complete(server, "a", logprobs=0)
    assert whole["choices"][0]["logprobs"]["tokens"] == ["one ", "two ", "three ", "four"]
    assert whole["usage"]["completion_tokens"] == 5
    server.engines[0].steps_at_once = 1


def test_an_id_that_stops_an_answer_and_is_text_keeps_its_log_probability(
    server: LocalServer,
) -> None:
    word = server.engines[0].facts.tokenizer.vocab_size  # pyright: ignore[reportOptionalMemberAccess]
    number = next(
        token
        for token in range(256, word)
        if server.state.bases[0].tokenizer.decode([token]) == "three "
    )
    choice = complete(server, "a", stop_token_ids=[number], logprobs=0)["choices"][0]
    assert choice["text"] == "one two three "
    assert choice["logprobs"]["tokens"] == ["one ", "two ", "three "]
    assert choice["finish_reason"] == "stop"


def test_a_grammar_that_ends_in_text_keeps_its_last_log_probability(server: LocalServer) -> None:
    pytest.importorskip("llguidance")
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": "ok"}}}
    chat = server.ask(
        "/v1/chat/completions", **continued(server, "a", response_format=schema, logprobs=True)
    )
    content = chat["choices"][0]["logprobs"]["content"]
    assert chat["choices"][0]["message"]["content"] == '"ok"'
    assert "".join(entry["token"] for entry in content) == '"ok"'


def test_cached_tokens_are_those_of_each_prompt_once(server: LocalServer) -> None:
    prompts = ["cache one " * 4 + "a", "cache two " * 3 + "a"]
    ids = [len(server.state.bases[0].tokenizer.encode(prompt)) for prompt in prompts]
    first = complete(server, prompts, n=3, max_tokens=1)["usage"]
    assert first["prompt_tokens"] == sum(ids)
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    again = complete(server, prompts, n=3, max_tokens=1)["usage"]
    # Whole pages are found again: 41 tokens have two of 16, 31 have one.
    assert ids == [41, 31]
    assert again["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE + PAGE
    alone = complete(server, prompts[0], max_tokens=1)["usage"]
    assert alone["prompt_tokens_details"]["cached_tokens"] == 2 * PAGE


def test_the_offset_of_a_token_counts_characters(server: LocalServer) -> None:
    choice = complete(server, "b", logprobs=0)["choices"][0]
    assert choice["text"] == "né 你x ü"
    assert choice["logprobs"]["tokens"] == [
        "né ",
        "bytes:\\xe4",
        "bytes:\\xbd",
        "bytes:\\xa0",
        "x ",
        "ü",
    ]
    assert choice["logprobs"]["text_offset"] == [0, 3, 3, 3, 4, 6]
    streamed = server.events("/v1/completions", model="m", prompt="b", temperature=0, logprobs=0)
    offsets = [
        offset
        for event in streamed
        for offset in (event["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    assert offsets == [0, 3, 3, 3, 4, 6]


def test_offsets_of_an_echoed_prompt_are_those_of_the_text(server: LocalServer) -> None:
    # A special token without text, the two bytes of a character, and a byte.
    ids = [server.state.bases[0].tokenizer.bos_id, *server.state.bases[0].tokenizer.encode("éb")]
    choice = complete(server, ids, echo=True, logprobs=0, max_tokens=4)["choices"][0]
    assert choice["text"] == "ébné 你"
    assert choice["logprobs"]["tokens"][:5] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "b", "né "]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 2, 5, 5, 5]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert all(value < 0 for value in choice["logprobs"]["token_logprobs"][1:])


def test_an_answer_that_fills_the_context_ends_with_length(server: LocalServer) -> None:
    answer = complete(server, "-" * (CONTEXT - 21) + "d", max_tokens=1000)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["choices"][0]["text"].startswith("say over again say over")
    assert answer["usage"] == {**answer["usage"], "completion_tokens": 20, "total_tokens": CONTEXT}
    # Where the engine itself comes to the end of the context, clients read the same.
    stream = RequestStream(1, Mailbox(), 1, False)
    stream.finished = "context"
    choice = Choice(0, stream, RequestText(server.state.bases[0].tokenizer, ()))
    assert choice.take() is not None
    assert choice.finish == "length"


@pytest.mark.parametrize("steps", [1, 3])
def test_calls_are_numbered_through_a_stream(server: LocalServer, steps: int) -> None:
    server.engines[0].steps_at_once = steps
    body = continued(server, "c", tools=TOOLS, n=2)
    calls: dict[int, list[Any]] = {0: [], 1: []}
    reasons: dict[int, str] = {}
    for event in server.events("/v1/chat/completions", **body):
        choice = event["choices"][0]
        calls[choice["index"]] += choice["delta"].get("tool_calls", [])
        if choice["finish_reason"] is not None:
            reasons[choice["index"]] = choice["finish_reason"]
    for listed in calls.values():
        assert [call["index"] for call in listed] == [0, 1, 2]
        assert [json.loads(call["function"]["arguments"])["a"] for call in listed] == [1, 2, 3]
        assert len({call["id"] for call in listed}) == 3
    assert reasons == {0: "tool_calls", 1: "tool_calls"}
    server.engines[0].steps_at_once = 1


def test_a_token_that_cannot_follow_has_a_number_in_json(server: LocalServer) -> None:
    tokenizer = server.state.bases[0].tokenizer
    logprobs = [(97, -math.inf, ((98, -0.5), (99, -math.inf), (100, math.nan)))]
    chat = json.loads(ENCODE(chat_logprobs(tokenizer, logprobs)), parse_constant=pytest.fail)
    assert chat["content"][0]["logprob"] == -9999.0
    assert [entry["logprob"] for entry in chat["content"][0]["top_logprobs"]] == [
        -0.5,
        -9999.0,
        -9999.0,
    ]
    text = json.loads(
        ENCODE(text_logprobs(tokenizer, logprobs, TokenOffsets(tokenizer))),
        parse_constant=pytest.fail,
    )
    assert text["token_logprobs"] == [-9999.0]
    assert sorted(text["top_logprobs"][0].values()) == [-9999.0, -9999.0, -0.5]


def test_likely_tokens_that_are_parts_of_characters_stay_apart(server: LocalServer) -> None:
    tokenizer = server.state.bases[0].tokenizer
    parts = [
        token
        for token in range(256)
        if len(tokenizer.decode_bytes([token]).decode("utf-8", "ignore")) == 0
    ][:3]
    top = tuple((token, -1.0) for token in parts)
    assert (
        len(text_logprobs(tokenizer, [(97, -1.0, top)], TokenOffsets(tokenizer))["top_logprobs"][0])
        == 3
    )


def test_an_answer_goes_on_with_the_words_it_is_given(server: LocalServer) -> None:
    answer = server.ask("/v1/chat/completions", **continued(server, "a"))
    assert answer["choices"][0]["message"]["content"] == "one two three four"
    body = continued(server, "a")
    del body["add_generation_prompt"]
    assert (
        server.ask("/v1/chat/completions", **body)["choices"][0]["message"]["content"]
        == "one two three four"
    )
    for changes, param in (
        ({"add_generation_prompt": True}, "add_generation_prompt"),
        ({"continue_final_message": False}, "add_generation_prompt"),
        ({"continue_final_message": False, "add_generation_prompt": True}, "messages"),
        ({"messages": [{"role": "user", "content": "a"}]}, "messages"),
    ):
        refused = server.post("/v1/chat/completions", {**continued(server, "a"), **changes})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, changes


def test_an_id_without_text_is_refused(server: LocalServer) -> None:
    vocab = server.state.bases[0].tokenizer.vocab_size
    refused = server.post("/v1/completions", {"model": "m", "prompt": [97, vocab]})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt"


def test_usage_of_no_choice_is_zero() -> None:
    assert usage([], 3)["prompt_tokens_details"] == {"cached_tokens": 0}


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
