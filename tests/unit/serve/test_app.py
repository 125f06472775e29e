"""What clients send to a server and what they get, over real HTTP; the engine is a stand-in."""

import base64
import json
import random
import socket
import struct
import threading
import time
from typing import Any

import httpx
import pytest
from support.serving import RunningServer


def ask(
    server: RunningServer,
    content: Any = "[[hello world]]",
    path: str = "/v1/chat/completions",
    **fields: Any,
) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return server.client().post(path, json=body)


def complete(server: RunningServer, prompt: Any, **fields: Any) -> httpx.Response:
    return server.client().post(
        "/v1/completions", json={"model": "m", "prompt": prompt, "max_tokens": 100, **fields}
    )


def events(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    data_lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data_lines[-1] == "[DONE]"
    return [json.loads(line) for line in data_lines[:-1]]


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    assert param is None or error["param"] == param, error
    return error["message"]


def test_a_chat_answer_has_openais_shape(server: RunningServer) -> None:
    answer = ask(server).json()
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "m"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_the_pieces_of_a_stream_are_the_answer(server: RunningServer) -> None:
    stream = events(
        ask(server, "[[你好, wörld]]", stream=True, stream_options={"include_usage": True})
    )
    assert stream[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(event["choices"][0]["delta"].get("content", "") for event in stream[:-1])
        == "你好, wörld"
    )
    assert stream[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert stream[-1]["choices"] == []
    assert stream[-1]["usage"]["completion_tokens"] == len("你好, wörld".encode()) + 1
    assert all(event["usage"] is None for event in stream[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_text(server: RunningServer, stream: bool) -> None:
    answer = ask(server, "[[one two three]]", stop=["x", "two"], stream=stream)
    if stream:
        received = events(answer)
        assert (
            "".join(event["choices"][0]["delta"].get("content", "") for event in received) == "one "
        )
        assert received[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "one "
        assert answer.json()["usage"]["completion_tokens"] == len("one two")


def test_n_samples_and_several_prompts_keep_their_order(server: RunningServer) -> None:
    answer = ask(server, n=3).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["usage"]["completion_tokens"] == 36
    answer = complete(server, ["[[a]]", "[[b]]"], n=2).json()
    assert [choice["text"] for choice in answer["choices"]] == ["a", "a", "b", "b"]
    streamed = events(complete(server, ["[[a]]", "[[b]]"], n=2, stream=True))
    texts = [
        "".join(
            event["choices"][0]["text"]
            for event in streamed
            if event["choices"][0]["index"] == number
        )
        for number in range(4)
    ]
    assert texts == ["a", "a", "b", "b"]


def test_a_length_limit_ends_an_answer(server: RunningServer) -> None:
    for fields in ({"max_tokens": 3}, {"max_completion_tokens": 3}):
        choice = ask(server, **fields).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("hel", "length")


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}},
    }
]
CALLED = "I add." + "".join(
    f'\n<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    for number in (1, 2)
)


def test_tool_calls_are_parsed_from_the_answer(server: RunningServer) -> None:
    choice = ask(server, f"[[{CALLED}]]", tools=TOOLS).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "I add."
    assert [
        json.loads(call["function"]["arguments"]) for call in choice["message"]["tool_calls"]
    ] == [{"a": 1}, {"a": 2}]
    choice = ask(server, f"[[{CALLED}]]", tools=TOOLS, parallel_tool_calls=False).json()["choices"][
        0
    ]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert "<tool_call>" in ask(server, f"[[{CALLED}]]").json()["choices"][0]["message"]["content"]


def test_tool_calls_arrive_whole_in_a_stream(server: RunningServer) -> None:
    stream = events(ask(server, f"[[{CALLED}]]", tools=TOOLS, stream=True))
    deltas = [event["choices"][0]["delta"] for event in stream]
    assert "".join(delta.get("content") or "" for delta in deltas) == "I add."
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1]
    assert calls[0]["function"]["name"] == "add"
    assert stream[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_conversation_with_calls_and_results_is_read(server: RunningServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "Be kind."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi "}, {"type": "text", "text": "you"}],
        },
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    text = ask(server, messages=messages, max_tokens=1000).json()["choices"][0]["message"][
        "content"
    ]
    assert "Hi you" in text
    assert '"arguments": {"a": 1}' in text


def test_log_probabilities_of_an_answer_come_whole_and_in_a_stream(server: RunningServer) -> None:
    choice = ask(server, "[[hé]]", logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [token["bytes"] for token in content] == [[104], [195], [169]]
    assert content[0]["token"] == "h"
    assert [candidate["logprob"] for candidate in content[0]["top_logprobs"]] == [-0.5, -1.5]
    streamed = events(ask(server, "[[hé]]", logprobs=True, stream=True))
    assert (
        sum(
            len((event["choices"][0]["logprobs"] or {"content": []})["content"])
            for event in streamed
        )
        == 3
    )


def test_an_echoed_prompt_has_log_probabilities_and_offsets(server: RunningServer) -> None:
    choice = complete(server, "ab", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "ab"
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0]
    assert choice["logprobs"]["text_offset"] == [0, 1]


def test_an_echoed_prompt_stands_before_the_answer(server: RunningServer) -> None:
    choice = complete(server, "ab", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "aba"
    assert choice["logprobs"]["tokens"] == ["a", "b", "a"]


def test_an_echoed_prompt_is_the_beginning_of_a_stream(server: RunningServer) -> None:
    stream = events(complete(server, "ab", echo=True, max_tokens=1, stream=True))
    assert "".join(event["choices"][0]["text"] for event in stream) == "aba"


def embeddings(server: RunningServer, **fields: Any) -> httpx.Response:
    return server.client().post("/v1/embeddings", json={"model": "m", **fields})


def test_embeddings_of_texts_are_lists_of_numbers(server: RunningServer) -> None:
    answer = embeddings(server, input=["abc", "a"]).json()
    assert [item["embedding"] for item in answer["data"]] == [[3, 1, 2, 3], [1, 1, 2, 3]]
    assert answer["usage"]["prompt_tokens"] == 4


def test_embeddings_of_ids_come_as_base64_on_request(server: RunningServer) -> None:
    answer = embeddings(server, input=[[5, 6]], encoding_format="base64").json()
    packed = base64.b64decode(answer["data"][0]["embedding"])
    assert struct.unpack("<4f", packed) == (2, 1, 2, 3)


def test_embeddings_of_other_sizes_or_of_nothing_are_refused(server: RunningServer) -> None:
    refused(embeddings(server, input="a", dimensions=3), param="dimensions")
    refused(embeddings(server, input=""), param="input")


def test_adapters_are_models_of_their_own(server: RunningServer) -> None:
    listed = {
        model["id"]: model["parent"] for model in server.client().get("/v1/models").json()["data"]
    }
    assert listed == {"m": None, "plain": None, "ad": "m"}
    answer = ask(server, model="ad").json()
    assert answer["model"] == "ad"
    assert answer["choices"][0]["message"]["content"] == "adhello world"
    assert server.client().get("/v1/models/ad").json()["root"] == "m"
    assert "m, plain, ad" in refused(ask(server, model="gpt-4"), 404, "model")


def test_a_model_without_a_template_completes_text_only(server: RunningServer) -> None:
    assert "/v1/completions" in refused(ask(server, model="plain"), param="model")
    assert complete(server, "[[a]]", model="plain").json()["choices"][0]["text"] == "a"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": 3}, "temperature"), ({"temperature": "1"}, "temperature"), ({"max_tokens": 0}, "max_tokens"), ({"n": 5}, "n"),
        ({"max_tokens": 5000}, "max_tokens"), ({"top_p": -1}, "top_p"), ({"stop": [""]}, "stop"), ({"stop": 3}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"), ({"logit_bias": {"400": 1}}, "logit_bias"), ({"seed": 1.5}, "seed"),
        ({"stream": "yes"}, "stream"), ({"stream_options": {}}, "stream_options"), ({"top_logprobs": 2}, "top_logprobs"),
        ({"frequency_penalty": 3}, "frequency_penalty"), ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"), ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"), ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"messages": []}, "messages"), ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "Al"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]}, "messages"),
        ({"reasoning_effort": "high"}, "reasoning_effort"), ({"web_search_options": {"a": 1}}, "web_search_options"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_a_field_that_cannot_be_honoured_is_refused_by_its_name(
    server: RunningServer, fields: dict[str, Any], param: str
) -> None:
    refused(ask(server, **fields), param=param)


def test_fields_without_influence_are_accepted(server: RunningServer) -> None:
    assert (
        ask(
            server,
            user="me",
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            logit_bias={},
            tools=[],
            stop=None,
        ).status_code
        == 200
    )


def test_media_are_read_from_the_request_alone(server: RunningServer) -> None:
    def image(url: Any) -> httpx.Response:
        return ask(
            server,
            [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}],
        )

    for url in (
        "http://127.0.0.1/x.png",
        "file:///etc/passwd",
        "/etc/passwd",
        "data:text/plain;base64,aGk=",
        "data:image/png,xyz",
    ):
        assert "never fetched" in refused(image(url), param="messages[0].content[1].image_url.url")
    assert "base64" in refused(image("data:image/png;base64,!!!"))
    assert "takes text alone" in refused(image("data:image/png;base64,aGVsbG8="))


def test_bodies_that_are_no_request_are_refused_with_their_status(server: RunningServer) -> None:
    client = server.client()
    for body in (
        b"",
        b"{",
        b"[]",
        b"3",
        b'{"model": NaN}',
        b"\xff\xfe",
        b"[" * 5000,
        b'{"a":' * 5000,
        b'{"model": "\\ud800"}',
        b"9" * 9000,
    ):
        refused(client.post("/v1/chat/completions", content=body))
    assert "262144" in refused(client.post("/v1/chat/completions", content=b" " * 300_000), 413)
    assert client.get("/v1/chat/completions").status_code == 405
    assert client.post("/nowhere", content=b"").status_code == 404
    refused(
        client.post("/v1/completions", content=b"{}", headers={"Content-Encoding": "gzip"}), 415
    )
    refused(client.get("/" + "x" * 9000), 414)


def test_a_body_of_any_size_without_a_length_is_cut(server: RunningServer) -> None:
    refused(
        server.client().post("/v1/chat/completions", content=(b" " * 65536 for _ in range(50))), 413
    )


def test_a_large_body_is_read_like_a_small_one(server: RunningServer) -> None:
    padding = {"a": "b" * 100_000}
    assert ask(server, metadata=padding).json()["choices"][0]["message"]["content"] == "hello world"
    assert complete(server, "[[a]]", metadata=padding).json()["choices"][0]["text"] == "a"
    refused(ask(server, metadata=padding, temperature=3), param="temperature")
    refused(
        server.client().post(
            "/v1/embeddings", content=b'{"model": "m", "input": ' + b" " * 100_000
        ),
        400,
    )


def test_a_prompt_that_is_too_long_says_so(server: RunningServer) -> None:
    answer = ask(server, "x" * 5000)
    assert "4096" in refused(answer, param="messages")
    assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_random_requests_never_fail_inside_the_server(server: RunningServer) -> None:
    rng = random.Random(5)
    values = [
        None,
        True,
        0,
        -1,
        1e400,
        10**30,
        "",
        "x",
        "\u0000",
        [],
        {},
        [[]],
        [{}],
        {"type": "text"},
        "auto",
        ["a", 3],
        0.5,
    ]
    names = (
        "model", "messages", "prompt", "n", "stop", "tools", "tool_choice", "stream", "stream_options", "logprobs", "logit_bias",
        "max_tokens",         "temperature", "seed", "response_format", "echo", "input", "top_p", "suffix", "best_of", 
        "encoding_format", "odd",
    )  # fmt: skip
    for _ in range(60):
        body: dict[str, Any] = {
            "model": "m",
            "messages": [{"role": "user", "content": "[[a]]"}],
            "prompt": "[[a]]",
            "input": "a",
        }
        body |= {rng.choice(names): rng.choice(values) for _ in range(rng.randint(1, 3))}
        path = rng.choice(("chat/completions", "completions", "embeddings"))
        text = json.dumps(body).replace("Infinity", "1e400")
        answer = server.client().post(f"/v1/{path}", content=text)
        assert answer.status_code in (200, 400, 404), (text, answer.text)
    assert "failed" not in server.log()


def test_requests_above_the_queue_get_429_and_long_ones_504(server: RunningServer) -> None:
    waiting: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: waiting.append(complete(server, "[wait]", n=4)))
        for _ in range(9)
    ]
    for thread in threads:
        thread.start()
    refusals = [complete(server, "[wait][[a]]") for _ in range(3)]
    for thread in threads:
        thread.join()
    refusals_429 = [response for response in (*waiting, *refusals) if response.status_code == 429]
    assert refusals_429
    assert refusals_429[0].headers["Retry-After"] == "1"
    assert "waiting" in refused(refusals_429[0], 429)
    late = [response for response in waiting if response.status_code != 429]
    assert len(late) >= 5
    assert all("longer than 2 s" in refused(response, 504) for response in late)
    assert complete(server, "[[a]]").status_code == 200  # all of them have left the engine


def test_a_client_that_leaves_ends_its_request(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(
        {
            "model": "m",
            "prompt": "[sleep][[" + "x" * 1000 + "]]",
            "max_tokens": 1000,
            "stream": True,
        }
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        assert server.client().get("/api/live").json()["running"] >= 0
    deadline = time.monotonic() + 3
    while server.client().get("/api/live").json()["running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.client().get("/api/live").json()["running"] == 0
    assert 'reason="cancelled"} ' in server.client().get("/metrics").text


def test_other_sites_and_other_names_are_refused(server: RunningServer) -> None:
    client = server.client()
    refused(client.get("/v1/models", headers={"Host": "evil.example"}), 403)
    refused(client.get("/v1/models", headers={"Origin": "http://evil.example"}), 403)
    refused(
        client.post(
            "/v1/chat/completions", content=b"{}", headers={"Sec-Fetch-Site": "cross-site"}
        ),
        403,
    )
    answer = client.options(
        "/v1/chat/completions", headers={"Access-Control-Request-Method": "POST"}
    )
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "access-control-allow-origin" not in client.get("/v1/models").headers


def until_ok(server: RunningServer) -> None:
    """Wait until every model answers."""
    deadline = time.monotonic() + 60
    while (health := server.client().get("/health").json())["status"] != "ok":
        assert time.monotonic() < deadline, health
        time.sleep(0.05)


def test_an_engine_that_dies_again_and_again_fails_its_requests_alone(
    server: RunningServer,
) -> None:
    for how, reason in (
        ("[kill]", "was killed by SIGKILL"),
        ("[raise]", "ended with exit code 1 (RuntimeError: an injected error)"),
        ("[die]", "ended with exit code 3"),
    ):
        (server.signs / "hold").touch()
        died = complete(server, how, model="plain")
        assert reason in refused(died, 503)
        assert died.headers["Retry-After"]
        assert died.json()["error"]["code"] == "engine_died"
        waiting = complete(server, "[[a]]", model="plain")
        # The other model and its adapter never notice.
        assert complete(server, "[[other]]").json()["choices"][0]["text"] == "other"
        assert reason in refused(waiting, 503)
        assert int(waiting.headers["Retry-After"]) >= 1
        answer = server.client().get("/health")
        health = answer.json()
        assert (answer.status_code, health["status"]) == (200, "degraded")
        assert health["models"] == {"m": "ok", "plain": "engine not running"}
        assert reason in health["down"]["plain"]["reason"]
        (server.signs / "hold").unlink()
        until_ok(server)
        assert complete(server, "[[again]]", model="plain").json()["choices"][0]["text"] == "again"
    metrics = server.client().get("/metrics").text
    assert 'headway_engine_restarts_total{model="plain"} 3' in metrics
    assert 'headway_engine_up{model="plain"} 1' in metrics
    assert server.process.poll() is None


def test_whatever_a_request_raises_while_it_is_taken_fails_that_request_alone(
    server: RunningServer,
) -> None:
    assert "Panic: an injected panic" in refused(complete(server, "[panic]"), 500)
    assert complete(server, "[[after]]").json()["choices"][0]["text"] == "after"
    assert server.client().get("/health").json()["status"] == "ok"


def test_health_names_the_state_of_every_model(server: RunningServer) -> None:
    answer = server.client().get("/health").json()
    assert answer == {"status": "ok", "models": {"m": "ok", "plain": "ok"}}


def test_metrics_count_cache_and_time_to_the_first_token_of_each_model(
    server: RunningServer,
) -> None:
    ask(server)
    text = server.client().get("/metrics").text
    assert 'headway_cache_bytes_budget{model="m"} 1000' in text
    assert 'headway_time_to_first_token_seconds_bucket{model="m",le="+Inf"}' in text


def test_the_page_is_told_templates_adapters_and_context_of_each_model(
    server: RunningServer,
) -> None:
    info = server.client().get("/api/info").json()
    models = [
        (model["name"], model["has_template"], model["adapters"], model["context_length"])
        for model in info["models"]
    ]
    assert models == [("m", True, ["ad"], 4096), ("plain", False, [], 4096)]


def test_the_page_is_told_the_load_of_the_server(server: RunningServer) -> None:
    live = server.client().get("/api/live").json()
    expected = {"running", "waiting", "tokens_per_second", "cache_bytes", "cache_budget_bytes"}
    assert expected <= set(live)


def test_the_page_loads_nothing_from_elsewhere(server: RunningServer) -> None:
    client = server.client()
    page = client.get("/")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")
    for path in ("/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/nothing.js"):
        assert client.get(path).status_code == 404
