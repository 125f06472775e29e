"""Hosts that fail, over a stand-in for ssh; and the agent of a host, which lets no rank outlive its session."""

import json
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support import fake_ssh

from headway.errors import ConfigError, LaunchError
from headway.launch.ssh import checks, rank_agent
from headway.launch.ssh.checks import HostsNeed, check_hosts, explain_end
from headway.launch.ssh.connection import SshOptions
from headway.launch.ssh.hosts import parse_hosts
from headway.launch.ssh.rank_agent import RankAgent, end_earlier
from headway.launch.targets.base import Job
from headway.launch.targets.ssh import SshTarget, needed_paths, plan_ssh
from headway.train.config import Recipe
from headway.train.launch_config import SshConfig

HERE = SshOptions(sys.executable)


@pytest.fixture
def ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in fake_ssh.install(tmp_path, "a", "b").items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_every_host_that_fails_gets_one_line(ssh: Path) -> None:
    hosts = parse_hosts("a,dead,locked,new,old")
    with pytest.raises(LaunchError) as error:
        check_hosts(hosts, HERE, HostsNeed(str(ssh), "runs/x", ("127.0.0.1", 0)))
    lines = str(error.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["dead", "locked", "new", "old"]
    wanted = (
        "Connection refused",
        "ssh-copy-id",
        "host key is not known",
        "headway is 0.0.1; here it is",
    )
    assert all(text in line for text, line in zip(wanted, lines, strict=True)), lines
    assert error.value.exit_code == 2


def test_a_host_that_never_answers_is_given_up(ssh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "HELLO_SECONDS", 1.0)
    with pytest.raises(LaunchError, match=r"^mute: no answer within 1 s"):
        check_hosts(parse_hosts("mute"), HERE, HostsNeed(str(ssh), "runs/x", ("127.0.0.1", 0)))


@pytest.mark.slow
def test_two_hosts_that_share_a_folder_pass(ssh: Path) -> None:
    (ssh / "data.bin").write_bytes(b"x")
    need = HostsNeed(
        str(ssh), "runs/x", ("127.0.0.1", 0), ("data.bin", "*.bin"), (None, 3), uses_gpus=False
    )
    checks = check_hosts(parse_hosts("a,b"), HERE, need)
    assert checks.ranks == (1, 3)
    assert {"versions", "shared folder", "atomic rename"} <= {
        check.name for check in checks.checks if check.state == "ok"
    }
    assert not (ssh / "runs").exists(), "the checks leave nothing"


@pytest.mark.slow
def test_paths_that_a_host_lacks_are_named(ssh: Path) -> None:
    with pytest.raises(LaunchError, match=r"^a: not there: none/x, no\*\. Copy"):
        check_hosts(
            parse_hosts("a"),
            HERE,
            HostsNeed(str(ssh), "runs/x", ("127.0.0.1", 0), ("none/x", "no*")),
        )


@pytest.mark.parametrize(
    ("code", "errors", "says"),
    [
        (127, ["sh: 1: exec: /p: not found"], "no Python at /p"),
        (1, ["/p: No module named headway.launch"], "has no headway, or an older one"),
        (2, ["unknown option -P"], "older than 3.11"),
        (
            255,
            ["ssh: Could not resolve hostname x: Name or service not known"],
            "cannot connect: ssh: Could not resolve",
        ),
        (3, ["boom"], "exit code 3: boom"),
        (9, [], "exit code 9"),
    ],
)
def test_the_end_of_a_connection_is_explained(code: int, errors: list[str], says: str) -> None:
    assert says in explain_end(code, errors, "/p")


def test_a_job_without_hosts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no hosts"):
        plan_ssh(SshConfig())
    with pytest.raises(LaunchError, match="without hosts"):
        SshTarget().submit(Job(Path("r.yaml"), tmp_path))


def test_an_ssh_configuration_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        plan_ssh(SshConfig(hosts=("a",), config=str(tmp_path / "none"), master="x"))


def test_hosts_of_the_command_line_win_over_those_of_the_recipe() -> None:
    config = SshConfig(hosts=("a", "b"), python="/opt/p", workdir="w", master="[::1]:29500")
    plan = plan_ssh(config, parse_hosts("c"))
    assert plan.hosts[0].name == "c"
    assert plan.ssh.python == "/opt/p"
    assert plan.workdir == "w"
    assert plan.master == ("::1", 29500)


def test_local_paths_of_a_recipe_must_be_on_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from headway import Callback\n\nclass Mine(Callback):\n    pass\n"
    )
    sources = "data: {train: ['./d/a@0.5', './d/b@0.5', org/set@0.5], valid: v}"
    text = (
        "{tokenizer: toks/t.json, init: {from: s3://b/x, masks: m.tsv}, callbacks: ['./mine.py:Mine'], "
        + sources
        + "}"
    )
    (tmp_path / "r.yaml").write_text(text)
    recipe = Recipe.load(tmp_path / "r.yaml", ["steps=2"])
    paths = needed_paths(Job(tmp_path / "r.yaml", Path("runs/r"), ("steps=2",)), recipe)
    assert sorted(paths) == ["./d/a", "./d/b", "./mine.py", "m.tsv", "toks/t.json", "v"]


CHILD = (
    "import os, signal, sys, time\n"
    "def save(number, frame):\n    print('saved', flush=True)\n    sys.exit(128 + number) if MODE != 'stubborn' else None\n"
    "for number in (2, 15): signal.signal(number, save)\n"
    "print('up', os.environ['HEADWAY_RESTARTS'], os.environ['WITH'], ' '.join(sys.argv[1:]), flush=True)\n"
    "until = time.time() + 60\nwhile time.time() < until and MODE != 'short': time.sleep(0.02)\nsys.exit(7)"
)


class Other:
    """The launcher's side of an agent."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, Any]] = []
        self.messages: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def is_up(self) -> bool:
        return any(str(message.get("log", "")).startswith("up") for message in self.sent)

    def logs(self) -> list[str]:
        return [message["log"] for message in self.sent if "log" in message]


@pytest.fixture
def agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[RankAgent, Other]]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rank_agent, "SAVE_SECONDS", 0.5)

    def make(mode: str, silent_seconds: float = 30.0) -> tuple[RankAgent, Other]:
        command = [sys.executable, "-S", "-c", f"MODE = {mode!r}\n" + CHILD]
        monkeypatch.setattr(rank_agent, "headway_command", lambda words: [*command, *words])
        start = {
            "node": 1, "size": 2, "workdir": str(tmp_path), "run": "runs/x", "recipe": "steps: 3\n",
            "arguments": ["a=b", "--resume", "auto"],
            "ranks": 4, "master": ["h", 5], "environment": {"WITH": "value"}, "job": "j", "restarts": 2, "hang_seconds": 60.0,
        }  # fmt: skip
        other = Other()
        return RankAgent(
            start,
            other.sent.append,
            lambda seconds: other.messages.get(timeout=seconds),
            silent_seconds,
        ), other

    return make


def when_up(other: Other, message: dict[str, Any] | None) -> None:
    """Send a message as soon as the child has started."""
    import threading

    def work() -> None:
        deadline = time.monotonic() + 30
        while not other.is_up() and time.monotonic() < deadline:
            time.sleep(0.02)
        other.messages.put(message)

    threading.Thread(target=work, daemon=True).start()


def test_the_ranks_of_a_host_get_recipe_options_and_variables(
    agent: Callable[..., tuple[RankAgent, Other]], tmp_path: Path
) -> None:
    first, other = agent("short")
    assert first.run() == 7
    words = "train runs/x/launch-recipe.yaml a=b --resume auto --nproc 4 --nnodes 2 --node-rank 1 --master h:5"
    assert other.logs() == [f"up 2 value {words}"]
    assert other.sent[-1] == {"ended": 7, "step": -1}
    assert (tmp_path / "runs/x/launch-recipe.yaml").read_text() == "steps: 3\n"
    assert not list((tmp_path / "runs/x/logs").iterdir()), "the record of the child is gone"


@pytest.mark.parametrize(("mode", "code"), [("polite", 143), ("stubborn", 137)])
def test_ranks_end_with_a_save_when_the_session_is_gone(
    mode: str, code: int, agent: Callable[..., tuple[RankAgent, Other]]
) -> None:
    first, other = agent(mode)
    when_up(other, None)
    assert first.run() == code
    assert "saved" in other.logs()


def test_ranks_end_when_the_session_is_silent(
    agent: Callable[..., tuple[RankAgent, Other]],
) -> None:
    first, other = agent("polite", silent_seconds=1.0)
    assert first.run() in (143, 128 + signal.SIGTERM)
    assert other.sent[-1]["ended"] == 143


def test_signals_and_kills_of_the_launcher_reach_the_ranks(
    agent: Callable[..., tuple[RankAgent, Other]],
) -> None:
    first, other = agent("polite")
    when_up(other, {"do": "signal", "number": 2})
    assert first.run() == 130
    assert "saved" in other.logs()
    two, other = agent("polite")
    when_up(other, {"do": "kill"})
    assert two.run() == 137
    assert "saved" not in other.logs()


def test_what_an_earlier_session_left_is_ended_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import asdict

    from headway.runtime.run_lock import Holder, this_process

    monkeypatch.setattr(rank_agent, "SAVE_SECONDS", 0.3)
    words = [
        sys.executable,
        "-S",
        "-c",
        "import time; time.sleep(60)",
        "headway",
        "train",
        "runs/x/launch-recipe.yaml",
    ]
    with subprocess.Popen(words) as child:
        while not Path(f"/proc/{child.pid}/cmdline").read_bytes():  # for a moment after the start
            time.sleep(0.01)
        gone = Holder(**{**asdict(this_process()), "pid": 2**22, "started": "1"})
        (tmp_path / "r.json").write_text(json.dumps({**asdict(gone), "child": child.pid}))
        end_earlier(tmp_path / "r.json")
        assert child.wait(5) == -signal.SIGKILL
    with subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"]) as stranger:
        (tmp_path / "r.json").write_text(json.dumps({**asdict(gone), "child": stranger.pid}))
        end_earlier(tmp_path / "r.json")
        assert stranger.poll() is None, "a process id that was reused"
        stranger.kill()
    for content in ("", "{}", "[]"):
        (tmp_path / "r.json").write_text(content)
        end_earlier(tmp_path / "r.json")
