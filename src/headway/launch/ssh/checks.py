"""The hosts of an ssh job, checked in parallel before anything starts. In: hosts and what the job needs; out: ranks per host and warnings,
or a LaunchError with one line for each host that fails.

    hello     ssh connects with a key, Python starts, headway and torch have the versions of this machine
    look      the working directory exists, headway's code is the same, number of GPUs
    check     the fast checks of `headway doctor`: disk, limits, GPU health, clocks, one run folder on all hosts (with a token file)
    connect   every host reaches the address of the first one where ranks will meet
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway import __version__
from headway.diagnose.check import Check, failures
from headway.diagnose.host import host_facts
from headway.diagnose.preflight import SHARED_FOLDER
from headway.errors import LaunchError
from headway.launch.ssh.connection import Connection, HostMessage, SshOptions
from headway.launch.ssh.hosts import Host
from headway.runtime.machine import package_version

HELLO_SECONDS = 60.0
CHECK_SECONDS = 120.0
BEAT_SECONDS = 5.0
SSH_FAILED = 255
NOT_FOUND = (126, 127)


@dataclass(frozen=True)
class HostsNeed:
    """What a job needs of its hosts."""

    workdir: str
    run: str
    """The run folder there."""
    master: tuple[str, int]
    """The address of the first host where ranks meet; port 0: any free one."""
    paths: tuple[str, ...] = ()
    """Files and folders that must be there."""
    ranks: tuple[int | None, ...] = ()
    """For each host; None = one per GPU, else one."""
    uses_gpus: bool | None = None
    """None: if there are any."""
    keeps_ranks: bool = True
    """False: None in `ranks` is left to `headway train --gpus`."""
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HostsFound:
    """What the checks found."""

    ranks: tuple[int | None, ...]
    checks: tuple[Check, ...]
    """Of all hosts together; none failed."""


def check_hosts(hosts: Sequence[Host], options: SshOptions, need: HostsNeed) -> HostsFound:
    """Check all hosts; nothing stays behind there."""
    talk = HostQuestions(hosts, options)
    try:
        _compare_versions(talk, talk.ask({}, "hello", HELLO_SECONDS, refuses=False), options)
        looks = talk.ask(
            {node: {"do": "look", "workdir": need.workdir} for node in range(len(hosts))},
            "looked",
            CHECK_SECONDS,
        )
        _compare_code(talk, looks)
        gpus = [0 if need.uses_gpus is False else looks[node]["gpus"] for node in range(len(hosts))]
        given = need.ranks or (None,) * len(hosts)
        ranks = tuple(
            one if one is not None or not need.keeps_ranks else count or 1
            for one, count in zip(given, gpus, strict=True)
        )
        questions = {
            node: {
                "do": "check", "node": node, "size": len(hosts), "run": need.run, "paths": need.paths,
                "ranks": ranks[node] or 1, "gpu_ranks": bool(need.uses_gpus or gpus[node]), "environment": dict(need.environment),
            }
            for node in range(len(hosts))
        }  # fmt: skip
        found = talk.ask(questions, "checked", CHECK_SECONDS)
        checks = tuple(Check.from_json(one) for one in found[0]["checks"])
        _refuse_missing(talk, found)
        _refuse_failures(checks)
        if len(hosts) > 1:
            _check_meeting(talk, need)
        return HostsFound(ranks, checks)
    finally:
        talk.close()


class HostQuestions:
    """Questions to all hosts at once. A host that fails is in `problems`; a question ends with all answers or one line per host."""

    def __init__(self, hosts: Sequence[Host], options: SshOptions) -> None:
        self.hosts, self.options = hosts, options
        self.messages: queue.Queue[HostMessage] = queue.Queue()
        self.problems: dict[int, str] = {}
        self.connections = [
            Connection(node, host, options, self.messages) for node, host in enumerate(hosts)
        ]

    def ask(
        self,
        questions: Mapping[int, Mapping[str, Any]],
        key: str,
        seconds: float,
        *,
        refuses: bool = True,
    ) -> dict[int, Any]:
        """Send the questions; returns the values of `key` in the answers, or raises with one line per host that gave none.

        Without `refuses` the caller adds its own findings to `problems` first.
        """
        for node, question in questions.items():
            self.connections[node].send(question)
        missing = set(questions or range(len(self.hosts)))
        answers: dict[int, Any] = {}
        swaps: dict[int, str] = {}
        deadline, beat_at = time.monotonic() + seconds, time.monotonic() + BEAT_SECONDS
        while missing - self.problems.keys() - answers.keys():
            if time.monotonic() > deadline:
                for node in missing - answers.keys() - self.problems.keys():
                    self.problems[node] = (
                        f"no answer within {seconds:.0f} s. Is the machine overloaded, or its file system slow?"
                    )
                break
            if self.problems and swaps:
                break  # the others wait for the text of a host that failed
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + BEAT_SECONDS
                self.send_all({"do": "beat"})
            try:
                message = self.messages.get(timeout=0.2)
            except queue.Empty:
                continue
            self._take(message, key, answers, swaps)
        if refuses:
            self.refuse()
        return answers

    def _take(
        self, message: HostMessage, key: str, answers: dict[int, Any], swaps: dict[int, str]
    ) -> None:
        node, content = message.node, message.content
        if message.closed is not None and node not in answers:
            connection = self.connections[node]
            self.problems.setdefault(
                node, explain_end(message.closed, list(connection.errors), self.options.python)
            )
        elif "refused" in content:
            self.problems.setdefault(node, str(content["refused"]))
        elif "swap" in content:
            swaps[node] = content["swap"]
            if len(swaps) == len(self.hosts):
                self.send_all(
                    {"do": "swapped", "texts": [swaps[one] for one in range(len(self.hosts))]}
                )
                swaps.clear()
        elif key in content:
            answers[node] = content[key] if key not in ("listening", "connected") else content

    def send_all(self, content: Mapping[str, Any]) -> None:
        """Send the same to every host."""
        for connection in self.connections:
            connection.send(content)

    def refuse(self) -> None:
        """Raise if a host failed: one line each."""
        if self.problems:
            raise LaunchError(
                "\n".join(
                    f"{self.hosts[node].label}: {self.problems[node]}"
                    for node in sorted(self.problems)
                )
            )

    def close(self) -> None:
        """End all connections."""
        for connection in self.connections:
            connection.end_input()
        for connection in self.connections:
            connection.close()


def explain_end(code: int, errors: Sequence[str], python: str) -> str:
    """Why a connection ended before the agent answered, with a remedy."""
    last = errors[-1].rstrip(".") if errors else f"exit code {code}"
    everything = "\n".join(errors)
    if code == SSH_FAILED and "Permission denied" in everything:
        return f"{last}. Only keys are used: install yours there with ssh-copy-id, or load it with ssh-add."
    if code == SSH_FAILED and "Host key verification failed" in everything:
        return "its host key is not known, or has changed. Connect once by hand (ssh HOST), compare the key, and start again."
    if code == SSH_FAILED:
        return f"ssh cannot connect: {last}. Check name, port and network, or try `ssh HOST true` by hand."
    if code in NOT_FOUND and "No module named" not in everything:
        return f"there is no Python at {python}. Give --python with its path on the hosts."
    if "No module named" in everything and "headway" in everything:
        return f"{python} has no headway, or an older one. Install headway {__version__} there, or give --python."
    if "nknown option" in everything and "-P" in everything:
        return f"{python} is older than 3.11. Give --python with a newer one that has headway {__version__}."
    return f"the agent ended with exit code {code}: {last}"


def _compare_versions(talk: HostQuestions, hellos: Mapping[int, Any], options: SshOptions) -> None:
    mine = _release(package_version("torch"))
    for node, hello in hellos.items():
        if hello["headway"] != __version__:
            talk.problems[node] = (
                f"headway is {hello['headway']}; here it is {__version__}. Install the same there, or give --python."
            )
        elif hello["torch"] is None:
            talk.problems[node] = (
                f"{options.python} has no torch. Install it there, or give --python."
            )
        elif _release(hello["torch"]) != mine:
            talk.problems[node] = (
                f"torch is {hello['torch']}; here it is {package_version('torch')}. Install the same there, or give --python."
            )
    talk.refuse()


def _release(version: str | None) -> str:
    """2.11.0 of 2.11.0+cu130: this machine may have no GPU."""
    return (version or "missing").partition("+")[0]


def _compare_code(talk: HostQuestions, looks: Mapping[int, Any]) -> None:
    mine = host_facts().code
    for node, look in looks.items():
        if look["code"] != mine:
            talk.problems[node] = (
                f"headway {__version__} has other source code than here. Install the same build there."
            )
    talk.refuse()


def _refuse_missing(talk: HostQuestions, found: Mapping[int, Any]) -> None:
    for node, answer in found.items():
        if answer["missing"]:
            names = ", ".join(answer["missing"][:5]) + (
                f" and {len(answer['missing']) - 5} more" if len(answer["missing"]) > 5 else ""
            )
            talk.problems[node] = (
                f"not there: {names}. Copy it to the same path, or check --workdir."
            )
    talk.refuse()


def _refuse_failures(checks: Sequence[Check]) -> None:
    """Refuse what failed, a line for each."""
    lines: list[str] = []
    for check in failures(checks):
        remedy = check.remedy or ""
        if check.name == SHARED_FOLDER:
            remedy = "A job on several hosts needs one run folder on all of them, also if checkpoints go to S3: set run.dir to a shared one."
        lines.append(f"{check.name}: {check.detail.rstrip('.')}. {remedy}".strip())
    if lines:
        raise LaunchError("\n".join(lines))


def _check_meeting(talk: HostQuestions, need: HostsNeed) -> None:
    """Whether every host reaches the first one at the address where ranks meet."""
    host, port = need.master
    answer = talk.ask(
        {0: {"do": "listen", "host": host, "port": port}}, "listening", CHECK_SECONDS
    )[0]
    if answer["listening"] is None:
        talk.problems[0] = (
            f"cannot listen at {host}:{port}: {answer['problem']}. Give --master with an address of this host and a free port."
        )
        talk.refuse()
    question = {"do": "connect", "host": host, "port": answer["listening"]}
    answers = talk.ask(
        dict.fromkeys(range(1, len(talk.hosts)), question), "connected", CHECK_SECONDS
    )
    for node, found in answers.items():
        if not found["connected"]:
            first = talk.hosts[0].label
            talk.problems[node] = (
                f"cannot reach {first} at {host}:{answer['listening']}: {found['problem']}. Open the firewall, or give --master."
            )
    talk.refuse()
