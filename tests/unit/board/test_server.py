"""Who gets what from a board over HTTP: curves, details, and every kind of request that is refused."""

import json
import os
import socket
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.board_runs import Client, append_record, make_run, record, serving, unpack

from headway.board import server as server_module
from headway.board.access import Access, choose_token
from headway.errors import ConfigError

TOKEN = "a" * 40


def ids(client: Client) -> dict[str, str]:
    return {run["name"]: run["id"] for run in client.json("/api/state")["runs"]}


def test_a_page_gets_its_files_its_runs_and_exact_curves(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 50)
    make_run(tmp_path / "runs" / "two", 20, lr=0.5)
    with serving(tmp_path / "runs") as (client, _):
        status, page, headers = client.get("/")
        assert (
            status == 200
            and b"/main.js" in page
            and "script-src 'self'" in headers["Content-Security-Policy"]
        )
        for name in (
            "board.css",
            "format.js",
            "chart.js",
            "source.js",
            "store.js",
            "sidebar.js",
            "charts.js",
            "panels.js",
            "main.js",
        ):
            assert name.encode() in page and client.get(f"/{name}")[0] == 200
        found = ids(client)
        query = f"run={found['one']}&run={found['two']}&metric=loss&metric=valid/loss"
        curves = unpack(client.get(f"/api/series?{query}")[1])
        assert [(one["run"], one["metric"], one["n"]) for one in curves] == [
            (found["one"], "loss", 50), (found["one"], "valid/loss", 5), (found["two"], "loss", 20), (found["two"], "valid/loss", 2),
        ]  # fmt: skip
        assert curves[0]["y"] == tuple(record(step)["loss"] for step in range(1, 51))
        assert client.json(f"/api/metrics?run={found['one']}")["loss/web"] == 50
        details = client.json(f"/api/details?run={found['two']}")
        assert details["config"]["optim.lr"] == 0.5 and [
            one["event"] for one in details["events"]
        ] == ["finish", "start"]
        assert "INFO done" in client.json(f"/api/log?run={found['two']}")["text"]


def test_a_page_sees_a_new_step_within_two_seconds(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "one", 5, done=False)
    with serving(tmp_path / "runs") as (client, _):
        (one,) = ids(client).values()
        client.get(f"/api/series?run={one}&metric=loss")
        version = client.json("/api/state")["version"]
        append_record(folder, 6, loss=0.125)
        begun = time.monotonic()
        while not client.json(f"/api/state?since={version}")["runs"]:
            assert time.monotonic() - begun < 2.0
            time.sleep(0.05)
        (curve,) = unpack(client.get(f"/api/series?run={one}&metric=loss")[1])
        assert (curve["x"][-1], curve["y"][-1]) == (6.0, 0.125)
        assert time.monotonic() - begun < 2.0


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/board.html", "/%2e%2e/server.py", "/page/main.js", "/api/", "/api/../state", "/api/nothing",
     "//evil.example/", "/.git/config"],
)  # fmt: skip
def test_only_known_addresses_are_answered(tmp_path: Path, path: str) -> None:
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as (client, _):
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
    with serving(tmp_path / "runs") as (client, _):
        (one,) = ids(client).values()
        assert client.get(f"/api/file?run={one}&path=eval/plot.png")[1:2] == (b"\x89PNG picture",)
        outside = ["../../secret.png", "eval/linked.png", "outside/secret.png", "eval/../../../secret.png",
                   str(tmp_path / "secret.png"), "recipe.yaml",
                   "eval/report.md", "", "eval/plot.png%00.txt", "..%2f..%2fsecret.png"]  # fmt: skip
        for path in outside:
            assert client.get(f"/api/file?run={one}&path={path}")[0] == 404, path
        assert client.get("/api/file?run=nothing&path=eval/plot.png")[0] == 404
        details = client.json(f"/api/details?run={one}")
        assert details["reports"][0]["pictures"] == ["eval/plot.png"] and details["masks"][0][
            "table"
        ] == [[1.0, 0.0], [0.0, 0.0]]
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
    with serving(tmp_path / "runs") as (client, _):
        status, content, answered = client.get("/api/state", headers)
        assert (
            status == 403
            and b"runs" not in content
            and not any(name.lower().startswith("access-control") for name in answered)
        )
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


def test_names_of_headers_are_compared_without_case(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving(tmp_path / "runs", host="0.0.0.0", token=TOKEN) as (client, _):

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


def test_half_open_connections_lock_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 8)
    make_run(tmp_path / "runs" / "one", 3)
    with serving(tmp_path / "runs") as (client, _), ExitStack() as held:
        for number in range(12):
            connection = held.enter_context(
                closing(socket.create_connection(("127.0.0.1", client.port), timeout=20))
            )
            connection.sendall(b"GET / HTTP/1.1\r\nHost:"[: number * 2])
        for _ in range(3):
            assert client.get("/api/state")[0] == 200


def test_a_token_is_needed_and_compared_whole(tmp_path: Path) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving(tmp_path / "runs", host="0.0.0.0", token=TOKEN) as (client, _):
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
        assert (
            status == 303
            and headers["Location"] == "/"
            and "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
        )
        cookie = headers["Set-Cookie"].split(";")[0]
        assert client.get("/api/state", {"Cookie": cookie})[0] == 200
        assert client.get("/api/state", {"Cookie": cookie, "Host": "10.1.2.3:6080"})[0] == 200
        assert client.get("/api/state", {"Cookie": cookie, "Host": "evil.example"})[0] == 403


def test_where_the_token_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HEADWAY_BOARD_TOKEN", raising=False)
    assert (
        choose_token("127.0.0.1") is None
        and choose_token("localhost") is None
        and choose_token("::1") is None
    )
    made = choose_token("0.0.0.0")
    assert made is not None and len(made) == 48 and made != choose_token("0.0.0.0")
    monkeypatch.setenv("HEADWAY_BOARD_TOKEN", TOKEN)
    assert choose_token("127.0.0.1") == TOKEN == choose_token("192.168.1.1")
    monkeypatch.setenv("HEADWAY_BOARD_TOKEN", "short")
    with pytest.raises(ConfigError, match="at least 16 characters"):
        choose_token("127.0.0.1")
    assert Access("0.0.0.0", None, ["gpu.lab"])._is_our_host("GPU.lab:99")


@pytest.mark.parametrize(
    ("query", "status"),
    [("x=weight", 400), ("points=1", 400), ("points=99999", 400), ("points=many", 400), ("from=nan", 400), ("to=inf", 400),
     ("from=9&to=1", 200),
     ("metric=" + "m" * 40_000, 414), ("&".join(["a=1"] * 3000), 400)],
)  # fmt: skip
def test_requests_are_bounded(tmp_path: Path, query: str, status: int) -> None:
    make_run(tmp_path / "runs" / "one", 3)
    with serving(tmp_path / "runs") as (client, _):
        (one,) = ids(client).values()
        assert client.get(f"/api/series?run={one}&metric=loss&{query}")[0] == status
        assert (
            client.get("/api/state", method="POST")[0] == 501
            and client.get("/api/state", method="DELETE")[0] == 501
        )


def test_slow_clients_are_cut_and_do_not_hold_others_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 6)
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs") as (client, _):
        slow = [socket.create_connection(("127.0.0.1", client.port)) for _ in range(5)]
        for one in slow:
            one.sendall(b"GET /api/state HTTP/1.1\r\nHost: loc")
        assert client.get("/api/state")[0] == 200
        begun = time.monotonic()
        for one in slow:
            one.settimeout(5.0)
            while one.recv(
                4096
            ):  # an answer that the request is incomplete, or nothing; then the end
                pass
            one.close()
        assert time.monotonic() - begun < 4.0


def test_names_of_runs_are_text(tmp_path: Path) -> None:
    name = "<script>alert(1)</script>&\"'"
    make_run(tmp_path / "runs" / name.replace("/", "∕"), 2)
    with serving(tmp_path / "runs") as (client, _):
        _, content, headers = client.get("/api/state")
        assert (
            headers["Content-Type"] == "application/json"
            and headers["X-Content-Type-Options"] == "nosniff"
        )
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
