"""The fast checks before a job on several hosts: every host calls `preflight` at the same time and
gets the same list of checks.

    exchange = StoreExchange(store, node, num_nodes)
    checks = preflight(exchange, run_folder, HostNeeds(ranks=8, gpu_ranks=True))
                        a few seconds, no torch needed
    require(checks)     logs warnings; raises LaunchError if something failed

Checked: each host (`host.py`), equal versions and code, clocks, and that the run folder is one
folder on all hosts in which a rename is atomic. Where hosts cannot exchange yet (before an ssh
launch), each runs `headway doctor --fast --json`, and `compare_hosts` compares their facts.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from headway.diagnose.check import Check, State, failures
from headway.diagnose.host import HostFacts, HostNeeds, host_checks
from headway.errors import LaunchError, first_line
from headway.runtime.storage import missing_folders, remove_empty

log = logging.getLogger("headway")

MAX_CLOCK_SKEW_SECONDS = 1.0
SEE_SECONDS = 10.0
"""How long a file written on one host may take to appear on another (NFS caches what it knows about
a folder).
"""
RENAME_SECONDS = 0.3
"""For how long one host replaces a file that the others read."""
POLL_SECONDS = 0.05
CONTENT = "x" * 4096
"""Of the file that is replaced."""
PREFIX = "headway/preflight/"
"""Of keys in the store of the launchers."""
SHARED_FOLDER = "shared folder"
MUST_BE_EQUAL = ("headway", "torch", "numpy")
"""Another version of these may compute or store something else; of other packages it is a
warning.
"""


class Exchange(Protocol):
    """How hosts swap short texts. All hosts must call `swap` equally often."""

    rank: int
    size: int

    def swap(self, text: str) -> list[str]:
        """Give a text; returns those of all hosts, by rank."""
        ...


class KeyValueStore(Protocol):
    """The two methods of torch's TCPStore that an exchange needs.

    `get` waits until the key is there.
    """

    def set(self, key: str, value: str) -> Any:
        """Store a value."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key."""
        ...


class StoreExchange:
    """An exchange over the key-value store in which the launchers of a job meet.

    `name` separates several checks of one job.
    """

    def __init__(self, store: KeyValueStore, rank: int, size: int, name: str = "launch") -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.name = name
        self.rounds = 0

    def swap(self, text: str) -> list[str]:
        """Wait for the texts of all hosts."""
        # A key is written once: each swap has its own.
        self.rounds += 1
        keys = [f"{PREFIX}{self.name}/{self.rounds}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], text)
        texts: list[str] = []
        for rank, key in enumerate(keys):
            try:
                texts.append(self.store.get(key).decode())
            except RuntimeError as error:
                raise LaunchError(
                    f"node {rank} did not answer the checks before the start: "
                    f"{first_line(error)}. Look at its log."
                ) from None

        return texts


def preflight(
    exchange: Exchange,
    folder: Path,
    needs: HostNeeds = HostNeeds(),
    environment: Mapping[str, str] | None = None,
) -> list[Check]:
    """Check all hosts of a job; each of them calls this.

    `folder` is where the run will be. Leaves nothing behind.
    """
    if environment is None:
        environment = os.environ
    facts, local_checks = host_checks(folder, needs, environment)
    if exchange.size == 1:
        return local_checks

    message = json.dumps([facts.to_json(), [check.to_json() for check in local_checks]])
    answers = [json.loads(text) for text in exchange.swap(message)]
    hosts = [HostFacts.from_json(host_facts) for host_facts, _ in answers]
    names = host_names(hosts)

    # What is good on a host is not listed: with a hundred hosts nobody would read it.
    checks: list[Check] = []
    for name, (_, checks_data) in zip(names, answers, strict=True):
        for check in map(Check.from_json, checks_data):
            if check.state != "ok":
                checks.append(check.on(name))

    checks.append(Check("hosts", "ok", f"{exchange.size} answered"))
    checks += compare_hosts(hosts, clock_offsets(exchange))
    checks += shared_folder_checks(exchange, folder, names)
    return checks


def host_names(hosts: Sequence[HostFacts]) -> list[str]:
    """A name for each host; equal names get the node's number."""
    counts = Counter(facts.host for facts in hosts)
    names: list[str] = []
    for node, facts in enumerate(hosts):
        name = facts.host
        if counts[name] > 1:
            name = f"{name} (node {node})"
        names.append(name)
    return names


def require(checks: Sequence[Check]) -> None:
    """Log what is doubtful; refuse to start if something failed."""
    for check in checks:
        if check.state == "warn":
            log.warning("%s: %s. %s", check.name, check.detail, check.remedy or "")
    failed = failures(checks)
    if failed:
        lines = [
            f"{check.name}: {check.detail.rstrip('.')}. {check.remedy or ''}".strip()
            for check in failed
        ]
        raise LaunchError("the job was not started. " + " ".join(lines))


def clock_offsets(exchange: Exchange) -> list[float]:
    """Seconds by which each host's clock is ahead of node 0's.

    Wrong by the delay of the network.
    """
    # The first swap lets all hosts read their clocks at the same moment.
    exchange.swap("ready")
    times = [float(text) for text in exchange.swap(repr(time.time()))]
    return [seconds - times[0] for seconds in times]


def compare_hosts(
    hosts: Sequence[HostFacts], offsets: Sequence[float] | None = None
) -> list[Check]:
    """What must be equal on all hosts: code, versions, GPUs.

    Clocks, too, if their offsets in seconds are known.
    """
    names = host_names(hosts)
    checks: list[Check] = []
    packages = sorted(set().union(*(facts.packages for facts in hosts)))
    different: list[Check] = []
    for name in packages:
        difference = _difference(names, [facts.packages.get(name, "missing") for facts in hosts])
        if difference is not None:
            state = "fail" if name in MUST_BE_EQUAL else "warn"
            different.append(
                Check(
                    f"package {name}",
                    state,
                    f"differs: {difference}",
                    "Install the same version on all hosts.",
                )
            )

    # Code of different versions differs anyway.
    if not any(check.name == "package headway" for check in different):
        difference = _difference(names, [facts.code for facts in hosts])
        if difference is not None:
            different.append(
                Check(
                    "headway's code",
                    "fail",
                    f"differs: {difference}",
                    "Install the same build on all hosts, or one shared folder.",
                )
            )

    checks += different or [
        Check(
            "versions",
            "ok",
            f"{len(packages)} packages and headway's code are equal on {len(hosts)} hosts",
        )
    ]

    same_torch = "Install the same torch build on all hosts."
    one_kind = "Every step waits for the slowest host: use hosts of one kind."
    # The last part of Python's version may differ: pickles and bytecode do not change with it.
    pythons = [facts.python.rpartition(".")[0] for facts in hosts]
    table: list[tuple[str, list[str], State, str]] = [
        ("python", pythons, "fail", "Use one Python version on all hosts."),
        ("cuda", [str(facts.cuda) for facts in hosts], "fail", same_torch),
        ("nccl", [str(facts.nccl) for facts in hosts], "fail", same_torch),
        ("driver", [str(facts.driver) for facts in hosts], "warn", "Update the older drivers."),
        ("gpus", [_count_names(facts.gpus) for facts in hosts], "warn", one_kind),
    ]
    for title, values, state, remedy in table:
        difference = _difference(names, values)
        if difference is not None:
            checks.append(Check(title, state, f"differs: {difference}", remedy))

    for key in sorted(set().union(*(facts.same for facts in hosts))):
        difference = _difference(names, [facts.same.get(key, "missing") for facts in hosts])
        if difference is not None:
            checks.append(Check(key, "fail", f"differs: {difference}", "Give all hosts the same."))

    return [*checks, *clock_checks(names, offsets)]


def clock_checks(names: Sequence[str], offsets: Sequence[float] | None) -> Iterator[Check]:
    """One line about the clocks of all hosts; none where their offsets are not known."""
    if offsets is None:
        return

    worst = max(offsets) - min(offsets)
    if worst <= MAX_CLOCK_SKEW_SECONDS:
        yield Check("clocks", "ok", f"within {worst:.2f} s on {len(names)} hosts")
        return

    apart = ", ".join(
        f"{name} {offset:+.1f} s" for name, offset in zip(names, offsets, strict=True)
    )
    yield Check(
        "clocks",
        "warn",
        f"differ: {apart}",
        "Synchronise the clocks (NTP); logs, time-outs of S3 and file times go wrong.",
    )


def _difference(names: Sequence[str], values: Sequence[str]) -> str | None:
    """Which hosts have which value, if they differ."""
    if len(set(values)) < 2:
        return None
    hosts_of: dict[str, list[str]] = {}
    for name, value in zip(names, values, strict=True):
        hosts_of.setdefault(value, []).append(name)
    return "; ".join(f"{value} on {', '.join(hosts)}" for value, hosts in hosts_of.items())


def _count_names(gpus: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items()) or "none"


def shared_folder_checks(exchange: Exchange, folder: Path, names: Sequence[str]) -> list[Check]:
    """Whether every host sees what another wrote into the folder, and never a half-written file
    where another renames.

    Hosts go through the same steps; each swap is a barrier between two of them.
    """
    # Before the first swap: no host has made one yet, so that all of them remove the same.
    missing = missing_folders(folder)
    token = exchange.swap(uuid.uuid4().hex)[0]
    check_folder = folder / f".headway-check-{token}"

    problem = ""
    try:
        check_folder.mkdir(parents=True, exist_ok=True)
        (check_folder / f"node-{exchange.rank}").write_text(token)
        if exchange.rank == 0:
            # Before anybody looks: NFS remembers for a while that a file was missing.
            (check_folder / "replaced").write_text(CONTENT)
    except OSError as error:
        problem = f"cannot write: {error.strerror}"
    problems = exchange.swap(problem)

    writers = [node for node, text in enumerate(problems) if not text]
    unseen = _unseen(check_folder, token, writers)
    all_unseen = [json.loads(text) for text in exchange.swap(json.dumps(unseen))]
    is_shared = not any(problems) and not any(all_unseen)

    rename_trouble = ""
    if is_shared:
        rename_trouble = _rename_trouble(check_folder, exchange.rank)
    troubles = exchange.swap(rename_trouble)

    with suppress(OSError):
        # In a shared folder one host removes the files; otherwise each has its own.
        if exchange.rank == 0 or not is_shared:
            for path in (*check_folder.glob("node-*"), *check_folder.glob("replaced*")):
                path.unlink(missing_ok=True)
        check_folder.rmdir()
    remove_empty(missing)

    exchange.swap("")  # all hosts wait until the last one has removed its files
    return _shared_folder_findings(folder, names, problems, all_unseen, troubles)


def _unseen(check_folder: Path, token: str, nodes: Sequence[int]) -> list[int]:
    """The nodes whose file does not appear here in time."""
    deadline = time.monotonic() + SEE_SECONDS
    unseen = list(nodes)
    while unseen:
        unseen = [node for node in unseen if _content(check_folder / f"node-{node}") != token]
        if not unseen or time.monotonic() > deadline:
            break
        with suppress(OSError):
            os.listdir(check_folder)  # makes NFS look again
        time.sleep(POLL_SECONDS)
    return unseen


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _rename_trouble(check_folder: Path, rank: int) -> str:
    """What a reader of a file that is replaced again and again found wrong; empty: nothing.

    Node 0 replaces it, the others read it and must always find a whole one.
    """
    target = check_folder / "replaced"
    deadline = time.monotonic() + RENAME_SECONDS
    while time.monotonic() < deadline:
        if rank == 0:
            replacement = check_folder / "replaced-new"
            replacement.write_text(CONTENT)
            os.replace(replacement, target)
            continue

        try:
            text = target.read_text()
        except FileNotFoundError:
            return "the file was missing for a moment"
        except OSError as error:
            # NFS: the file that was opened has been replaced; a reader opens it again.
            if error.errno == errno.ESTALE:
                continue
            return f"reading failed: {error.strerror}"

        if text != CONTENT:
            return f"{len(text)} of {len(CONTENT)} bytes were there"

    return ""


def _shared_folder_findings(
    folder: Path,
    names: Sequence[str],
    problems: Sequence[str],
    unseen: Sequence[Sequence[int]],
    troubles: Sequence[str],
) -> list[Check]:
    """The checks that follow from what each host found, by node: why it cannot write, whose files
    it does not see, what went wrong with renames.
    """
    remedy = "Use a folder that all hosts share (NFS, Lustre, ...) for run.dir."
    if any(problems):
        detail = "; ".join(
            f"{name}: {text}" for name, text in zip(names, problems, strict=True) if text
        )
        return [
            Check(
                SHARED_FOLDER,
                "fail",
                f"{folder}: {detail}",
                "Make the folder writable on every host.",
            )
        ]

    if any(unseen):
        pairs = [
            f"{name} does not see what {', '.join(names[node] for node in nodes)} wrote"
            for name, nodes in zip(names, unseen, strict=True)
            if nodes
        ]
        return [Check(SHARED_FOLDER, "fail", f"{folder}: {'; '.join(pairs)}", remedy)]

    checks = [Check(SHARED_FOLDER, "ok", f"{folder} is one folder on {len(names)} hosts")]
    if any(troubles):
        detail = "; ".join(
            f"{name}: {text}" for name, text in zip(names, troubles, strict=True) if text
        )
        checks.append(
            Check(
                "atomic rename",
                "fail",
                f"{folder}: {detail}",
                "Use another file system for run.dir; checkpoints need this.",
            )
        )
    else:
        checks.append(Check("atomic rename", "ok", "a replaced file is always whole"))

    return checks
