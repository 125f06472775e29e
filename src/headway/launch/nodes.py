"""Rendezvous of the launchers of a run: node 0 serves a small key-value store in which every launcher registers.

    node 0  binds the port, serves ◀── node 1 .. n-1 connect
    each    node/<k>   = number of its ranks, host (JSON)    all wait until every node/<k> is there
    each    failed/<k> = when and why a rank failed (JSON)   all poll it
    each    done      += 1 at its end                        node 0 serves until all are done

The ranks use the same store to find each other, so the port is never free between being chosen and being used.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from headway.errors import LaunchError
from headway.launch.failure import RankError
from headway.runtime.process import set_environment

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger("headway")

LOOPBACK = "127.0.0.1"
POLL_SECONDS = 0.2
WAIT_SECONDS = 0.5
LINGER_SECONDS = 10.0
REPORT_SECONDS = 3.0
BACKLOG = 4096
PREFIX = "headway/launch/"


@dataclass(frozen=True)
class NodeSpec:
    """This node's rank, the number of nodes and the address of node 0."""

    num: int = 1
    rank: int = 0
    host: str = LOOPBACK
    port: int = 0
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.num < 1:
            raise LaunchError(f"--nnodes is {self.num}; it must be at least 1.")
        if not 0 <= self.rank < self.num:
            raise LaunchError(
                f"--node-rank is {self.rank}; with --nnodes {self.num} it must be 0 to {self.num - 1}."
            )
        if self.num > 1 and not self.port:
            raise LaunchError(
                "--master is missing; give every node HOST:PORT of node 0, with a port that is free there."
            )


def parse_master(text: str) -> tuple[str, int]:
    """`HOST:PORT`, also `[::1]:PORT`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--master is {text!r}; it must be HOST:PORT, e.g. 10.0.0.1:29500.")
    return host.strip("[]"), int(port)


def parse_nodes(num: int, rank: int, master: str | None, timeout_seconds: float) -> NodeSpec:
    """The nodes that `--nnodes`, `--node-rank`, `--master` and `--node-timeout` describe."""
    if master is not None and num == 1:
        raise LaunchError(
            "--master is given and --nnodes is 1; one machine needs no rendezvous. Leave it out, or give --nnodes."
        )
    host, port = parse_master(master) if master is not None else (LOOPBACK, 0)
    return NodeSpec(num, rank, host, port, timeout_seconds)


class Rendezvous:
    """The store as one launcher sees it. After `gather` it knows its first rank and the number of all ranks."""

    def __init__(self, nodes: NodeSpec, num_ranks: int) -> None:
        self.nodes, self.num_ranks = nodes, num_ranks
        self.first_rank, self.world = 0, num_ranks
        self.host, self.port = nodes.host, nodes.port
        self.store: TCPStore | None = None
        self._listening = self._bind() if nodes.rank == 0 else None

    def _bind(self) -> socket.socket:
        family, _, _, _, address = self._resolve()
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            listening.close()
            raise LaunchError(
                f"--master is {self.host}:{self.port}; node 0 cannot listen there: {error.strerror}. "
                "Give an address of node 0 and a port that is free there."
            ) from None
        listening.listen(BACKLOG)
        self.port = int(listening.getsockname()[1])
        return listening

    def _resolve(self) -> tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]:
        try:
            return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)[0]  # pyright: ignore[reportReturnType]
        except OSError as error:
            raise LaunchError(
                f"--master is {self.host}:{self.port}; {self.host} has no address: {error.strerror}."
            ) from None

    def serve(self) -> None:
        """Serve the store (node 0), or connect to it. Takes as long as loading torch."""
        set_environment(
            {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        )  # read when torch loads; hides the retries of its sockets
        if self._listening is None:
            self._wait_for_node_0()
        from torch.distributed import TCPStore

        if self._listening is not None:
            wait = timedelta(seconds=60)
            descriptor = self._listening.detach()  # the store closes it
            self.store = TCPStore(
                self.host,
                self.port,
                None,
                True,
                wait,
                wait_for_workers=False,
                master_listen_fd=descriptor,
            )
            self._listening = None
            return
        self.store = TCPStore(
            self.host, self.port, None, False, timedelta(seconds=60), wait_for_workers=False
        )

    def _wait_for_node_0(self) -> None:
        """Wait until node 0 answers on its port."""
        deadline = time.monotonic() + self.nodes.timeout_seconds
        while time.monotonic() < deadline:
            try:
                socket.create_connection(
                    (self.host, self.port), timeout=self.nodes.timeout_seconds
                ).close()
                return
            except OSError:
                time.sleep(POLL_SECONDS)
        raise LaunchError(
            f"node 0 is missing: no answer from {self.host}:{self.port} after {self.nodes.timeout_seconds:g} s. "
            "Start node 0, and check the address, the port and the firewall."
        )

    def gather(self) -> None:
        """Wait for the launchers of all nodes, then compute this node's first rank."""
        store, num = self._connected(), self.nodes.num
        entry = json.dumps(
            {
                "num_ranks": self.num_ranks,
                "num_nodes": num,
                "host": socket.gethostname(),
                "id": str(uuid.uuid4()),
            }
        )
        there = store.compare_set(self._key(self.nodes.rank), "", entry).decode()
        if there != entry:
            host = json.loads(there)["host"]
            raise LaunchError(
                f"--node-rank is {self.nodes.rank}; {host} has that rank already. Give each node its own."
            )
        deadline = time.monotonic() + self.nodes.timeout_seconds
        while missing := [node for node in range(num) if not store.check([self._key(node)])]:
            if (failure := self.first_failure()) is not None:
                raise LaunchError(str(failure))
            if time.monotonic() > deadline:
                self._give_up(missing)
            time.sleep(POLL_SECONDS)
        entries = [json.loads(store.get(self._key(node))) for node in range(num)]
        if wrong := [
            f"node {node} has {one['num_nodes']}"
            for node, one in enumerate(entries)
            if one["num_nodes"] != num
        ]:
            raise LaunchError(
                f"--nnodes is {num}; {', '.join(wrong)}. Give all nodes the same number."
            )
        counts = [one["num_ranks"] for one in entries]
        self.first_rank, self.world = sum(counts[: self.nodes.rank]), sum(counts)
        hosts = ", ".join(
            f"node {node} {one['host']} with {one['num_ranks']}" for node, one in enumerate(entries)
        )
        log.info("%d ranks on %d nodes: %s", self.world, num, hosts)

    def _give_up(self, missing: list[int]) -> None:
        names = ", ".join(map(str, missing))
        message = (
            f"node rank{'s' if len(missing) > 1 else ''} {names} of {self.nodes.num} did not connect to {self.host}:{self.port} "
            f"within {self.nodes.timeout_seconds:g} s. Start them with the same --master, or wait longer with --node-timeout."
        )
        self.announce(RankError(message, LaunchError.exit_code, time.time()))
        raise LaunchError(message)

    def first_failure(self) -> RankError | None:
        """The first failure on any node; a lost node 0 counts as one."""
        if self.store is None or self.nodes.num == 1:
            return None
        failures: list[RankError] = []
        try:
            for key in (f"{PREFIX}failed/{node}" for node in range(self.nodes.num)):
                if self.store.check([key]):
                    failures.append(RankError(**json.loads(self.store.get(key))))
        except RuntimeError:
            return RankError(
                f"node 0 is gone: {self.host}:{self.port} no longer answers. All ranks here were stopped.",
                1,
                time.time(),
            )
        return min(failures, key=lambda one: one.at, default=None)

    def announce(self, error: RankError) -> None:
        """Report a failure on this node to the other nodes."""
        if self.store is None or self.nodes.num == 1:
            return
        try:
            failure = {"message": str(error), "exit_code": error.exit_code, "at": error.at}
            self.store.set(f"{PREFIX}failed/{self.nodes.rank}", json.dumps(failure))
        except RuntimeError:
            return  # node 0 is gone; the others notice it themselves

    def first_cause(self, error: RankError) -> RankError:
        """The failure that ended the run. An error here may only be the loss of a peer, whose node reports the cause about now."""
        if self.nodes.num == 1 or error.at == 0:
            return error
        deadline = time.monotonic() + REPORT_SECONDS
        first = error
        while time.monotonic() < deadline:
            other = self.first_failure()
            if other is not None and other.at < first.at:
                first = other
            time.sleep(POLL_SECONDS)
        return first

    def leave(self, *, well: bool) -> None:
        """End together: srun kills all nodes some time after the first one ends, and node 0 may still be saving.

        Node 0 serves until the others are done too. After a failure nobody waits longer than the others need to read it.
        """
        if self.store is None or self.nodes.num == 1:
            return
        is_first = self.nodes.rank == 0
        try:
            self.store.add(PREFIX + "done", 1)
            deadline = None if well else time.monotonic() + LINGER_SECONDS
            while self.store.add(PREFIX + "done", 0) < (
                self._num_arrived() if is_first else self.nodes.num
            ):
                if deadline is None and self.first_failure() is not None:
                    deadline = time.monotonic() + LINGER_SECONDS
                if deadline is not None and time.monotonic() > deadline:
                    return
                time.sleep(POLL_SECONDS if is_first else WAIT_SECONDS)
        except RuntimeError:
            return  # node 0 has ended

    def _num_arrived(self) -> int:
        store = self._connected()
        return sum(store.check([self._key(node)]) for node in range(self.nodes.num))

    def _connected(self) -> TCPStore:
        assert self.store is not None
        return self.store

    def _key(self, node: int) -> str:
        return f"{PREFIX}node/{node}"

    def interface(self) -> str | None:
        """The name of the network interface that leads to node 0; None if unknown."""
        if self.nodes.num == 1:
            return _interface_of(LOOPBACK)
        family, _, _, _, address = self._resolve()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                return None
            return _interface_of(str(probe.getsockname()[0]))


def _interface_of(address: str) -> str | None:
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(
                    asking.fileno(), 0x8915, name.encode().ljust(256, b"\0")
                )  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
