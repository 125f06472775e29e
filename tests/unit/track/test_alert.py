"""Alerts against receivers that take them, refuse them, hang or are gone."""

import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from support.chat_endpoint import ChatEndpoint, Handler, chat_endpoint

from headway.errors import ConfigError
from headway.track import alert as alert_module
from headway.track import sender as sender_module
from headway.track.alert import Config
from headway.track.base import Event
from headway.track.events import claim_crash_report, reset_crash_report, send_crash_alert
from headway.track.heartbeat import Config as HeartbeatConfig

SECRET = "hook-secret-42"


@pytest.fixture(autouse=True)
def _outside_of_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "KUBERNETES_POD_NAME", "MLP_TASK_ID", "ALERT_WEBHOOK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def take(request: Handler, _: int) -> bool:
    return request.answer(b'{"code": 0}')


def watch(
    server: ChatEndpoint, monkeypatch: pytest.MonkeyPatch, happens: list[Event], /, **settings: Any
) -> list[dict[str, Any]]:
    monkeypatch.setenv("MY_HOOK", f"{server.url}/{SECRET}?t={SECRET}")
    tracker = Config(url_env="MY_HOOK", **settings).build(Path(), "run")
    for step, event in enumerate(happens, start=1):
        tracker.log(step, {"step": step, "loss": 1.0 / step})
        tracker.event(event, f"{event} in step {step}", step)
    tracker.close()
    return server.seen


def test_each_event_is_reported_with_all_its_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_POD_NAME", "job7-worker-0")
    with chat_endpoint(take) as server:
        seen = [request["body"] for request in watch(server, monkeypatch, list(get_args(Event)))]
    assert [(alert["event"], alert["step"], alert["loss"]) for alert in seen] == [
        (name, step, 1.0 / step) for step, name in enumerate(get_args(Event), start=1)
    ]
    assert all(
        alert["run"] == "run"
        and alert["job"] == "job7"
        and abs(alert["timestamp"] - time.time()) < 60
        for alert in seen
    )
    assert seen[2]["text"] == "crash in step 3"


def test_feishu_and_slack_get_the_form_they_know(monkeypatch: pytest.MonkeyPatch) -> None:
    with chat_endpoint(take) as server:
        seen = watch(server, monkeypatch, ["start", "finish"], form="feishu", events=("start",))
        watch(server, monkeypatch, ["start"], form="slack", events=("start",))
    feishu = seen[0]["body"]
    text = "start in step 1"
    post = {"zh_cn": {"title": "none_run", "content": [[{"tag": "text", "text": text}]]}}
    assert feishu == {
        "timestamp": feishu["timestamp"],
        "msg_type": "post",
        "content": {"post": post},
    }
    assert isinstance(feishu["timestamp"], int)
    assert seen[0]["headers"]["Content-Type"] == "application/json;charset=utf-8"
    assert seen[1]["body"] == {"text": f"*none_run*\n{text}"}


def test_a_command_reads_the_message_without_a_shell(tmp_path: Path) -> None:
    target = tmp_path / "$(touch x); it's"
    config = Config(form="command", command=("tee", "-a", str(target)), events=("finish",))
    tracker = config.build(tmp_path, "run")
    tracker.event("finish", "done", 1)
    tracker.close()
    assert json.loads(target.read_text())["event"] == "finish"
    assert list(tmp_path.iterdir()) == [target]


def test_messages_about_one_event_are_rate_limited_and_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[Event] = ["nan"] * 5
    with chat_endpoint(take) as server:
        assert len(watch(server, monkeypatch, events, events=("nan",), every_seconds=60.0)) == 1
    clock = iter([0.0, 1.0, 2.0, 90.0, 91.0])
    with chat_endpoint(take) as server, monkeypatch.context() as patch:
        patch.setattr(
            alert_module, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
        )
        texts = [
            request["body"]["text"]
            for request in watch(server, monkeypatch, events, events=("nan",), every_seconds=60.0)
        ]
    assert texts == ["nan in step 1", "nan in step 4 (2 more since the last message)"]


def test_each_event_counts_its_own_messages_and_only_those_since_its_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = {"nan": [0, 1, 90, 91, 92, 200], "spike": [0, 2, 3, 4, 100]}
    happens = sorted((moment, event) for event, many in times.items() for moment in many)
    clock = iter([float(moment) for moment, _ in happens])
    with chat_endpoint(take) as server, monkeypatch.context() as patch:
        patch.setattr(
            alert_module, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time)
        )
        seen = watch(server, monkeypatch, [event for _, event in happens], every_seconds=60.0)  # pyright: ignore[reportArgumentType]
    said = [
        (request["body"]["event"], request["body"]["text"].partition("(")[2]) for request in seen
    ]
    more = [("nan", ""), ("spike", ""), ("nan", "1 more"), ("spike", "3 more"), ("nan", "2 more")]
    assert [(event, text.partition(" since")[0]) for event, text in said] == more


def hang(_: Handler, __: int) -> bool:
    time.sleep(3)
    return True


def refuse(request: Handler, _: int) -> bool:
    return request.answer(SECRET.encode(), 403)


def elsewhere(request: Handler, _: int) -> bool:
    return request.answer(b"", 302, Location="/other")


def unknown_to_feishu(request: Handler, _: int) -> bool:
    return request.answer(b'{"code": 19001, "msg": "param invalid"}')


def no_http(request: Handler, _: int) -> bool:
    request.wfile.write(f"{SECRET}\n".encode())
    return False


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (hang, "no answer in 0.2 s"),
        (refuse, "HTTP 403"),
        (elsewhere, "HTTP 302"),
        (unknown_to_feishu, "code 19001"),
        (no_http, "BadStatusLine"),
    ],
)
def test_a_receiver_that_fails_costs_nothing_and_is_named_once_without_its_address(
    fault: Any, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with chat_endpoint(fault) as server:
        watch(server, monkeypatch, ["start", "finish"], form="feishu", timeout_seconds=0.2)
    warnings = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert len(warnings) == 1
    assert said in warnings[0]
    assert SECRET not in caplog.text


def test_a_receiver_that_hangs_or_is_gone_never_blocks_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_module, "CLOSE_SECONDS", 0.1)
    with chat_endpoint(hang) as server:
        started = time.monotonic()
        watch(server, monkeypatch, ["nan"] * 500, every_seconds=0.0)
        assert time.monotonic() - started < 2
    assert "32 messages are already queued" in caplog.text
    caplog.clear()
    monkeypatch.setattr(sender_module, "CLOSE_SECONDS", 10.0)
    watch(server, monkeypatch, ["start"])
    assert "refused" in caplog.text
    assert SECRET not in caplog.text


def test_an_alert_without_an_address_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="'ALERT_WEBHOOK', and no such"):
        Config().build(Path(), "run")


@pytest.mark.parametrize(
    "address", [SECRET, f"ftp://{SECRET}", f"http://h:x{SECRET}/", f"http://h/a b{SECRET}"]
)
def test_an_address_that_is_none_is_refused_without_showing_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALERT_WEBHOOK", address)
    with pytest.raises(ConfigError, match="holds no http") as caught:
        Config().build(Path(), "run")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("command", [(), ("no-such-program-here",)], ids=["none", "unknown"])
def test_a_program_that_does_not_exist_is_refused_before_training(
    command: tuple[str, ...],
) -> None:
    with pytest.raises(ConfigError, match="needs a program"):
        Config(form="command", command=command).build(Path(), "run")


def test_a_monitor_gets_every_number_of_some_steps_flat_and_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CLUSTER_NAME", "north")
    with chat_endpoint(take) as server:
        monkeypatch.setenv("MONITOR_ADDRESS", f"{server.url}/{SECRET}")
        tracker = HeartbeatConfig(every=20).build(Path(), "run")
        for step in range(10, 80, 10):
            tracker.log(
                step,
                {
                    "step": step,
                    "loss": float("nan"),
                    "valid": {"a b": {"loss": 2.0}},
                    "time": {"tgs": 5.0},
                },
            )
            while len(server.seen) < step // 20 + 1:
                time.sleep(0.01)
        tracker.close()
    bodies = [request["body"] for request in server.seen]
    assert [body["step"] for body in bodies] == [10, 20, 40, 60]
    who = {"msg_type": "train_metrics", "cluster": "north", "job": "none", "run": "run"}
    assert bodies[0] == {**who, "step": 10, "loss": None, "valid_a_b_loss": 2.0, "tgs": 5.0}


def test_a_monitor_that_hangs_never_blocks_a_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sender_module, "CLOSE_SECONDS", 0.1)
    with chat_endpoint(hang) as server:
        monkeypatch.setenv("MONITOR_ADDRESS", f"{server.url}/{SECRET}")
        tracker = HeartbeatConfig(every=1).build(Path(), "run")
        started = time.monotonic()
        for step in range(200):
            tracker.log(step, {"step": step})
        tracker.close()
        assert time.monotonic() - started < 2
    assert "heartbeats cannot be sent" in caplog.text
    assert SECRET not in caplog.text


def test_a_crash_is_reported_once_over_ranks_and_restarts_of_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "logs").mkdir()
    monkeypatch.setenv("HEADWAY_SUPERVISOR", "job-1")
    reset_crash_report(tmp_path)
    assert claim_crash_report(tmp_path, "trace\nValueError: at 17")
    # another rank of the same start
    assert not claim_crash_report(tmp_path, "rank 0 lost its peer")
    reset_crash_report(tmp_path)
    assert not claim_crash_report(tmp_path, "trace\nValueError: at 18")  # the same after a restart
    reset_crash_report(tmp_path)
    assert claim_crash_report(tmp_path, "KeyError: other")
    monkeypatch.setenv("HEADWAY_SUPERVISOR", "job-2")
    reset_crash_report(tmp_path)
    with chat_endpoint(take) as server:
        monkeypatch.setenv("ALERT_WEBHOOK", server.url)
        assert send_crash_alert(
            [Config(), HeartbeatConfig()], tmp_path, "trace\nValueError: at 17", 5
        )
        assert not send_crash_alert([Config()], tmp_path, "ValueError: at 17", 5)
    assert [(request["body"]["event"], request["body"]["step"]) for request in server.seen] == [
        ("crash", 5)
    ]
    assert json.loads((tmp_path / "events.jsonl").read_text())["event"] == "crash"
