"""The hosts of an ssh job, checked in parallel before anything starts.

In: hosts and what the job needs; out: ranks per host and warnings, or a LaunchError with one line
for each host that fails.

Each host runs an agent (agent.py) that answers JSON messages over its ssh connection. The steps:

    hello     ssh connects with a key, Python starts, headway and torch have the versions of this
              machine
    look      the working directory exists, headway's code is the same, number of GPUs
    check     the fast checks of `headway doctor`: disk, limits, GPU health, clocks, one run folder
              on all hosts (with a token file)
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
"""How long ssh and the start of Python may take."""
CHECK_SECONDS = 120.0
"""How long any later question may take."""
BEAT_SECONDS = 5.0
"""How often agents get a sign of life: they end if this side is silent."""
POLL_SECONDS = 0.2
SSH_FAILED = 255
"""The exit code of ssh itself; others are those of the program there."""
NOT_FOUND = (126, 127)
"""Exit codes of a shell that cannot run a program, or does not find it."""
MAX_NAMED = 5
"""Missing files that a line names."""


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
    """For each host; None = one per GPU, or one on a host without GPUs."""
    uses_gpus: bool | None = None
    """None: if there are any."""
    keeps_ranks: bool = True
    """Whether None in `ranks` is replaced by the number of GPUs found. False leaves it None, for
    `headway train --gpus` to decide there.
    """
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
    nodes = range(len(hosts))
    try:
        # Agents greet by themselves: nothing is asked.
        hellos = talk.ask({}, "hello", HELLO_SECONDS, refuses=False)
        _compare_versions(talk, hellos, options)

        look = {"do": "look", "workdir": need.workdir}
        looks = talk.ask(dict.fromkeys(nodes, look), "looked", CHECK_SECONDS)
        _compare_code(talk, looks)

        gpus = [looks[node]["gpus"] for node in nodes]
        if need.uses_gpus is False:
            gpus = [0 for _ in nodes]
        # Without `ranks`, no host has a fixed number.
        ranks = list(need.ranks or (None for _ in nodes))
        if need.keeps_ranks:
            for node in nodes:
                if ranks[node] is None:
                    ranks[node] = gpus[node] or 1

        questions: dict[int, dict[str, Any]] = {}
        for node in nodes:
            questions[node] = {
                "do": "check",
                "node": node,
                "size": len(hosts),
                "run": need.run,
                "paths": need.paths,
                "ranks": ranks[node] or 1,
                "gpu_ranks": bool(need.uses_gpus or gpus[node]),
                "environment": dict(need.environment),
            }
        answers = talk.ask(questions, "checked", CHECK_SECONDS)
        _refuse_missing(talk, answers)
        # Hosts exchange their results during the check (see `swap`), so the first host's answer has
        # those of all.
        checks = tuple(Check.from_json(check) for check in answers[0]["checks"])
        _refuse_failures(checks)
        if len(hosts) > 1:
            _check_meeting(talk, need)
        return HostsFound(tuple(ranks), checks)
    finally:
        talk.close()


class HostQuestions:
    """Questions to all hosts at once.

    A host that fails is in `problems` from then on, and is not waited for again.
    """

    def __init__(self, hosts: Sequence[Host], options: SshOptions) -> None:
        self.hosts = hosts
        self.options = options
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
        """Send a question to each host in `questions`, and wait for their answers.

        Without questions it only waits, for all hosts.

        An answer is a message that has `key`. Returns the values of `key` by host, or raises with
        one line per host that gave none. Without `refuses` it does not raise: the caller adds its
        findings to `problems` and calls `refuse`.
        """
        for node, question in questions.items():
            self.connections[node].send(question)

        asked = set(questions or range(len(self.hosts)))
        answers: dict[int, Any] = {}
        # Texts of the exchange in progress, by host.
        swaps: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        beat_at = time.monotonic() + BEAT_SECONDS
        while missing := asked - self.problems.keys() - answers.keys():
            if time.monotonic() > deadline:
                for node in missing:
                    self.problems[node] = (
                        f"no answer within {seconds:.0f} s. Is the machine overloaded, or its file "
                        "system slow?"
                    )
                break
            # An exchange that a failed host takes no part in never ends: the others would wait for
            # its text until the deadline.
            if self.problems and swaps:
                break
            if time.monotonic() > beat_at:
                beat_at = time.monotonic() + BEAT_SECONDS
                self.send_all({"do": "beat"})
            try:
                message = self.messages.get(timeout=POLL_SECONDS)
            except queue.Empty:
                continue
            self._handle_message(message, key, answers, swaps)
        if refuses:
            self.refuse()
        return answers

    def _handle_message(
        self, message: HostMessage, key: str, answers: dict[int, Any], swaps: dict[int, str]
    ) -> None:
        """Put a message where it belongs: answers, problems, or texts that hosts swap."""
        node = message.node
        content = message.content
        if message.closed is not None and node not in answers:
            connection = self.connections[node]
            self.problems.setdefault(
                node, explain_end(message.closed, list(connection.errors), self.options.python)
            )
        elif "refused" in content:
            self.problems.setdefault(node, str(content["refused"]))
        elif "swap" in content:
            # Hosts exchange texts through this side: it collects one of each, then sends them all.
            swaps[node] = content["swap"]
            if len(swaps) == len(self.hosts):
                texts = [swaps[index] for index in range(len(self.hosts))]
                self.send_all({"do": "swapped", "texts": texts})
                swaps.clear()
        elif key in ("listening", "connected") and key in content:
            # The whole message: it also has the reason under `problem`.
            answers[node] = content
        elif key in content:
            answers[node] = content[key]

    def send_all(self, content: Mapping[str, Any]) -> None:
        """Send the same to every host."""
        for connection in self.connections:
            connection.send(content)

    def refuse(self) -> None:
        """Raise if a host failed: one line each."""
        lines = [
            f"{self.hosts[node].label}: {self.problems[node]}" for node in sorted(self.problems)
        ]
        if lines:
            raise LaunchError("\n".join(lines))

    def close(self) -> None:
        """End all connections."""
        # All at once, then wait for each.
        for connection in self.connections:
            connection.end_input()
        for connection in self.connections:
            connection.close()


def explain_end(code: int, errors: Sequence[str], python: str) -> str:
    """Why a connection ended before the agent answered, with a remedy.

    `errors` are the last lines that ssh, or the program there, wrote to standard error.
    """
    last = errors[-1].rstrip(".") if errors else f"exit code {code}"
    everything = "\n".join(errors)

    # What ssh itself says.
    if code == SSH_FAILED and "Permission denied" in everything:
        return (
            f"{last}. Only keys are used: install yours there with ssh-copy-id, or load it with "
            "ssh-add."
        )
    if code == SSH_FAILED and "Host key verification failed" in everything:
        return (
            "its host key is not known, or has changed. Connect once by hand (ssh HOST), compare "
            "the key, and start again."
        )
    if code == SSH_FAILED:
        return (
            f"ssh cannot connect: {last}. Check name, port and network, or try `ssh HOST true` by "
            "hand."
        )

    # What the shell or Python says there.
    if code in NOT_FOUND and "No module named" not in everything:
        return f"there is no Python at {python}. Give --python with its path on the hosts."
    if "No module named" in everything and "headway" in everything:
        return (
            f"{python} has no headway, or an older one. Install headway {__version__} there, or "
            "give --python."
        )
    # Versions of Python write the first letter differently.
    if "nknown option" in everything and "-P" in everything:
        return (
            f"{python} is older than 3.11. Give --python with a newer one that has headway "
            f"{__version__}."
        )
    return f"the agent ended with exit code {code}: {last}"


def _compare_versions(talk: HostQuestions, hellos: Mapping[int, Any], options: SshOptions) -> None:
    torch_here = package_version("torch")
    for node, hello in hellos.items():
        if hello["headway"] != __version__:
            talk.problems[node] = (
                f"headway is {hello['headway']}; here it is {__version__}. "
                "Install the same there, or give --python."
            )
        elif hello["torch"] is None:
            talk.problems[node] = (
                f"{options.python} has no torch. Install it there, or give --python."
            )
        elif _release(hello["torch"]) != _release(torch_here):
            talk.problems[node] = (
                f"torch is {hello['torch']}; here it is {torch_here}. "
                "Install the same there, or give --python."
            )
    talk.refuse()


def _release(version: str | None) -> str:
    """2.11.0 of 2.11.0+cu130: this machine may have no GPU."""
    return (version or "missing").partition("+")[0]


def _compare_code(talk: HostQuestions, looks: Mapping[int, Any]) -> None:
    # Two installations may have the same version and different code: editable ones have.
    code_here = host_facts().code
    for node, look in looks.items():
        if look["code"] != code_here:
            talk.problems[node] = (
                f"headway {__version__} has other source code than here. "
                "Install the same build there."
            )
    talk.refuse()


def _refuse_missing(talk: HostQuestions, answers: Mapping[int, Any]) -> None:
    """Refuse hosts that lack files or folders which the job needs."""
    for node, answer in answers.items():
        missing = answer["missing"]
        if missing:
            names = ", ".join(missing[:MAX_NAMED])
            if len(missing) > MAX_NAMED:
                names += f" and {len(missing) - MAX_NAMED} more"
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
            remedy = (
                "A job on several hosts needs one run folder on all of them, also if checkpoints "
                "go to S3: set run.dir to a shared one."
            )
        lines.append(f"{check.name}: {check.detail.rstrip('.')}. {remedy}".strip())
    if lines:
        raise LaunchError("\n".join(lines))


def _check_meeting(talk: HostQuestions, need: HostsNeed) -> None:
    """Whether every host reaches the first one at the address where ranks meet."""
    host, port = need.master
    answer = talk.ask(
        {0: {"do": "listen", "host": host, "port": port}}, "listening", CHECK_SECONDS
    )[0]
    # The port that it listens at, also where port 0 left the choice to it; None: it cannot.
    if answer["listening"] is None:
        talk.problems[0] = (
            f"cannot listen at {host}:{port}: {answer['problem']}. "
            "Give --master with an address of this host and a free port."
        )
        talk.refuse()
    question = {"do": "connect", "host": host, "port": answer["listening"]}
    answers = talk.ask(
        dict.fromkeys(range(1, len(talk.hosts)), question), "connected", CHECK_SECONDS
    )
    for node, reply in answers.items():
        if not reply["connected"]:
            first = talk.hosts[0].label
            talk.problems[node] = (
                f"cannot reach {first} at {host}:{answer['listening']}: {reply['problem']}. "
                "Open the firewall, or give --master."
            )
    talk.refuse()
