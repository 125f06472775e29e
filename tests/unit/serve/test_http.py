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
    found = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]


def refused(response: httpx.Response, status: int = 400, param: str | None = None) -> str:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and "\n" not in error["message"]
    assert param is None or error["param"] == param, error
    return error["message"]


def test_a_chat_answer_has_openais_shape(server: RunningServer) -> None:
    found = ask(server).json()
    assert found["object"] == "chat.completion" and found["model"] == "m"
    assert found["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    assert found["usage"]["completion_tokens"] == 12 and found["usage"][
        "prompt_tokens_details"
    ] == {"cached_tokens": 3}


def test_the_pieces_of_a_stream_are_the_answer(server: RunningServer) -> None:
    found = events(
        ask(server, "[[你好, wörld]]", stream=True, stream_options={"include_usage": True})
    )
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (
        "".join(one["choices"][0]["delta"].get("content", "") for one in found[:-1])
        == "你好, wörld"
    )
    assert found[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert (
        found[-1]["choices"] == []
        and found[-1]["usage"]["completion_tokens"] == len("你好, wörld".encode()) + 1
    )
    assert all(one["usage"] is None for one in found[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_before_a_stop_text(server: RunningServer, stream: bool) -> None:
    answer = ask(server, "[[one two three]]", stop=["x", "two"], stream=stream)
    if stream:
        found = events(answer)
        assert "".join(one["choices"][0]["delta"].get("content", "") for one in found) == "one "
        assert found[-1]["choices"][0]["finish_reason"] == "stop"
    else:
        assert answer.json()["choices"][0]["message"]["content"] == "one "
        assert answer.json()["usage"]["completion_tokens"] == len("one two")


def test_n_samples_and_several_prompts_keep_their_order(server: RunningServer) -> None:
    found = ask(server, n=3).json()
    assert [one["index"] for one in found["choices"]] == [0, 1, 2] and found["usage"][
        "completion_tokens"
    ] == 36
    found = complete(server, ["[[a]]", "[[b]]"], n=2).json()
    assert [one["text"] for one in found["choices"]] == ["a", "a", "b", "b"]
    streamed = events(complete(server, ["[[a]]", "[[b]]"], n=2, stream=True))
    texts = [
        "".join(
            one["choices"][0]["text"] for one in streamed if one["choices"][0]["index"] == number
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
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I add."
    assert [
        json.loads(one["function"]["arguments"]) for one in choice["message"]["tool_calls"]
    ] == [{"a": 1}, {"a": 2}]
    choice = ask(server, f"[[{CALLED}]]", tools=TOOLS, parallel_tool_calls=False).json()["choices"][
        0
    ]
    assert len(choice["message"]["tool_calls"]) == 1 and choice["finish_reason"] == "tool_calls"
    assert "<tool_call>" in ask(server, f"[[{CALLED}]]").json()["choices"][0]["message"]["content"]


def test_tool_calls_arrive_whole_in_a_stream(server: RunningServer) -> None:
    found = events(ask(server, f"[[{CALLED}]]", tools=TOOLS, stream=True))
    deltas = [one["choices"][0]["delta"] for one in found]
    assert "".join(one.get("content") or "" for one in deltas) == "I add."
    calls = [call for one in deltas for call in one.get("tool_calls", [])]
    assert [call["index"] for call in calls] == [0, 1] and calls[0]["function"]["name"] == "add"
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


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
    assert "Hi you" in text and '"arguments": {"a": 1}' in text


def test_log_probabilities_of_answers(server: RunningServer) -> None:
    choice = ask(server, "[[hé]]", logprobs=True, top_logprobs=2).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[104], [195], [169]] and content[0]["token"] == "h"
    assert [one["logprob"] for one in content[0]["top_logprobs"]] == [-0.5, -1.5]
    streamed = events(ask(server, "[[hé]]", logprobs=True, stream=True))
    assert (
        sum(len((one["choices"][0]["logprobs"] or {"content": []})["content"]) for one in streamed)
        == 3
    )


def test_echo_and_log_probabilities_of_the_prompt(server: RunningServer) -> None:
    choice = complete(server, "ab", echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["token_logprobs"] == [None, -2.0] and choice["logprobs"][
        "text_offset"
    ] == [0, 1]
    choice = complete(server, "ab", echo=True, logprobs=1, max_tokens=1).json()["choices"][0]
    assert choice["text"] == "aba" and choice["logprobs"]["tokens"] == ["a", "b", "a"]
    assert (
        "".join(
            one["choices"][0]["text"]
            for one in events(complete(server, "ab", echo=True, max_tokens=1, stream=True))
        )
        == "aba"
    )


def test_embeddings_as_numbers_and_as_base64(server: RunningServer) -> None:
    client = server.client()
    found = client.post("/v1/embeddings", json={"model": "m", "input": ["abc", "a"]}).json()
    assert [one["embedding"] for one in found["data"]] == [[3, 1, 2, 3], [1, 1, 2, 3]] and found[
        "usage"
    ]["prompt_tokens"] == 4
    found = client.post(
        "/v1/embeddings", json={"model": "m", "input": [[5, 6]], "encoding_format": "base64"}
    ).json()
    assert struct.unpack("<4f", base64.b64decode(found["data"][0]["embedding"])) == (2, 1, 2, 3)
    refused(
        client.post("/v1/embeddings", json={"model": "m", "input": "a", "dimensions": 3}),
        param="dimensions",
    )
    refused(client.post("/v1/embeddings", json={"model": "m", "input": ""}), param="input")


def test_adapters_are_models_of_their_own(server: RunningServer) -> None:
    listed = {one["id"]: one["parent"] for one in server.client().get("/v1/models").json()["data"]}
    assert listed == {"m": None, "plain": None, "ad": "m"}
    found = ask(server, model="ad").json()
    assert found["model"] == "ad" and found["choices"][0]["message"]["content"] == "adhello world"
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


def test_bodies_that_are_no_request(server: RunningServer) -> None:
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
    assert (
        client.get("/v1/chat/completions").status_code == 405
        and client.post("/nowhere", content=b"").status_code == 404
    )
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
    assert (
        "4096" in refused(answer, param="messages")
        and answer.json()["error"]["code"] == "context_length_exceeded"
    )


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
    found = [one for one in (*waiting, *refusals) if one.status_code == 429]
    assert found and found[0].headers["Retry-After"] == "1" and "waiting" in refused(found[0], 429)
    late = [one for one in waiting if one.status_code != 429]
    assert len(late) >= 5 and all("longer than 2 s" in refused(one, 504) for one in late)
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
        assert (
            reason in refused(died, 503)
            and died.headers["Retry-After"]
            and died.json()["error"]["code"] == "engine_died"
        )
        waiting = complete(server, "[[a]]", model="plain")
        # The other model and its adapter never notice.
        assert complete(server, "[[other]]").json()["choices"][0]["text"] == "other"
        assert reason in refused(waiting, 503) and int(waiting.headers["Retry-After"]) >= 1
        answer = server.client().get("/health")
        health = answer.json()
        assert (answer.status_code, health["status"]) == (200, "degraded")
        assert (
            health["models"] == {"m": "ok", "plain": "engine not running"}
            and reason in health["down"]["plain"]["reason"]
        )
        (server.signs / "hold").unlink()
        until_ok(server)
        assert complete(server, "[[again]]", model="plain").json()["choices"][0]["text"] == "again"
    metrics = server.client().get("/metrics").text
    assert (
        'headway_engine_restarts_total{model="plain"} 3' in metrics
        and 'headway_engine_up{model="plain"} 1' in metrics
    )
    assert server.process.poll() is None


def test_whatever_a_request_raises_while_it_is_taken_fails_that_request_alone(
    server: RunningServer,
) -> None:
    assert "Panic: an injected panic" in refused(complete(server, "[panic]"), 500)
    assert complete(server, "[[after]]").json()["choices"][0]["text"] == "after"
    assert server.client().get("/health").json()["status"] == "ok"


def test_health_counters_and_what_the_page_asks(server: RunningServer) -> None:
    client = server.client()
    ask(server)
    assert client.get("/health").json() == {"status": "ok", "models": {"m": "ok", "plain": "ok"}}
    text = client.get("/metrics").text
    assert (
        'headway_cache_bytes_budget{model="m"} 1000' in text
        and 'headway_time_to_first_token_seconds_bucket{model="m",le="+Inf"}' in text
    )
    info = client.get("/api/info").json()
    assert [(one["name"], one["has_template"], one["adapters"], one["context_length"]) for one in info["models"]] == [
        ("m", True, ["ad"], 4096), ("plain", False, [], 4096),
    ]  # fmt: skip
    assert {"running", "waiting", "tokens_per_second", "cache_bytes", "cache_budget_bytes"} <= set(
        client.get("/api/live").json()
    )


def test_the_page_loads_nothing_from_elsewhere(server: RunningServer) -> None:
    client = server.client()
    page = client.get("/")
    assert (
        page.status_code == 200 and "default-src 'none'" in page.headers["Content-Security-Policy"]
    )
    assert client.get("/static/main.js").headers["content-type"].startswith("text/javascript")
    for path in ("/static/../app.py", "/static/%2e%2e%2fapp.py", "/static/nothing.js"):
        assert client.get(path).status_code == 404
