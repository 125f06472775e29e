"""Who gets what from a board over HTTP: curves, details, and every kind of request that is refused."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.board_runs import Client, append_record, make_run, record, serving_board, unpack

from headway.board import server as server_module
from headway.board.open import choose_token
from headway.errors import ConfigError
from headway.runtime.web_access import Access

TOKEN = "a" * 40


def ids(client: Client) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.json("/api/state")["runs"]}


PAGE_FILES = [
    "board.css", "format.js", "chart.js", "source.js", "store.js", "sidebar.js", "charts.js", "rollouts.js", "panels.js", "main.js",
]  # fmt: skip


@pytest.fixture
def board_of_two(tmp_path: Path) -> Iterator[Client]:
    """A board with a run `one` of 50 steps and a run `two` of 20."""
    make_run(tmp_path / "runs" / "one", 50)
    make_run(tmp_path / "runs" / "two", 20, lr=0.5)
    with serving_board(tmp_path / "runs") as (client, _):
        yield client


def test_the_page_gets_its_own_files_and_no_others(board_of_two: Client) -> None:
    status, page, headers = board_of_two.get("/")
    assert status == 200
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert b"/main.js" in page
    for name in PAGE_FILES:
        assert name.encode() in page
        assert board_of_two.get(f"/{name}")[0] == 200


def test_curves_of_several_runs_are_exact(board_of_two: Client) -> None:
    run_ids = ids(board_of_two)
    first = run_ids["one"]
    second = run_ids["two"]
    query = f"run={first}&run={second}&metric=loss&metric=valid/loss"
    curves = unpack(board_of_two.get(f"/api/series?{query}")[1])
    assert [(curve["run"], curve["metric"], curve["n"]) for curve in curves] == [
        (first, "loss", 50),
        (first, "valid/loss", 5),
        (second, "loss", 20),
        (second, "valid/loss", 2),
    ]
    assert curves[0]["y"] == tuple(record(step)["loss"] for step in range(1, 51))
    assert board_of_two.json(f"/api/metrics?run={first}")["loss/web"] == 50


def test_details_of_a_run_are_its_settings_events_and_log(board_of_two: Client) -> None:
    two = ids(board_of_two)["two"]
    details = board_of_two.json(f"/api/details?run={two}")
    assert details["config"]["optim.lr"] == 0.5
    assert [event["event"] for event in details["events"]] == ["finish", "start"]
    assert "INFO done" in board_of_two.json(f"/api/log?run={two}")["text"]


def test_a_page_sees_a_new_step_within_two_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", 5, done=False)
    with serving_board(tmp_path / "runs") as (client, _):
        (identity,) = ids(client).values()
        client.get(f"/api/series?run={identity}&metric=loss")
        version = client.json("/api/state")["version"]
        append_record(folder, 6, loss=0.125)
        begun = time.monotonic()
        while not client.json(f"/api/state?since={version}")["runs"]:
            assert time.monotonic() - begun < 2.0
            time.sleep(0.05)
        (curve,) = unpack(client.get(f"/api/series?run={identity}&metric=loss")[1])
        assert (curve["x"][-1], curve["y"][-1]) == (6.0, 0.125)
        assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/board.html", "/%2e%2e/server.py", "/page/main.js", "/api/", "/api/../state", "/api/nothing",
     "//evil.example/", "/.git/config"],
)  # fmt: skip
def test_only_known_addresses_are_answered(tmp_path: Path, path: str) -> None:
    (tmp_path / "runs").mkdir()
    with serving_board(tmp_path / "runs") as (client, _):
        assert client.get(path)[0] == 404


def test_pictures_are_those_of_reports_inside_the_run_folder(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", 3)
    (folder / "eval").mkdir()
    (folder / "eval" / "report.md").write_text("# Evaluation\n\n![plot](plot.png)\n")
    (folder / "eval" / "plot.png").write_bytes(b"\x89PNG picture")
    (folder / "eval" / "masks.tsv").write_text("1.0\t0.0\n0.0\t0.0\n")
    (folder / "eval" / "results.json").write_text(
        json.dumps({"models": [{"model": "m", "samples": [{"prompt": "p", "text": "<b>t</b>"}]}]})
    )
    (tmp_path / "secret.png").write_bytes(b"secret")
    (tmp_path / "secret.md").write_text("secret")
    os.symlink(tmp_path / "secret.png", folder / "eval" / "linked.png")
    os.symlink(tmp_path, folder / "outside")
    with serving_board(tmp_path / "runs") as (client, _):
        (identity,) = ids(client).values()
        assert client.get(f"/api/file?run={identity}&path=eval/plot.png")[1:2] == (
            b"\x89PNG picture",
        )
        outside = ["../../secret.png", "eval/linked.png", "outside/secret.png", "eval/../../../secret.png",
                   str(tmp_path / "secret.png"), "recipe.yaml",
                   "eval/report.md", "", "eval/plot.png%00.txt", "..%2f..%2fsecret.png"]  # fmt: skip
        for path in outside:
            assert client.get(f"/api/file?run={identity}&path={path}")[0] == 404, path
        assert client.get("/api/file?run=nothing&path=eval/plot.png")[0] == 404
        details = client.json(f"/api/details?run={identity}")
        assert details["reports"][0]["pictures"] == ["eval/plot.png"]
        assert details["masks"][0]["table"] == [[1.0, 0.0], [0.0, 0.0]]
        assert details["samples"] == [
            {"report": "eval/report.md", "prompt": "p", "text": "<b>t</b>", "model": "m"}
        ]


@pytest.mark.parametrize(
    "headers",
    [{"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Host": "127.0.0.1.evil.example"}, {"Host": "8.8.8.8"}, {"Host": ""},
     {"Host": "localhost@evil.example"}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
     {"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"},
     {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}],
)  # fmt: skip
def test_other_sites_get_nothing(tmp_path: Path, headers: dict[str, str]) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving_board(tmp_path / "runs") as (client, _):
        status, content, answered = client.get("/api/state", headers)
        assert status == 403
        assert b"runs" not in content
        assert not any(name.lower().startswith("access-control") for name in answered)
        assert (
            client.get(
                "/api/state",
                {
                    "Host": "localhost:1234",
                    "Origin": "http://localhost:1234",
                    "Sec-Fetch-Site": "same-origin",
                },
            )[0]
            == 200
        )
        assert (
            client.get(
                "/",
                {
                    "Sec-Fetch-Site": "cross-site",
                    "Sec-Fetch-Mode": "navigate",
                    "Sec-Fetch-Dest": "document",
                },
            )[0]
            == 200
        )


def test_a_board_reads_names_of_headers_in_any_case(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving_board(tmp_path / "runs", host="0.0.0.0", token=TOKEN) as (client, _):

        def status(head: str) -> bytes:
            with closing(
                socket.create_connection(("127.0.0.1", client.port), timeout=20)
            ) as connection:
                connection.sendall(f"GET /api/state HTTP/1.1\r\n{head}\r\n\r\n".encode())
                return connection.recv(4096).split()[1]

        known = f"host: localhost:1\r\nauthorization: bearer {TOKEN}"
        assert status(known) == b"200"
        assert status(f"{known}\r\norigin: http://evil.example") == b"403"
        assert status(f"{known}\r\nSEC-FETCH-SITE: cross-site") == b"403"
        assert status(f"{known}\r\nHost: evil.example") == b"400"


def test_half_open_connections_do_not_block_a_reader_of_the_board(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    make_run(tmp_path / "runs" / "one", 3)
    with serving_board(tmp_path / "runs") as (client, _), ExitStack() as held:
        for number in range(12):
            connection = held.enter_context(
                closing(socket.create_connection(("127.0.0.1", client.port), timeout=20))
            )
            connection.sendall(b"GET / HTTP/1.1\r\nHost:"[: number * 2])
        for _ in range(3):
            assert client.get("/api/state")[0] == 200


def test_a_token_is_needed_and_compared_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving_board(tmp_path / "runs", host="0.0.0.0", token=TOKEN) as (client, _):
        for path, headers in [
            ("/", {}), ("/main.js", {}), ("/api/state", {}), ("/api/state?token=", {}), (f"/api/state?token={TOKEN[:-1]}", {}),
            (f"/api/state?token={TOKEN}a", {}), ("/api/state", {"Authorization": f"Basic {TOKEN}"}), 
            ("/api/state", {"Cookie": "headway-board="}),
            ("/api/state", {"Authorization": "Bearer " + "b" * 40}), ("/api/state", {"Cookie": "other=" + TOKEN}),
        ]:  # fmt: skip
            status, content, _ = client.get(path, headers)
            assert status == 401 and b"one" not in content and TOKEN.encode() not in content, (
                path,
                headers,
            )
        assert client.get("/api/state", {"Authorization": f"Bearer {TOKEN}"})[0] == 200
        status, _, headers = client.get(f"/?token={TOKEN}")
        assert status == 303
        assert headers["Location"] == "/"
        assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
        cookie = headers["Set-Cookie"].split(";")[0]
        assert client.get("/api/state", {"Cookie": cookie})[0] == 200
        assert client.get("/api/state", {"Cookie": cookie, "Host": "10.1.2.3:6080"})[0] == 200
        assert client.get("/api/state", {"Cookie": cookie, "Host": "evil.example"})[0] == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_board_for_this_machine_alone_needs_no_token(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADWAY_BOARD_TOKEN", raising=False)
    assert choose_token(host) is None


def test_a_board_for_others_gets_a_random_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_BOARD_TOKEN", raising=False)
    token = choose_token("0.0.0.0")
    assert token is not None
    assert len(token) == 48
    assert token != choose_token("0.0.0.0")


def test_a_token_of_the_environment_is_used_for_every_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADWAY_BOARD_TOKEN", TOKEN)
    assert choose_token("127.0.0.1") == TOKEN
    assert choose_token("192.168.1.1") == TOKEN


def test_a_short_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADWAY_BOARD_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        choose_token("127.0.0.1")


def test_names_of_hosts_are_compared_without_case_and_port() -> None:
    assert Access("0.0.0.0", None, ["gpu.lab"])._is_our_host("GPU.lab:99")


@pytest.mark.parametrize(
    ("query", "status"),
    [("x=weight", 400), ("points=1", 400), ("points=99999", 400), ("points=many", 400), ("from=nan", 400), ("to=inf", 400),
     ("from=9&to=1", 200),
     ("metric=" + "m" * 40_000, 414), ("&".join(["a=1"] * 3000), 400)],
)  # fmt: skip
def test_requests_are_bounded(tmp_path: Path, query: str, status: int) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving_board(tmp_path / "runs") as (client, _):
        (identity,) = ids(client).values()
        assert client.get(f"/api/series?run={identity}&metric=loss&{query}")[0] == status
        assert client.get("/api/state", method="POST")[0] == 501
        assert client.get("/api/state", method="DELETE")[0] == 501


def test_slow_clients_are_cut_and_do_not_hold_others_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 6)
    (tmp_path / "runs").mkdir()
    with serving_board(tmp_path / "runs") as (client, _):
        slow = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(5)]
        for connection in slow:
            connection.sendall(b"GET /api/state HTTP/1.1\r\nHost: loc")
        assert client.get("/api/state")[0] == 200
        begun = time.monotonic()
        for connection in slow:
            connection.settimeout(5.0)
            while connection.recv(
                4096
            ):  # an answer that the request is incomplete, or nothing; then the end
                pass
            connection.close()
        assert time.monotonic() - begun < 4.0


def test_names_of_runs_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&\"'"
    make_run(tmp_path / "runs" / name.replace("/", "∕"), 2)
    with serving_board(tmp_path / "runs") as (client, _):
        _, content, headers = client.get("/api/state")
        assert headers["Content-Type"] == "application/json"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert json.loads(content)["runs"][0]["name"] == name.replace("/", "∕")
    for file in (Path(server_module.__file__).parent / "page").glob("*.js"):
        text = file.read_text()
        for dangerous in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ):
            assert dangerous not in text, f"{file.name} has {dangerous}"
        assert "http://" not in text and "https://" not in text, f"{file.name} names another host"
