"""What an agent finds out about its host before a job starts.

In: questions of the launcher; out: answers, one for each.

    look     the number of GPUs, and whether headway's code is the same
    check    the fast checks of `headway doctor` together with all other hosts, paths that do not
             exist here
    listen   node 0 listens at the address where ranks will meet
    connect  the other nodes connect to it
    port     node 0 finds a free port at that address
"""

from __future__ import annotations

import glob
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.diagnose.host import HostNeeds, host_facts
from headway.diagnose.preflight import preflight
from headway.errors import LaunchError
from headway.launch.gpus import read_gpus, visible

CONNECT_SECONDS = 10.0
GREETING = b"headway\n"
"""Sent to each connection: shows that no other program answers at the address."""


class PipeExchange:
    """How hosts swap texts during `preflight`: through the launcher, to which every host has a
    connection.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        send: Callable[[Mapping[str, Any]], None],
        receive: Callable[[], dict[str, Any] | None],
    ) -> None:
        self.rank = rank
        self.size = size
        self._send = send
        self._receive = receive

    def swap(self, text: str) -> list[str]:
        """Give a text; returns those of all hosts, by rank."""
        self._send({"swap": text})
        # Beats only keep the connection alive.
        while (answer := self._receive()) is not None and answer.get("do") == "beat":
            pass
        if answer is None or answer.get("do") != "swapped":
            raise LaunchError("the launcher ended the checks")
        return list(answer["texts"])


class HostCheck:
    """Answers the questions of the launcher on one host."""

    def __init__(
        self,
        send: Callable[[Mapping[str, Any]], None],
        receive: Callable[[], dict[str, Any] | None],
    ) -> None:
        self._send = send
        self._receive = receive
        self._listening: socket.socket | None = None

    def answer(self, question: Mapping[str, Any]) -> None:
        """Answer one question."""
        answers = {
            "look": self._look,
            "check": self._check,
            "listen": self._listen,
            "connect": self._connect,
            "port": self._port,
        }
        # Other messages, such as beats, want no answer.
        answer = answers.get(question["do"])
        if answer is not None:
            self._send(answer(question))

    def _look(self, question: Mapping[str, Any]) -> dict[str, Any]:
        enter_folder(question["workdir"])
        gpus = len(visible(read_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")))
        return {"looked": {"gpus": gpus, "code": host_facts().code}}

    def _check(self, question: Mapping[str, Any]) -> dict[str, Any]:
        exchange = PipeExchange(question["node"], question["size"], self._send, self._receive)
        run_dir = Path(question["run"]).expanduser()
        needs = HostNeeds(question["ranks"], question["gpu_ranks"])
        environment = {**os.environ, **question["environment"]}
        checks = preflight(exchange, run_dir, needs, environment)
        missing = [path for path in question["paths"] if not _is_there(path)]
        return {"checked": {"checks": [check.to_json() for check in checks], "missing": missing}}

    def _listen(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            self._listening = listen(question["host"], question["port"])
        except OSError as error:
            return {"listening": None, "problem": error.strerror or str(error)}
        # In a thread: the agent must answer other questions meanwhile. The socket is closed when
        # the agent ends.
        threading.Thread(target=_greet, args=(self._listening,), daemon=True).start()
        return {"listening": self._listening.getsockname()[1]}

    def _connect(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            with socket.create_connection(
                (question["host"], question["port"]), CONNECT_SECONDS
            ) as connection:
                connection.settimeout(CONNECT_SECONDS)
                greeting = connection.recv(len(GREETING))
        except OSError as error:
            return {"connected": False, "problem": error.strerror or str(error)}
        return {"connected": greeting == GREETING, "problem": "another program answers there"}

    def _port(self, question: Mapping[str, Any]) -> dict[str, Any]:
        try:
            # Closed again: the launcher of node 0 binds it a moment later.
            with listen(question["host"], 0) as listening:
                return {"port": int(listening.getsockname()[1])}
        except OSError as error:
            raise LaunchError(
                f"cannot listen at {question['host']}: {error.strerror or error}. "
                "Give --master with an address of it."
            ) from None


def _greet(listening: socket.socket) -> None:
    """Greet every connection until the socket is closed."""
    while True:
        try:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(GREETING)
        except OSError:
            return


def enter_folder(workdir: str) -> None:
    """Make a folder the working directory; a relative one begins at the login folder."""
    folder = Path(workdir).expanduser()
    try:
        os.chdir(folder)
    except OSError as error:
        raise LaunchError(
            f"working directory {folder}: {error.strerror}. Make it there, or give --workdir."
        ) from None


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens at an address of this host; port 0: any free one."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port on which connections were just closed can be used again.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def _is_there(path: str) -> bool:
    """Whether a path exists, or a pattern matches anything."""
    full = os.path.expanduser(path)
    if os.path.exists(full):
        return True
    return glob.has_magic(full) and next(glob.iglob(full, recursive=True), None) is not None
