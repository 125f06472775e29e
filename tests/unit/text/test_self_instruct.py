"""Self-instruct against an endpoint that answers, stalls, talks nonsense, refuses and dies."""

import email.utils
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.chat_endpoint import Handler, chat_endpoint, completion, tasks_for

from headway.cli import main
from headway.errors import ConfigError, DataError
from headway.prepare.validate import ValidateOptions, validate
from headway.text.self_instruct import endpoint as endpoint_module
from headway.text.self_instruct.endpoint import Client, EndpointError
from headway.text.self_instruct.generate import NAME, Journal, self_instruct
from headway.text.self_instruct.settings import Endpoint, SelfInstruct

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE_SECONDS", 0.02)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def tasks_in(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for line in (folder / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def ask(url: str, **settings: Any) -> str:
    return Client(Endpoint(url, "m", **settings)).ask("hello").text


def test_exactly_the_wanted_number_of_tasks_is_written_and_nothing_is_asked_twice(
    tmp_path: Path,
) -> None:
    with chat_endpoint() as server:
        endpoint = Endpoint(server.url, "m", KEY)
        report = self_instruct(SelfInstruct(10, tmp_path, requests_per_round=2), endpoint)
        again = self_instruct(SelfInstruct(10, tmp_path, requests_per_round=5), endpoint)
    assert report == again
    assert len(server.seen) == report.requests == 4
    assert (report.kept, report.prompt_tokens, report.completion_tokens) == (10, 40, 80)
    assert report.dropped == {"more than wanted": 6}
    tasks = tasks_in(tmp_path)
    assert len({task["instruction"] for task in tasks}) == 10
    for task in tasks:
        assert len(task["most_similar"]) == 10
        assert 0 <= task["avg_similarity"] <= 0.7


def test_tasks_are_valid_data_for_fine_tuning(tmp_path: Path) -> None:
    with chat_endpoint() as server:
        self_instruct(
            SelfInstruct(10, tmp_path, requests_per_round=2), Endpoint(server.url, "m", KEY)
        )
    for path in (tmp_path, tmp_path / "tasks.jsonl"):
        checked = validate([path], ValidateOptions("chat"))
        assert (checked.good, checked.bad) == (10, [])


def test_a_request_has_the_key_and_the_sampling_of_self_instruct(tmp_path: Path) -> None:
    with chat_endpoint() as server:
        self_instruct(
            SelfInstruct(10, tmp_path, requests_per_round=2), Endpoint(server.url, "m", KEY)
        )
    first = server.seen[0]
    assert first["path"] == "/v1/chat/completions"
    assert first["headers"]["Authorization"] == f"Bearer {KEY}"
    assert first["body"]["temperature"] == 1.0
    assert first["body"]["max_tokens"] == 3072


def test_a_server_that_stalls_or_dribbles_is_asked_again(tmp_path: Path) -> None:
    def fault(request: Handler, number: int) -> bool:
        if number == 0:
            time.sleep(2.0)
        elif number == 1:
            request.send_response(200)
            request.end_headers()
            for _ in range(40):
                request.wfile.write(b" ")
                request.wfile.flush()
                time.sleep(0.05)
        return number < 2

    with chat_endpoint(fault) as server:
        endpoint = Endpoint(server.url, "m", timeout_seconds=1.0)
        report = self_instruct(SelfInstruct(4, tmp_path, requests_per_round=1), endpoint)
    assert report.kept == 4
    assert report.retries["timeout"] >= 2


def test_faults_that_may_pass_are_tried_again_and_counted(tmp_path: Path) -> None:
    def fault(request: Handler, number: int) -> bool:
        match number:
            case 0:
                return request.answer(b"<html>busy</html>")
            case 1:
                return request.answer(b'{"choices": []}')
            case 2:
                return request.answer(b"\xff\x00", 503)
            case 3:
                return request.answer(b'{"choices": [{"message": {"content": null}}]}')
            case 4:
                return request.answer(b"", 429, Retry_After="0")
            case 5:
                request.connection.close()
                return True
            case 6:
                return request.answer(completion("x")[:-5], Content_Length="500")
            case _:
                return False

    with chat_endpoint(fault) as server:
        report = self_instruct(
            SelfInstruct(4, tmp_path, requests_per_round=1), Endpoint(server.url, "m")
        )
    assert report.retries == {"nonsense": 3, "connection": 2, "503": 1, "429": 1}


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_the_pause_a_server_asks_for_is_waited_for(tmp_path: Path, form: str) -> None:
    def fault(request: Handler, number: int) -> bool:
        later = "1" if form == "seconds" else email.utils.formatdate(time.time() + 2, usegmt=True)
        return number == 0 and request.answer(b"slow down", 429, Retry_After=later)

    with chat_endpoint(fault) as server:
        self_instruct(SelfInstruct(4, tmp_path, requests_per_round=1), Endpoint(server.url, "m"))
    assert server.seen[1]["time"] - server.seen[0]["time"] >= 0.9


def test_a_pause_too_long_to_wait_for_ends_the_run() -> None:
    with (
        chat_endpoint(
            lambda request, _: request.answer(b"quota", 429, Retry_After="86400")
        ) as server,
        pytest.raises(EndpointError, match="86400 s"),
    ):
        ask(server.url)


def test_requests_keep_to_the_rate_limit(tmp_path: Path) -> None:
    started = time.monotonic()
    with chat_endpoint() as server:
        self_instruct(
            SelfInstruct(16, tmp_path, requests_per_round=4),
            Endpoint(server.url, "m", requests_per_minute=600),
        )
    assert len(server.seen) == 4
    assert server.seen[-1]["time"] - started >= 0.3


def test_retries_have_an_end() -> None:
    with (
        chat_endpoint(lambda request, _: request.answer(b"down", 500)) as server,
        pytest.raises(EndpointError, match=r"HTTP 500 down \(after 3"),
    ):
        ask(server.url, max_retries=2)
    assert len(server.seen) == 3


@pytest.mark.parametrize(
    ("status", "hint"),
    [(401, "OPENAI_API_KEY"), (404, "--model"), (400, "--max-tokens"), (302, "--endpoint")],
)
def test_what_will_not_pass_ends_at_once_without_showing_the_key(status: int, hint: str) -> None:
    def refuse(request: Handler, _: int) -> bool:
        return request.answer(f"bad key {KEY}".encode(), status, Location="/elsewhere")

    with chat_endpoint(refuse) as server, pytest.raises(EndpointError, match=hint) as caught:
        ask(server.url, key=KEY)
    assert len(server.seen) == 1
    assert KEY not in str(caught.value)


def test_answers_without_a_task_end_the_run(tmp_path: Path) -> None:
    wanted = SelfInstruct(4, tmp_path, requests_per_round=1, give_up_after=3)
    said = r"3 answers in a row had no task to keep .*no task in the answer 3"
    with (
        chat_endpoint(
            lambda request, _: request.answer(completion("I would rather not."))
        ) as server,
        pytest.raises(EndpointError, match=said),
    ):
        self_instruct(wanted, Endpoint(server.url, "m"))
    assert not (tmp_path / "tasks.jsonl").exists()


def test_tasks_kept_before_the_server_dies_are_not_lost(tmp_path: Path) -> None:
    wanted = SelfInstruct(20, tmp_path, requests_per_round=2)
    dying = chat_endpoint(lambda request, number: number >= 3 and request.answer(b"", 500))
    with dying as server, pytest.raises(EndpointError, match="12/20 tasks are in"):
        self_instruct(wanted, Endpoint(server.url, "m", max_retries=1))
    before = tasks_in(tmp_path)
    with pytest.raises(EndpointError, match="cannot be reached"):
        self_instruct(wanted, Endpoint(server.url, "m", max_retries=0))
    with chat_endpoint() as server:
        assert self_instruct(wanted, Endpoint(server.url, "m")).kept == 20
    after = tasks_in(tmp_path)
    assert after[:12] == before
    assert len({task["instruction"] for task in after}) == 20


def test_a_killed_run_started_again_ends_as_if_undisturbed(tmp_path: Path) -> None:
    def slow(_: Handler, __: int) -> None:
        time.sleep(0.05)

    with chat_endpoint(slow) as server:
        whole = self_instruct(
            SelfInstruct(120, tmp_path / "whole", requests_per_round=2), Endpoint(server.url, "m")
        )
        arguments = [
            "data",
            "self-instruct",
            "--endpoint",
            server.url,
            "--model",
            "m",
            "--num",
            "120",
            "--out",
            str(tmp_path / "killed"),
        ]
        arguments += ["--requests-per-round", "2"]
        process = subprocess.Popen(
            [sys.executable, "-m", "headway", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        journal = tmp_path / "killed" / NAME
        end = time.monotonic() + 60
        while time.monotonic() < end and not (
            journal.exists() and journal.read_bytes().count(b"\n") >= 4
        ):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert journal.read_bytes().count(b"\n") < whole.requests + 1, (
            "killed too late to show anything"
        )
        with open(journal, "ab") as file:
            file.write(b'{"number": 99, "kept": [{"instr')
        assert main(arguments) == 0
    assert tasks_in(tmp_path / "killed") == tasks_in(tmp_path / "whole")


def test_other_settings_another_writer_and_damage_are_refused(tmp_path: Path) -> None:
    with chat_endpoint() as server:
        endpoint = Endpoint(server.url, "m")
        self_instruct(SelfInstruct(4, tmp_path, requests_per_round=1), endpoint)
        with pytest.raises(ConfigError, match="seed was 0 and is 1"):
            self_instruct(SelfInstruct(8, tmp_path, seed=1), endpoint)
        with Journal(tmp_path / "held", {}), pytest.raises(ConfigError, match="another process"):
            self_instruct(SelfInstruct(8, tmp_path / "held"), endpoint)
        (tmp_path / NAME).write_bytes((tmp_path / NAME).read_bytes() + b"{]\n")
        with pytest.raises(DataError, match=":3: damaged"):
            self_instruct(SelfInstruct(8, tmp_path), endpoint)


def test_settings_of_a_run_that_never_got_an_answer_may_change(tmp_path: Path) -> None:
    with chat_endpoint() as server:
        with Journal(tmp_path, {"model": "typo"}):
            pass
        assert self_instruct(SelfInstruct(4, tmp_path), Endpoint(server.url, "m")).kept == 4


def test_seed_tasks_of_ones_own_are_shown(tmp_path: Path) -> None:
    seeds = [
        {"instruction": f"Describe thing number {k} at length", "output": "x"} for k in range(3)
    ]
    (tmp_path / "seeds.jsonl").write_text("".join(json.dumps(seed) + "\n" for seed in seeds))
    with chat_endpoint() as server:
        self_instruct(
            SelfInstruct(1, tmp_path / "out", seeds=tmp_path / "seeds.jsonl"),
            Endpoint(server.url, "m"),
        )
        assert "Describe thing number 2" in server.seen[0]["body"]["messages"][0]["content"]
        (tmp_path / "seeds.jsonl").write_text('{"instruction": "Only one", "output": ["x"]}\n')
        with pytest.raises(DataError, match=r"seeds\.jsonl:1: output must be a text"):
            self_instruct(
                SelfInstruct(1, tmp_path / "out", seeds=tmp_path / "seeds.jsonl"),
                Endpoint(server.url, "m"),
            )


def test_chinese_tasks_are_asked_for_in_chinese(tmp_path: Path) -> None:
    answer = "<|4|>\n指令：说出三条大河的名字。\n输入：<无>\n输出：长江、黄河、珠江\n<|5|>\n指令：Name three rivers now.\n输入：无\n输出：x"
    with chat_endpoint(lambda request, _: request.answer(completion(answer))) as server:
        report = self_instruct(
            SelfInstruct(1, tmp_path, language="zh", requests_per_round=1),
            Endpoint(server.url, "m"),
        )
    assert "请再写 20 个新任务" in server.seen[0]["body"]["messages"][0]["content"]
    assert tasks_in(tmp_path)[0]["instruction"] == "说出三条大河的名字。"
    assert report.kept == 1


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://x",
        "http://",
        "http://h:99999/v1",
        "http://h h/v1",
        "http://[::1/v1",
    ],
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--endpoint is"):
        Endpoint(url, "m")


def test_addresses_are_completed_and_secrets_in_them_never_shown() -> None:
    for url in ("http://h:1", "http://h:1/v1/", "http://h:1/v1/chat/completions"):
        assert Endpoint(url, "m").address == "http://h:1/v1/chat/completions"
    with_query = Endpoint(f"https://h/x?code={KEY}", "m", KEY)
    assert with_query.address == f"https://h/x/chat/completions?code={KEY}"
    assert KEY not in with_query.shown_address
    for url, key in ((f"http://me:{KEY}@h/v1", None), ("http://h/v1", KEY + "\nx")):
        with pytest.raises(ConfigError) as caught:
            Endpoint(url, "m", key)
        assert KEY not in str(caught.value)


def test_the_verb_reports_counts_and_keeps_the_key_to_itself(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    caplog.set_level(logging.DEBUG)

    def echo(request: Handler, number: int) -> bool:
        return number == 0 and request.answer(KEY.encode(), 500)

    with chat_endpoint(echo) as server:
        arguments = [
            "-v",
            "data",
            "self-instruct",
            "--endpoint",
            server.url,
            "--model",
            "m",
            "--num",
            "4",
            "--out",
            str(tmp_path / "out"),
        ]
        assert main([*arguments, "--json"]) == 0
        shown = capsys.readouterr()
        assert json.loads(shown.out)["retries"] == {"500": 1}
        assert main(arguments) == 0
        table = capsys.readouterr()
        assert main([*arguments, "--language", "fr"]) == 2
        assert main([*arguments, "--num", "0"]) == 2
    mistakes = capsys.readouterr()
    assert "--language is 'fr'" in mistakes.err
    assert "--num is 0" in mistakes.err
    written = "".join(path.read_text() for path in (tmp_path / "out").rglob("*") if path.is_file())
    everything = [shown.out, shown.err, table.out, table.err, mistakes.err, caplog.text, written]
    assert "4 tasks from" in table.out
    assert "retrying" in shown.err + caplog.text
    assert not any(KEY in text or "Traceback" in text for text in everything)
    assert os.environ["OPENAI_API_KEY"] == KEY


def test_the_answers_of_the_test_server_differ_by_prompt_alone() -> None:
    assert tasks_for("a") == tasks_for("a") != tasks_for("b")
