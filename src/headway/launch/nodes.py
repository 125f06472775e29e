"""Rendezvous of the launchers of a run: node 0 serves a small key-value store in which every
launcher registers.

    node 0  binds the port, serves ◀── node 1 .. n-1 connect
    each    node/<k>   = number of its ranks, host (JSON)    all wait until every node/<k> is there
    each    failed/<k> = when and why a rank failed (JSON)   all poll it
    each    done      += 1 at its end                        node 0 serves until all are done

The ranks use the same store to find each other, so the port is never free between being chosen and
being used.
"""

from __future__ import annotations

import json
import logging
import socket
import time
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

from headway.errors import LaunchError
from headway.launch.failure import RankError
from headway.launch.options import LOOPBACK, NodeSpec
from headway.runtime.process import set_environment

if TYPE_CHECKING:
    from torch.distributed import TCPStore

log = logging.getLogger("headway")

POLL_SECONDS = 0.2
"""How often a launcher looks again, in all other cases than WAIT_SECONDS."""
WAIT_SECONDS = 0.5
"""How often a node other than node 0 asks whether all are done."""
LINGER_SECONDS = 10.0
"""After a failure, how long a node stays so that the others can read its cause."""
REPORT_SECONDS = 3.0
"""How long a node waits for an earlier failure of another node."""
STORE_SECONDS = 60.0
"""How long a call of the store may take."""
BACKLOG = 4096
"""Ranks and launchers that may connect at the same moment."""
PREFIX = "headway/launch/"
SIOCGIFADDR = 0x8915
"""The ioctl of Linux that asks for the IPv4 address of a network interface."""


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
            "--master is given and --nnodes is 1; one machine needs no rendezvous. "
            "Leave it out, or give --nnodes."
        )
    host = LOOPBACK
    port = 0
    if master is not None:
        host, port = parse_master(master)
    return NodeSpec(num, rank, host, port, timeout_seconds)


class Rendezvous:
    """The store as one launcher sees it.

    After `gather` it knows its first rank and the number of all ranks. `nodes.rank` is the number
    of the node, not that of a rank.
    """

    def __init__(self, nodes: NodeSpec, num_ranks: int) -> None:
        self.nodes = nodes
        self.num_ranks = num_ranks
        self.first_rank = 0
        self.world = num_ranks
        self.host = nodes.host
        self.port = nodes.port
        self.store: TCPStore | None = None
        # Bound at once: from here on no other program can take the port.
        self._listening: socket.socket | None = None
        if nodes.rank == 0:
            self._listening = self._bind()

    def _bind(self) -> socket.socket:
        family, _, _, _, address = self._resolve()
        listening = socket.socket(family, socket.SOCK_STREAM)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind(address)
        except OSError as error:
            listening.close()
            raise LaunchError(
                f"--master is {self.host}:{self.port}; node 0 cannot listen there: "
                f"{error.strerror}. Give an address of node 0 and a port that is free there."
            ) from None
        listening.listen(BACKLOG)
        self.port = int(listening.getsockname()[1])
        return listening

    def _resolve(self) -> tuple[int, int, int, str, tuple[str, int] | tuple[str, int, int, int]]:
        try:
            addresses = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            return addresses[0]  # pyright: ignore[reportReturnType]
        except OSError as error:
            raise LaunchError(
                f"--master is {self.host}:{self.port}; {self.host} has no address: "
                f"{error.strerror}."
            ) from None

    def serve(self) -> None:
        """Serve the store (node 0), or connect to it. Takes as long as loading torch."""
        # Hides the retries of torch's sockets. Torch reads it when it loads, so it is set before
        # the import.
        set_environment({"TORCH_CPP_LOG_LEVEL": "ERROR"})
        if self._listening is None:
            self._wait_for_node_0()
        from torch.distributed import TCPStore

        timeout = timedelta(seconds=STORE_SECONDS)
        if self._listening is None:
            # The store need not know how many clients come, so it gets no world size.
            self.store = TCPStore(
                self.host,
                self.port,
                world_size=None,
                is_master=False,
                timeout=timeout,
                wait_for_workers=False,
            )
            return

        descriptor = self._listening.detach()  # the store closes it
        self._listening = None
        # On the socket that is bound already: the port was never free for another program.
        self.store = TCPStore(
            self.host,
            self.port,
            world_size=None,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=descriptor,
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
            f"node 0 is missing: no answer from {self.host}:{self.port} after "
            f"{self.nodes.timeout_seconds:g} s. "
            "Start node 0, and check the address, the port and the firewall."
        )

    def gather(self) -> None:
        """Wait for the launchers of all nodes, then compute this node's first rank."""
        store = self._connected()
        num = self.nodes.num
        entry = json.dumps(
            {
                "num_ranks": self.num_ranks,
                "num_nodes": num,
                "host": socket.gethostname(),
                "id": str(uuid.uuid4()),
            }
        )
        # Sets the key only if it is not there yet. The random id tells this launcher's entry from
        # that of another one on the same host.
        stored = store.compare_set(self._key(self.nodes.rank), "", entry).decode()
        if stored != entry:
            host = json.loads(stored)["host"]
            raise LaunchError(
                f"--node-rank is {self.nodes.rank}; {host} has that rank already. "
                "Give each node its own."
            )

        deadline = time.monotonic() + self.nodes.timeout_seconds
        while missing := [node for node in range(num) if not store.check([self._key(node)])]:
            if (failure := self.first_failure()) is not None:
                raise LaunchError(str(failure))
            if time.monotonic() > deadline:
                self._give_up(missing)
            time.sleep(POLL_SECONDS)

        counts: list[int] = []
        hosts: list[str] = []
        wrong: list[str] = []
        for node in range(num):
            values = json.loads(store.get(self._key(node)))
            counts.append(values["num_ranks"])
            hosts.append(f"node {node} {values['host']} with {values['num_ranks']}")
            if values["num_nodes"] != num:
                wrong.append(f"node {node} has {values['num_nodes']}")
        if wrong:
            raise LaunchError(
                f"--nnodes is {num}; {', '.join(wrong)}. Give all nodes the same number."
            )

        # Ranks count from node to node; nodes may have different numbers of them.
        self.first_rank = sum(counts[: self.nodes.rank])
        self.world = sum(counts)
        log.info("%d ranks on %d nodes: %s", self.world, num, ", ".join(hosts))

    def _give_up(self, missing: list[int]) -> None:
        """Refuse the start here, and on the nodes that did connect."""
        plural = "s" if len(missing) > 1 else ""
        names = ", ".join(map(str, missing))
        message = (
            f"node rank{plural} {names} of {self.nodes.num} did not connect to "
            f"{self.host}:{self.port} within {self.nodes.timeout_seconds:g} s. "
            "Start them with the same --master, or wait longer with --node-timeout."
        )
        self.announce(RankError(message, LaunchError.exit_code, time.time()))
        raise LaunchError(message)

    def first_failure(self) -> RankError | None:
        """The first failure on any node; a lost node 0 counts as one."""
        if self.store is None or self.nodes.num == 1:
            return None
        failures: list[RankError] = []
        try:
            for node in range(self.nodes.num):
                key = f"{PREFIX}failed/{node}"
                if self.store.check([key]):
                    failures.append(RankError(**json.loads(self.store.get(key))))
        except RuntimeError:
            return RankError(
                f"node 0 is gone: {self.host}:{self.port} no longer answers. "
                "All ranks here were stopped.",
                1,
                time.time(),
            )
        return min(failures, key=lambda failure: failure.at, default=None)

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
        """The failure that ended the run: `error`, or an earlier one of another node.

        An error here may only be the loss of a peer, whose node reports the cause about now.
        """
        # At 0: a rank here was killed by a signal; no failure counts as earlier (see RankError).
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
        """Wait until all nodes are done. srun kills all nodes some time after the first one ends,
        and node 0 may still be saving.

        Node 0 serves until the others are done too. After a failure, here (not `well`) or on
        another node, nobody waits longer than LINGER_SECONDS, in which the others read the cause.
        """
        if self.store is None or self.nodes.num == 1:
            return
        is_first = self.nodes.rank == 0
        done_key = PREFIX + "done"
        try:
            self.store.add(done_key, 1)
            deadline = None
            if not well:
                deadline = time.monotonic() + LINGER_SECONDS
            while True:
                # Node 0 does not wait for nodes that never came.
                num_expected = self._num_arrived() if is_first else self.nodes.num
                # Adding 0 reads the number.
                if self.store.add(done_key, 0) >= num_expected:
                    return
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
        # Connecting a UDP socket sends nothing: the kernel only chooses a route.
        family, _, _, _, address = self._resolve()
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(address)
            except OSError:
                return None
            return _interface_of(str(probe.getsockname()[0]))


def _interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address; None if there is none, or it is unknown."""
    try:
        import fcntl
    except ImportError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            # A struct ifreq: the name in 16 bytes, then a sockaddr_in with the address at byte 20.
            request = name.encode().ljust(256, b"\0")
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
            except OSError:
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
