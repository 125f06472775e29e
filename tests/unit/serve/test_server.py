"""A server that starts, loses its engine, is overrun and stops; the engine is a stand-in."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing

import httpx
import pytest
from support.serving import STAND_IN, RunningServer, searched, serving

from headway.cli import main
from headway.serve.server import RestartWaits

pytestmark = pytest.mark.slow

MODEL = ("--model", "m=stand-in")
SLOW = {"model": "m", "prompt": "[sleep][[" + "x" * 40 + "]]", "max_tokens": 1000}


def started_in_thread(
    server: RunningServer, body: dict[str, object]
) -> tuple[threading.Thread, list[httpx.Response]]:
    answers: list[httpx.Response] = []
    thread = threading.Thread(
        target=lambda: answers.append(server.client().post("/v1/completions", json=body))
    )
    thread.start()
    deadline = time.monotonic() + 10
    while not server.client().get("/api/live").json()["running"] and time.monotonic() < deadline:
        time.sleep(0.02)
    return thread, answers


def test_sigterm_lets_running_requests_end_and_takes_no_new_ones() -> None:
    with serving(*MODEL) as server:
        thread, answers = started_in_thread(server, SLOW)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        refused = server.client().post("/v1/completions", json=SLOW)
        assert refused.status_code == 503
        assert refused.headers["Retry-After"]
        assert "stopping" in refused.json()["error"]["message"]
        assert server.client().get("/health").status_code == 503
        thread.join()
        assert answers[0].json()["choices"][0]["text"] == "x" * 40
        assert server.wait() == 0


def test_requests_that_do_not_end_in_time_are_cut_off_and_a_second_signal_ends_at_once() -> None:
    with serving(*MODEL, "--drain-seconds", "0.3") as server:
        thread, answers = started_in_thread(server, {"model": "m", "prompt": "[wait]"})
        server.process.send_signal(signal.SIGTERM)
        thread.join()
        assert answers[0].status_code == 503
        assert "stopped before" in answers[0].json()["error"]["message"]
        assert server.wait() == 0


def test_a_second_signal_ends_at_once() -> None:
    with serving(*MODEL) as server:
        body = json.dumps({"model": "m", "prompt": "[wait]"})
        with closing(
            socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        ) as connection:
            connection.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            while not server.client().get("/api/live").json()["running"]:
                time.sleep(0.02)
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
            assert server.process.poll() is None
            server.process.send_signal(signal.SIGINT)
            assert server.wait(5) == 130


def test_ctrl_c_at_the_terminal_of_a_background_job_is_not_for_the_server() -> None:
    # what a process started now inherits, as from a shell's `&`
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with serving(*MODEL) as server:
            server.process.send_signal(signal.SIGINT)
            assert server.client().get("/health").status_code == 200
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_engine_that_dies_fails_what_it_computes_and_runs_again() -> None:
    with serving(*MODEL) as server:
        thread, answers = started_in_thread(server, SLOW)
        died = server.client().post("/v1/completions", json={"model": "m", "prompt": "[die]"})
        thread.join()
        for answer in (died, answers[0]):
            assert answer.status_code == 503
            assert "ended with exit code 3" in answer.json()["error"]["message"]
        seen: set[int] = set()
        while 200 not in seen or server.client().get("/health").status_code != 200:
            seen.add(server.client().get("/health").status_code)
        assert seen == {200, 503}
        answer = server.client().post("/v1/completions", json={"model": "m", "prompt": "[[again]]"})
        assert answer.json()["choices"][0]["text"] == "again"


def test_a_model_that_cannot_be_loaded_again_is_tried_ever_less_often() -> None:
    with serving(*MODEL, "--model", "g=gone") as server:
        (server.signs / "gone").touch()
        server.client().post("/v1/completions", json={"model": "g", "prompt": "[kill]"})
        while "cannot be started" not in json.dumps(
            health := server.client().get("/health").json()
        ):
            time.sleep(0.05)
        assert health["status"] == "degraded"
        assert "model is 'gone', which is not a folder" in health["down"]["g"]["reason"]
        refused = server.client().post("/v1/completions", json={"model": "g", "prompt": "[[a]]"})
        assert refused.status_code == 503
        assert "not a folder" in refused.json()["error"]["message"]
        assert refused.headers["Retry-After"]
        assert (
            server.client()
            .post("/v1/completions", json={"model": "m", "prompt": "[[a]]"})
            .status_code
            == 200
        )
        while server.log().count("It is started again in") < 3:
            time.sleep(0.05)
        waits = re.findall(r"It is started again in ([\d.]+) s", server.log())
        assert waits[:3] == ["0.5", "1", "2"]
        (server.signs / "gone").unlink()
        while server.client().get("/health").json()["status"] != "ok":
            time.sleep(0.05)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_an_error_in_a_stream_is_its_last_event() -> None:
    with (
        serving(*MODEL) as server,
        server.client().stream("POST", "/v1/completions", json={**SLOW, "stream": True}) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        os.kill(
            int(subprocess.check_output(["pgrep", "-P", str(server.process.pid), "-f", "engine"])),
            signal.SIGKILL,
        )
        last = [line for line in lines if line][-1]
        assert json.loads(last.removeprefix("data: "))["error"]["message"].count("SIGKILL") == 1


def test_a_client_that_takes_no_bytes_is_cut_and_connections_are_bounded() -> None:
    limits = ("--stalled-seconds", "0.5", "--max-connections", "3", "--max-running", "1")
    with serving(*MODEL, *limits) as server:
        # logprobs make an answer that fills the buffers of both ends
        body = json.dumps(
            {
                "model": "m",
                "prompt": "[[" + "x" * 2000 + "]]",
                "max_tokens": 2000,
                "n": 16,
                "logprobs": 5,
                "stream": True,
            }
        )
        port = int(server.url.rsplit(":", 1)[1])
        with closing(socket.socket()) as reader:
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.connect(("127.0.0.1", port))
            reader.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            deadline = time.monotonic() + 20
            while (
                "slow_readers_cut_total 1" not in server.client().get("/metrics").text
                and time.monotonic() < deadline
            ):
                time.sleep(0.1)
        assert "slow_readers_cut_total 1" in server.client().get("/metrics").text
        # An idle connection gives way; where all are being answered, the next one is refused.
        body = json.dumps({"model": "m", "prompt": "[wait]", "stream": True})
        with ExitStack() as held:
            for _ in range(3):
                connection = held.enter_context(
                    closing(socket.create_connection(("127.0.0.1", port), timeout=20))
                )
                connection.sendall(
                    f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
                )
                assert b" 200 OK" in connection.recv(1000)
            refused = held.enter_context(
                closing(socket.create_connection(("127.0.0.1", port), timeout=20))
            )
            assert b"503 Service Unavailable" in refused.recv(1000)


TOKEN = "a" * 20


@pytest.fixture(scope="module")
def public_server() -> Iterator[RunningServer]:
    """A server that listens on every address and has a token."""
    with serving(*MODEL, "--host", "0.0.0.0", environment={"HEADWAY_SERVE_TOKEN": TOKEN}) as server:
        yield server
        assert TOKEN not in server.log()


@pytest.fixture
def stranger(public_server: RunningServer) -> Iterator[httpx.Client]:
    """A client that has no token yet."""
    port = public_server.url.rsplit(":", 1)[1]
    with httpx.Client(base_url=f"http://127.0.0.1:{port}") as client:
        yield client


def test_another_address_needs_the_token(stranger: httpx.Client) -> None:
    def status(token: str) -> int:
        headers = {"Authorization": f"Bearer {token}"}
        return stranger.get("/v1/models", headers=headers).status_code

    refused = stranger.get("/v1/models")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert status("b" * 20) == 401
    assert status(TOKEN) == 200


def test_the_page_and_health_need_no_token_and_metrics_do(stranger: httpx.Client) -> None:
    assert stranger.get("/").status_code == 200
    assert stranger.get("/health").status_code == 200
    assert stranger.get("/metrics").status_code == 401


def test_a_token_in_the_address_becomes_a_cookie(stranger: httpx.Client) -> None:
    moved = stranger.get(f"/?token={TOKEN}")
    assert moved.status_code == 303
    assert "HttpOnly" in moved.headers["Set-Cookie"]
    stranger.cookies.set("headway-serve", TOKEN)
    assert stranger.get("/v1/models").status_code == 200


def test_mistakes_end_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        cases = {
            (*MODEL, "--port", str(taken.getsockname()[1])): "Choose another --port",
            (
                *MODEL,
                "--host",
                "0.0.0.0",
            ): "no token is set. Set HEADWAY_SERVE_TOKEN or --token-file",
            (*MODEL, "--token-file", "nowhere"): "cannot be read",
            (*MODEL, *MODEL): "two models have the same name",
            (*MODEL, "--adapter", "m=x"): "is taken",
            (*MODEL, "--cache-gib", "-1"): "above 0",
            (*MODEL, "--request-seconds", "0"): "above 0",
            (*MODEL, "--media-seconds", "0"): "--media-seconds is 0.0; it must be above 0",
            (*MODEL, "--media-megapixels", "0"): "--media-megapixels is 0; it must be above 0",
            (*MODEL, "--media-gib", "0.1"): "--media-gib is 0.1; a decoder needs at least 0.5",
        }
        for options, expected in cases.items():
            assert main(["serve", *options]) == 2
            errors = capfd.readouterr().err
            assert errors.count("\n") == 1 and expected in errors, errors
    command = [sys.executable, "-c", STAND_IN, "serve", "--port", "0", "--model", "a=broken"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": searched()},
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "error: model is 'broken', which is not a folder.\n",
    )


def test_restarts_wait_longer_each_time_until_the_engine_has_run_for_a_while() -> None:
    waits = RestartWaits()
    assert [waits.next(0.0) for _ in range(9)] == [0.5, 1, 2, 4, 8, 16, 32, 60, 60]
    waits.started(100.0)
    assert waits.next(101.0) == 60
    waits.started(200.0)
    assert waits.next(900.0) == 0.5
