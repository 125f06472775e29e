"""How the launchers of a run find each other: node 0 serves a small key-value store, every launcher says there who it is.

    node 0  binds the port, serves ◀── node 1 .. n-1 connect
    each    node/<k> = number of its ranks, host (JSON) all wait until every node/<k> stands
    each    failed/<k> = when and why, if one failed     all look now and then
    each    done     + 1 at its end                      node 0 serves until all are done

The ranks use the same store to find each other, so that no port is ever free between being chosen and being used.
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
LINGER_SECONDS = 10.0
TELL_SECONDS = 3.0
BACKLOG = 4096
PREFIX = "headway/launch/"


@dataclass(frozen=True)
class NodeSpec:
    """Which node of how many this is, and where node 0 is found."""

    num: int = 1
    rank: int = 0
    host: str = LOOPBACK
    port: int = 0
    timeout_seconds: float = 300.0

    def __post_init__(self) -> None:
        if self.num < 1:
            raise LaunchError(f"--nnodes is {self.num}; it must be at least 1.")
        if not 0 <= self.rank < self.num:
            raise LaunchError(f"--node-rank is {self.rank}; with --nnodes {self.num} it must be 0 to {self.num - 1}.")
        if self.num > 1 and not self.port:
            raise LaunchError("--master is missing; give HOST:PORT of node 0 to every node, with a port that is free there.")


def parse_master(text: str) -> tuple[str, int]:
    """`HOST:PORT`, also `[::1]:PORT`."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"--master is {text!r}; it must be HOST:PORT, e.g. 10.0.0.1:29500.")
    return host.strip("[]"), int(port)


def parse_nodes(num: int, rank: int, master: str | None, timeout_seconds: float) -> NodeSpec:
    """The nodes that `--nnodes`, `--node-rank`, `--master` and `--node-timeout` describe."""
    if master is not None and num == 1:
        raise LaunchError("--master is given and --nnodes is 1; one machine needs no rendezvous. Leave it out, or give --nnodes.")
    host, port = parse_master(master) if master is not None else (LOOPBACK, 0)
    return NodeSpec(num, rank, host, port, timeout_seconds)


class Rendezvous:
    """The store as one launcher sees it, and what it has learnt there: where its ranks begin and how many there are in all."""

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
            raise LaunchError(f"--master is {self.host}:{self.port}; {self.host} has no address: {error.strerror}.") from None

    def serve(self) -> None:
        """Answer on the port (node 0), or connect to who does. Takes as long as torch takes to load."""
        set_environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})  # read when torch loads; what a socket tries is not the user's business
        if self._listening is None:
            self._knock()
        from torch.distributed import TCPStore

        if self._listening is not None:
            wait = timedelta(seconds=60)
            own = self._listening.detach()  # the store closes it
            self.store = TCPStore(self.host, self.port, None, True, wait, wait_for_workers=False, master_listen_fd=own)
            self._listening = None
            return
        self.store = TCPStore(self.host, self.port, None, False, timedelta(seconds=60), wait_for_workers=False)

    def _knock(self) -> None:
        """Wait until node 0 answers."""
        deadline = time.monotonic() + self.nodes.timeout_seconds
        while time.monotonic() < deadline:
            try:
                socket.create_connection((self.host, self.port), timeout=self.nodes.timeout_seconds).close()
                return
            except OSError:
                time.sleep(POLL_SECONDS)
        raise LaunchError(
            f"node 0 is missing: nobody answers at {self.host}:{self.port} after {self.nodes.timeout_seconds:g} s. "
            "Start node 0, and check the address, the port and the firewall."
        )

    def gather(self) -> None:
        """Wait for the launchers of all nodes; afterwards every one knows where its ranks begin."""
        store, num = self._served(), self.nodes.num
        mine = json.dumps({"num_ranks": self.num_ranks, "num_nodes": num, "host": socket.gethostname(), "id": str(uuid.uuid4())})
        there = store.compare_set(self._key(self.nodes.rank), "", mine).decode()
        if there != mine:
            host = json.loads(there)["host"]
            raise LaunchError(f"--node-rank is {self.nodes.rank}; {host} is that node already. Give each node its own.")
        deadline = time.monotonic() + self.nodes.timeout_seconds
        while missing := [node for node in range(num) if not store.check([self._key(node)])]:
            if (told := self.trouble()) is not None:
                raise LaunchError(str(told))
            if time.monotonic() > deadline:
                self._give_up(missing)
            time.sleep(POLL_SECONDS)
        said = [json.loads(store.get(self._key(node))) for node in range(num)]
        if wrong := [f"node {node} was given {one['num_nodes']}" for node, one in enumerate(said) if one["num_nodes"] != num]:
            raise LaunchError(f"--nnodes is {num}; {', '.join(wrong)}. Give all nodes the same.")
        counts = [one["num_ranks"] for one in said]
        self.first_rank, self.world = sum(counts[: self.nodes.rank]), sum(counts)
        hosts = ", ".join(f"node {node} {one['host']} with {one['num_ranks']}" for node, one in enumerate(said))
        log.info("%d ranks on %d nodes: %s", self.world, num, hosts)

    def _give_up(self, missing: list[int]) -> None:
        names = ", ".join(map(str, missing))
        message = (
            f"node rank{'s' if len(missing) > 1 else ''} {names} of {self.nodes.num} did not arrive at {self.host}:{self.port} "
            f"within {self.nodes.timeout_seconds:g} s. Start them with the same --master, or wait longer with --node-timeout."
        )
        self.announce(RankError(message, LaunchError.exit_code, time.time()))
        raise LaunchError(message)

    def trouble(self) -> RankError | None:
        """The first of what went wrong on any node; also if node 0 is gone."""
        if self.store is None or self.nodes.num == 1:
            return None
        told: list[RankError] = []
        try:
            for key in (f"{PREFIX}failed/{node}" for node in range(self.nodes.num)):
                if self.store.check([key]):
                    told.append(RankError(**json.loads(self.store.get(key))))
        except RuntimeError:
            return RankError(f"node 0 is gone: {self.host}:{self.port} no longer answers. All ranks here were ended.", 1, time.time())
        return min(told, key=lambda one: one.at, default=None)

    def announce(self, error: RankError) -> None:
        """Tell the other nodes what went wrong here."""
        if self.store is None or self.nodes.num == 1:
            return
        try:
            failure = {"message": str(error), "exit_code": error.exit_code, "at": error.at}
            self.store.set(f"{PREFIX}failed/{self.nodes.rank}", json.dumps(failure))
        except RuntimeError:
            return  # node 0 is gone, and the others see that themselves

    def first_cause(self, error: RankError) -> RankError:
        """What ended the whole run: an error here may only be that a peer elsewhere was lost, of which that node tells about now."""
        if self.nodes.num == 1 or error.at == 0:
            return error
        deadline = time.monotonic() + TELL_SECONDS
        first = error
        while time.monotonic() < deadline:
            told = self.trouble()
            if told is not None and told.at < first.at:
                first = told
            time.sleep(POLL_SECONDS)
        return first

    def leave(self, *, well: bool) -> None:
        """The end: node 0 serves until the others are done too, or have had time to hear of a failure."""
        if self.store is None or self.nodes.num == 1:
            return
        try:
            self.store.add(PREFIX + "done", 1)
            deadline = None if well else time.monotonic() + LINGER_SECONDS
            while self.nodes.rank == 0 and self.store.add(PREFIX + "done", 0) < self._arrived():
                if deadline is None and self.trouble() is not None:
                    deadline = time.monotonic() + LINGER_SECONDS
                if deadline is not None and time.monotonic() > deadline:
                    return
                time.sleep(POLL_SECONDS)
        except RuntimeError:
            return  # node 0 left first because of a failure

    def _arrived(self) -> int:
        store = self._served()
        return sum(store.check([self._key(node)]) for node in range(self.nodes.num))

    def _served(self) -> TCPStore:
        assert self.store is not None
        return self.store

    def _key(self, node: int) -> str:
        return f"{PREFIX}node/{node}"

    def interface(self) -> str | None:
        """The network interface that leads to node 0, by name; None where the system does not say."""
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
                answer = fcntl.ioctl(asking.fileno(), 0x8915, name.encode().ljust(256, b"\0"))  # SIOCGIFADDR
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
