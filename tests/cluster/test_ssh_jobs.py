"""Jobs on two real ssh servers: a host that fails, a connection that is lost and Ctrl-C cost no step, and nothing is left running."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file
from support.daemons import find_program
from support.ssh_servers import SshHosts

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RECIPE = """
run: {name: job}
device: cpu
model: {hidden_size: 16, num_layers: 1, num_heads: 2, num_kv_heads: 2, ffn_size: 24, vocab_size: 64, max_seq_len: 64}
batch: {rows: 4}
data: {seq_len: 32}
steps: 400
eval: {every: null}
checkpoint: {every: 20, keep_last: 3}
log: {every: 50}
supervise: {backoff_seconds: 0.2, max_restarts: 3, hang_seconds: 600}
"""
HEADWAY = [sys.executable, "-P", "-m", "headway"]
ONE_THREAD = "OMP_NUM_THREADS=1"
WAIT_SECONDS = 120.0


class Jobs:
    """`headway launch ssh` in one folder."""

    def __init__(self, folder: Path, ssh: SshHosts) -> None:
        self.folder = folder
        self.ssh = ssh
        (folder / "r.yaml").write_text(RECIPE)

    def words(self, *more: str, hosts: str | None = None) -> list[str]:
        where = [
            "--hosts",
            ",".join(self.ssh.names) if hosts is None else hosts,
            "--ssh-config",
            str(self.ssh.config),
        ]
        return [*HEADWAY, "launch", "ssh", "r.yaml", *where, "--env", ONE_THREAD, *more]

    def start(self, *more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.words(*more),
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )

    def run(self, *more: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.words(*more, **options),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def status(self, name: str = "job") -> dict[str, Any]:
        done = subprocess.run(
            [*HEADWAY, "launch", "status", f"runs/{name}", "--json"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
        )
        return json.loads(done.stdout)

    def log(self, name: str = "job") -> str:
        path = self.folder / "runs" / name / "logs" / "launch.log"
        return path.read_text() if path.exists() else ""

    def wait(self, ready: Callable[[], Any], condition: str, name: str = "job") -> Any:
        deadline = time.monotonic() + WAIT_SECONDS
        while not (result := ready()):
            assert time.monotonic() < deadline, f"{condition}:\n{self.log(name)[-3000:]}"
            time.sleep(0.05)
        return result

    def saved(self, step: int, name: str = "job") -> None:
        """Wait for a checkpoint of this step or a later one."""
        folder = self.folder / "runs" / name / "checkpoints"
        self.wait(
            lambda: any(int(path.name[5:]) >= step for path in folder.glob("step-????????")),
            f"step {step}",
            name,
        )

    def weights(self, name: str = "job") -> dict[str, bytes]:
        return {
            key: value.tobytes()
            for key, value in load_file(
                self.folder / "runs" / name / "final" / "model.safetensors"
            ).items()
        }

    def rank_pid(self, rank: int, name: str = "job") -> int:
        return json.loads(
            (
                self.folder / "runs" / name / "logs" / "heartbeat" / f"rank-{rank:05}.json"
            ).read_text()
        )["pid"]

    def processes(self) -> list[str]:
        """What still runs for a job of this folder: agents and ranks."""
        listed: list[str] = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                folder = os.readlink(path / "cwd")
            except OSError:
                continue
            if folder == str(self.folder) and "headway" in words:
                listed.append(f"{path.name} {words}")
        return listed

    def all_gone(self) -> None:
        self.wait(lambda: not self.processes(), "processes left", "job")


@pytest.fixture
def jobs(tmp_path: Path, ssh: SshHosts) -> Iterator[Jobs]:
    jobs = Jobs(tmp_path.resolve(), ssh)
    yield jobs
    for line in jobs.processes():  # only after a failure
        os.kill(int(line.split()[0]), signal.SIGKILL)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The weights of a run on one machine that nothing disturbs."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "r.yaml").write_text(RECIPE)
    name, _, value = ONE_THREAD.partition("=")
    subprocess.run(
        [*HEADWAY, "train", "r.yaml", "--nproc", "2"],
        cwd=folder,
        env={**os.environ, name: value},
        check=True,
        capture_output=True,
        timeout=300,
    )
    return {
        key: tensor.tobytes()
        for key, tensor in load_file(
            folder / "runs" / "job" / "final" / "model.safetensors"
        ).items()
    }


def server_processes(port: int) -> list[int]:
    """The sshd processes that serve connections to one port, without the one that listens."""
    process_ids: list[int] = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().decode(errors="replace")
            parent = (path / "stat").read_text().rpartition(")")[2].split()[1]
            above = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if words.startswith("sshd: ") and f"sshd-{port}.conf" in above:
            process_ids.append(int(path.name))
    return process_ids


def test_a_killed_rank_and_a_lost_connection_cost_nothing(
    jobs: Jobs, uninterrupted: dict[str, bytes]
) -> None:
    shell = jobs.start()
    jobs.saved(40)
    os.kill(jobs.rank_pid(1), signal.SIGKILL)
    jobs.wait(lambda: "exit code 137; restarting" in jobs.log(), "the first restart")
    jobs.saved(140)
    for pid in server_processes(jobs.ssh.ports[1]):
        os.kill(pid, signal.SIGKILL)
    jobs.wait(lambda: "is lost: ssh cannot connect" in jobs.log(), "the lost host")
    out, _ = shell.communicate(timeout=300)
    status = jobs.status()
    assert shell.returncode == 0, out[-3000:]
    assert (status["state"], status["attempt"], status["exit_code"], status["step"]) == (
        "done",
        3,
        0,
        400,
    )
    assert jobs.weights() == uninterrupted
    labels = set(re.findall(r"^\[([^\]]+)\] ", out, re.MULTILINE))
    assert labels == set(jobs.ssh.names), "lines of both hosts, with their names in front"
    events = [
        json.loads(line)
        for line in (jobs.folder / "runs/job/events.jsonl").read_text().splitlines()
    ]
    assert any("is lost" in event["text"] for event in events if event["event"] == "crash")
    jobs.all_gone()


@pytest.mark.slow
def test_ctrl_c_saves_on_all_hosts_and_the_next_job_continues(
    jobs: Jobs, uninterrupted: dict[str, bytes]
) -> None:
    shell = jobs.start()
    jobs.saved(20)
    shell.send_signal(signal.SIGINT)
    out, _ = shell.communicate(timeout=120)
    assert shell.returncode == 130, out[-3000:]
    assert jobs.status()["state"] == "cancelled"
    assert jobs.status()["attempt"] == 1
    saved = json.loads((jobs.folder / "runs/job/saved.json").read_text())
    assert "saved runs/job/checkpoints/step-" in out
    assert saved
    jobs.all_gone()
    done = jobs.run("--json")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout)["state"] == "done"
    assert "resum" in done.stderr
    assert jobs.weights() == uninterrupted


def test_hosts_that_cannot_take_the_job_are_named_before_anything_starts(
    jobs: Jobs, tmp_path: Path
) -> None:
    first, second = jobs.ssh.names
    wrong = tmp_path / "python-wrong"
    patch = "import headway, sys; headway.__version__ = '9.9.9'; from headway.launch.ssh.agent import main; sys.exit(main())"
    wrong.write_text(f'#!/bin/sh\nexec {sys.executable} -P -c "{patch}"\n')
    wrong.chmod(0o755)
    empty = tmp_path / "python-empty"
    empty.write_text(f'#!/bin/sh\nshift; exec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    cases = {
        ("--python", str(wrong)): (
            f"{first}: headway is 9.9.9; here it is",
            f"{second}: headway is 9.9.9",
        ),
        ("--python", str(empty)): (
            f"{first}: {empty} has no headway",
            f"{second}: {empty} has no headway",
        ),
        ("--python", "/no/such/python"): (
            f"{first}: there is no Python at /no/such/python",
            f"{second}: there is no Python",
        ),
        ("--workdir", "/no/such/folder"): (
            f"{first}: working directory /no/such/folder",
            f"{second}: working directory",
        ),
        ("--master", "192.0.2.1"): (f"{first}: cannot listen at 192.0.2.1",),
        ("tokenizer=none/tokenizer.json",): (
            f"{first}: not there: none/tokenizer.json",
            f"{second}: not there: none/tokenizer.json",
        ),
    }
    for words, lines in cases.items():
        done = jobs.run(*words)
        error_lines = done.stderr.strip().splitlines()
        assert done.returncode == 2, (words, done.stderr)
        assert len(error_lines) == len(lines) and all(
            f"error: {line}" in have for line, have in zip(lines, error_lines, strict=True)
        ), (words, error_lines)
    assert not (jobs.folder / "runs").exists(), "a refused job leaves nothing"
    jobs.all_gone()


def test_keys_host_keys_and_dead_hosts_are_told_apart(jobs: Jobs, tmp_path: Path) -> None:
    first = jobs.ssh.names[0]
    done = jobs.run(hosts=f"{first},root@127.0.0.1:{jobs.ssh.ports[0] - 1}")
    assert done.returncode == 2
    assert "ssh cannot connect" in done.stderr
    assert "Connection refused" in done.stderr
    config = tmp_path / "config"
    config.write_text(jobs.ssh.config.read_text().replace("known_hosts", "empty_known_hosts"))
    done = jobs.run("--ssh-config", str(config), hosts=first)
    assert done.returncode == 2
    assert "its host key is not known" in done.stderr
    keygen = find_program("ssh-keygen")
    assert keygen is not None
    subprocess.run(
        [keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True
    )
    config.write_text(
        jobs.ssh.config.read_text().replace(f"{jobs.ssh.folder}/user", str(tmp_path / "other"))
    )
    done = jobs.run("--ssh-config", str(config), hosts=first)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr
    assert "ssh-copy-id" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.drill
def test_a_launcher_that_is_killed_leaves_no_ranks_and_a_checkpoint(
    jobs: Jobs, uninterrupted: dict[str, bytes]
) -> None:
    done = jobs.run("--detach", "--json")
    assert done.returncode == 0, done.stderr
    jobs.saved(20)
    driver = json.loads((jobs.folder / "runs/job/logs/launch-state.json").read_text())["pid"]
    os.kill(driver, signal.SIGKILL)
    jobs.all_gone()
    assert jobs.status()["state"] == "unknown"
    assert "saved runs/job/checkpoints/step-" in (jobs.folder / "runs/job/train.log").read_text()
    done = jobs.run()
    assert done.returncode == 0, done.stderr[-3000:]
    assert jobs.weights() == uninterrupted


@pytest.mark.drill
def test_a_session_that_is_killed_is_restarted(jobs: Jobs, uninterrupted: dict[str, bytes]) -> None:
    shell = jobs.start()
    jobs.saved(20)
    session = next(
        int(line.split()[0]) for line in jobs.processes() if "headway.launch.ssh.session" in line
    )
    os.kill(session, signal.SIGKILL)
    out, _ = shell.communicate(timeout=300)
    assert shell.returncode == 0, out[-3000:]
    assert jobs.status()["attempt"] == 2
    assert jobs.weights() == uninterrupted
    jobs.all_gone()


@pytest.mark.drill
def test_a_second_ctrl_c_kills_and_a_stopped_rank_is_a_hang(jobs: Jobs) -> None:
    shell = jobs.start("supervise.hang_seconds=6", "steps=100000")
    jobs.saved(20)
    os.kill(jobs.rank_pid(1), signal.SIGSTOP)
    jobs.wait(lambda: "no progress" in jobs.log(), "the hang")
    jobs.wait(lambda: jobs.status()["attempt"] == 2, "the restart")
    before = max(
        int(path.name[5:]) for path in (jobs.folder / "runs/job/checkpoints").glob("step-????????")
    )
    jobs.saved(before + 40)
    os.kill(jobs.rank_pid(1), signal.SIGSTOP)  # it cannot save
    shell.send_signal(signal.SIGINT)
    jobs.wait(lambda: "cancelled: saving" in jobs.log(), "the first signal")
    assert shell.poll() is None
    begun = time.monotonic()
    shell.send_signal(signal.SIGINT)
    out, _ = shell.communicate(timeout=60)
    assert shell.returncode == 130 and time.monotonic() - begun < 20, out[-2000:]
    jobs.all_gone()


@pytest.mark.drill
def test_a_host_that_stays_dead_ends_the_job_after_its_restarts(jobs: Jobs) -> None:
    shell = jobs.start("supervise.max_restarts=1", "steps=100000")
    jobs.saved(20)
    port = jobs.ssh.ports[1]
    serving = server_processes(port)
    jobs.ssh.kill(port)
    try:
        for pid in serving:
            os.kill(pid, signal.SIGKILL)
        out, _ = shell.communicate(timeout=200)
    finally:
        jobs.ssh.start(port)
    assert shell.returncode == 1 and "giving up after 2 failures in a row" in out, out[-3000:]
    assert jobs.status()["state"] == "failed"
    jobs.all_gone()
