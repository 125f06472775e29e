"""A judge is a server: its number is the reward, and its faults cost one answer each."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError
from support.chat_endpoint import Handler, chat_endpoint, completion

import headway.text.self_instruct.endpoint as endpoint_module
from headway.errors import ConfigError, GaveUpError
from headway.rewards.base import RewardAnswer, RewardList
from headway.rewards.judge import judge_prompt, prompt_text
from headway.rewards.panel import RewardPanel, Score


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_SECONDS", 0.01)


def answer(text: str, **record: Any) -> RewardAnswer:
    return RewardAnswer(0, [{"role": "user", "content": "2+2?"}], text, record)


def panel(url: str, **settings: Any) -> RewardPanel:
    kind = {"kind": "judge", "url": url, "model": "m", "timeout": 20.0, **settings}
    return RewardPanel(TypeAdapter(RewardList).validate_python([kind]))


def refusal(**settings: Any) -> str:
    """The message for settings that are wrong."""
    with pytest.raises(ValidationError) as caught:
        panel(**{"url": "http://127.0.0.1:1/v1", **settings})
    return caught.value.errors()[0].get("ctx", {})["error"].errors[0]["msg"]


def score_with(body: bytes | None, **settings: Any) -> Score:
    """The score by a server that always sends this body."""

    def fault(handler: Handler, number: int) -> bool:
        assert body is not None
        return handler.answer(body)

    with chat_endpoint(fault) as server, panel(server.url, **settings) as opened:
        (score,) = opened.score([answer("4")])
    return score


@pytest.mark.parametrize(
    ("text", "settings", "value"),
    [
        ("Right. Score: 7", {}, 0.7),
        ("Score: 2 at first, but\n**Score:** 10", {}, 1.0),
        ("score = 0.5", {"high": 1.0}, 0.5),
        ("Score: -1", {"low": -1.0, "high": 1.0}, 0.0),
        ("[[3]]", {"pattern": r"\[\[(\d)\]\]", "low": 1.0, "high": 5.0}, 0.5),
    ],
)
def test_the_last_number_is_the_reward(text: str, settings: dict[str, Any], value: float) -> None:
    assert score_with(completion(text), **settings).total == pytest.approx(value)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (completion("I like it."), "no number that the pattern finds"),
        (completion("Score: 11"), "wrote 11; it must be from 0 to 10"),
        (b"{", "not a chat completion"),
        (b"[" * 100_000, "not a chat completion"),
        (b'{"choices": []}', "not a chat completion"),
        (b'{"choices": [{"message": {"content": null}}]}', "not a chat completion"),
        (b"\xff\xfe", "not a chat completion"),
        (b"x" * (17 << 20), "longer than"),
    ],
)
def test_what_is_no_verdict_counts_as_the_default(body: bytes, problem: str) -> None:
    score = score_with(body, default=-1.0, retries=1)
    assert score.total == -1.0
    assert problem in score.problems[0]


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_that_is_busy_is_asked_again(code: int) -> None:
    def fault(handler: Handler, number: int) -> bool:
        if number < 2:
            return handler.answer(b"busy", code)
        return handler.answer(completion("Score: 10"))

    with chat_endpoint(fault) as server, panel(server.url) as opened:
        (score,) = opened.score([answer("4")])
    assert score.total == 1.0
    assert len(server.seen) == 3


def test_a_server_that_stays_broken_costs_the_answer() -> None:
    with (
        chat_endpoint(lambda handler, _: handler.answer(b"x", 500)) as server,
        panel(server.url, retries=2) as opened,
    ):
        (score,) = opened.score([answer("4")])
    assert "HTTP 500" in score.problems[0]
    assert len(server.seen) == 3


def test_a_pause_beyond_the_time_is_not_waited_for() -> None:
    def fault(handler: Handler, number: int) -> bool:
        return handler.answer(b"later", 429, Retry_After="600")

    started = time.monotonic()
    with chat_endpoint(fault) as server, panel(server.url, timeout=5.0) as opened:
        (score,) = opened.score([answer("4")])
    assert time.monotonic() - started < 5
    assert "no time for a retry" in score.problems[0]


def test_a_redirect_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret-s3cret")
    with chat_endpoint() as other:

        def fault(handler: Handler, number: int) -> bool:
            return handler.answer(b"", 307, Location=other.url + "/chat/completions")

        with (
            chat_endpoint(fault) as server,
            panel(server.url, key_env="JUDGE_KEY") as opened,
        ):
            (score,) = opened.score([answer("4")])
    assert "redirects to another address" in score.problems[0]
    assert "reward.N.url" in score.problems[0]
    assert other.seen == []


@contextmanager
def slow_server(piece: bytes) -> Iterator[str]:
    """A server that sends a piece ten times a second and never ends its answer."""
    over = threading.Event()

    def serve(listener: socket.socket) -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    def drip(connection: socket.socket) -> None:
        with connection:
            try:
                while not over.wait(0.1):
                    if piece:
                        connection.sendall(piece)
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, args=(listener,), daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        over.set()


@pytest.mark.parametrize(
    "piece",
    [b"", b"X: y\r\n", b"H"],
    ids=["nothing", "one header after the other", "one byte after the other"],
)
def test_a_server_that_never_ends_costs_the_time_of_one_answer(piece: bytes) -> None:
    started = time.monotonic()
    with slow_server(piece) as url, panel(url, timeout=1.0, retries=3) as opened:
        first, second = opened.score([answer("4"), answer("5")])
    # Both are asked at the same time.
    assert time.monotonic() - started < 6
    assert first.problems
    assert second.problems


def test_several_answers_are_judged_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=20)

    def fault(handler: Handler, number: int) -> bool:
        together.wait()
        return handler.answer(completion("Score: 5"))

    with chat_endpoint(fault) as server, panel(server.url, requests=3) as opened:
        scores = opened.score([answer("1"), answer("2"), answer("3")])
    assert [score.total for score in scores] == [0.5] * 3


def test_the_key_goes_into_the_header_and_nowhere_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "s3cret-s3cret")

    def fault(handler: Handler, number: int) -> bool:
        return handler.answer(b"bad key s3cret-s3cret", 401)

    with chat_endpoint(fault) as server, panel(server.url, key_env="JUDGE_KEY") as opened:
        (score,) = opened.score([answer("4")])
        digest = opened.digest()
    assert server.seen[0]["headers"]["Authorization"] == "Bearer s3cret-s3cret"
    assert "JUDGE_KEY" in score.problems[0]
    assert "s3cret" not in score.problems[0] + digest + caplog.text
    monkeypatch.setenv("JUDGE_KEY", "another-key")
    with panel(server.url, key_env="JUDGE_KEY") as opened:
        assert opened.digest() == digest


def test_a_key_that_is_not_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"key_env is 'JUDGE_KEY', and no such"):
        panel("http://127.0.0.1:1/v1", key_env="JUDGE_KEY")


def test_a_server_that_is_not_there_is_refused_before_any_work() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with (
        panel(f"http://127.0.0.1:{port}/v1") as opened,
        pytest.raises(ConfigError, match=r"reward\.N\.url is http://127.*does not answer"),
    ):
        opened.check(set())


def test_a_server_that_answers_anything_is_there() -> None:
    with chat_endpoint() as server, panel(server.url) as opened:
        opened.check(set())  # its stub has no list of models: HTTP 501


def test_a_judge_that_fails_too_often_ends_the_run() -> None:
    answers = [answer(str(number)) for number in range(60)]
    with (
        chat_endpoint(lambda handler, _: handler.answer(b"x", 400)) as server,
        panel(server.url) as opened,
        pytest.raises(GaveUpError, match=r"reward judge failed on 60 .*HTTP 400"),
    ):
        opened.score(answers)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pattern": "Score"}, "0 groups"),
        ({"pattern": "("}, "which is wrong"),
        ({"low": 10.0}, "low is 10"),
        ({"prompt": "How good?"}, r"no {answer}"),
        ({"key_env": "MINE"}, "must contain KEY"),
        ({"url": "ftp://x"}, "reward.N.url is 'ftp://x'"),
        ({"url": "http://user:pw@x/v1"}, "user name or password"),
    ],
)
def test_wrong_settings_are_one_line(settings: dict[str, Any], words: str) -> None:
    assert words in refusal(**settings)


def test_a_column_that_records_lack_is_refused() -> None:
    prompt = "{answer} {record.rubric}"
    with (
        panel("http://127.0.0.1:1/v1", prompt=prompt) as opened,
        pytest.raises(ConfigError, match=r"\{record\.rubric\}; the records have the columns a"),
    ):
        opened.check({"a"})


def test_places_of_the_template_are_replaced_once() -> None:
    template = 'Q {prompt} A {answer} R {record.meta.gold} {"json": 1} {unknown}'
    text = judge_prompt(template, answer("{prompt}", meta={"gold": "{answer}"}))
    assert text == 'Q 2+2? A {prompt} R {answer} {"json": 1} {unknown}'


def test_a_conversation_is_written_with_its_roles() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "2+2?"}]},
    ]
    assert prompt_text(messages) == "system: be brief\n\nuser: 2+2?"


def test_a_verdict_is_kept_for_the_same_judge_and_prompt(tmp_path: Any) -> None:
    def scores(**settings: Any) -> None:
        kind = {"kind": "judge", "url": server.url, "model": "m", **settings}
        rewards = TypeAdapter(RewardList).validate_python([kind])
        with RewardPanel(rewards, tmp_path) as opened:
            opened.score([answer("4")])

    with chat_endpoint(lambda handler, _: handler.answer(completion("Score: 5"))) as server:
        scores()
        scores(requests=2, retries=1)
        assert len(server.seen) == 1
        scores(model="other")
        scores(prompt="Rate {answer}. Score: ?")
        assert len(server.seen) == 3


def test_what_is_sent_is_a_chat_request() -> None:
    with (
        chat_endpoint(lambda handler, _: handler.answer(completion("Score: 5"))) as server,
        panel(server.url, prompt="Rate {answer}", max_tokens=9) as opened,
    ):
        opened.score([answer("four \ud800")])
    body = json.loads(json.dumps(server.seen[0]["body"]))
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "Rate four ?"}],
        "temperature": 0.0,
        "max_tokens": 9,
    }
    assert server.seen[0]["path"] == "/v1/chat/completions"
