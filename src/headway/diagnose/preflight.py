"""The fast checks before a job on several hosts: every host calls `preflight` at the same time and gets the same list of checks.

    preflight(StoreExchange(store, node, num_nodes), run_folder, HostNeeds(ranks=8, gpu_ranks=True))     a few seconds, no torch needed
    require(checks)                                                      logs warnings; raises LaunchError if something failed

Checked: each host (`host.py`), equal versions and code, clocks, and that the run folder is one folder on all hosts in which a
rename is atomic. Where hosts cannot exchange yet (before an ssh launch), each runs `headway doctor --fast --json`, and
`compare_hosts` compares their facts.
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

from headway.diagnose.check import Check, failures
from headway.diagnose.host import HostFacts, HostNeeds, host_checks
from headway.errors import LaunchError, first_line
from headway.runtime.storage import missing_folders, remove_empty

log = logging.getLogger("headway")

MAX_CLOCK_SKEW_SECONDS = 1.0
SEE_SECONDS = 10.0
"""How long a file written on one host may take to appear on another (NFS caches what it knows about a folder)."""
RENAME_SECONDS = 0.3
CONTENT = "x" * 4096
PREFIX = "headway/preflight/"
SHARED_FOLDER = "shared folder"
MUST_BE_EQUAL = ("headway", "torch", "numpy")


class Exchange(Protocol):
    """How hosts swap short texts. All hosts must call `swap` equally often."""

    rank: int
    size: int

    def swap(self, text: str) -> list[str]:
        """Give a text; returns those of all hosts, by rank."""
        ...


class KeyValueStore(Protocol):
    """The two methods of torch's TCPStore that an exchange needs; `get` waits until the key is there."""

    def set(self, key: str, value: str) -> Any:
        """Store a value."""
        ...

    def get(self, key: str) -> bytes:
        """The value of a key."""
        ...


class StoreExchange:
    """An exchange over the key-value store in which the launchers of a job meet. `name` separates several checks of one job."""

    def __init__(self, store: KeyValueStore, rank: int, size: int, name: str = "launch") -> None:
        self.store, self.rank, self.size, self.name = store, rank, size, name
        self.rounds = 0

    def swap(self, text: str) -> list[str]:
        """Wait for the texts of all hosts."""
        self.rounds += 1
        keys = [f"{PREFIX}{self.name}/{self.rounds}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], text)
        found: list[str] = []
        for rank, key in enumerate(keys):
            try:
                found.append(self.store.get(key).decode())
            except RuntimeError as error:
                raise LaunchError(
                    f"node {rank} did not answer the checks before the start: {first_line(error)}. Look at its log."
                ) from None
        return found


def preflight(
    exchange: Exchange,
    folder: Path,
    needs: HostNeeds = HostNeeds(),
    environment: Mapping[str, str] | None = None,
) -> list[Check]:
    """Check all hosts of a job; each of them calls this. `folder` is where the run will be. Leaves nothing behind."""
    facts, mine = host_checks(folder, needs, os.environ if environment is None else environment)
    answers = [
        json.loads(text)
        for text in exchange.swap(
            json.dumps([facts.to_json(), [check.to_json() for check in mine]])
        )
    ]
    hosts = [HostFacts.from_json(one[0]) for one in answers]
    checks = [Check.from_json(one) for one in answers[0][1]] if exchange.size == 1 else []
    if exchange.size > 1:
        for name, (_, found) in zip(host_names(hosts), answers, strict=True):
            checks += [
                check.on(name) for check in map(Check.from_json, found) if check.state != "ok"
            ]
        checks.append(Check("hosts", "ok", f"{exchange.size} answered"))
        offsets = clock_offsets(exchange)
        checks += [
            *compare_hosts(hosts, offsets),
            *shared_folder_checks(exchange, folder, host_names(hosts)),
        ]
    return checks


def host_names(hosts: Sequence[HostFacts]) -> list[str]:
    """A name for each host; equal names get the node's number."""
    counts = Counter(one.host for one in hosts)
    return [
        one.host if counts[one.host] == 1 else f"{one.host} (node {node})"
        for node, one in enumerate(hosts)
    ]


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
    """Seconds by which each host's clock is ahead of node 0's; wrong by the delay of the network."""
    exchange.swap("ready")
    times = [float(text) for text in exchange.swap(repr(time.time()))]
    return [one - times[0] for one in times]


def compare_hosts(
    hosts: Sequence[HostFacts], offsets: Sequence[float] | None = None
) -> list[Check]:
    """What must be equal on all hosts: code, versions, GPUs; and clocks, if their offsets in seconds are known."""
    names = host_names(hosts)
    checks: list[Check] = []
    packages = sorted({name for one in hosts for name in one.packages})
    different: list[Check] = []
    for name in packages:
        found = _difference(names, [one.packages.get(name, "missing") for one in hosts])
        if found is not None:
            state = "fail" if name in MUST_BE_EQUAL else "warn"
            different.append(
                Check(
                    f"package {name}",
                    state,
                    f"differs: {found}",
                    "Install the same version on all hosts.",
                )
            )
    if not any(check.name == "package headway" for check in different):
        found = _difference(names, [one.code for one in hosts])
        if found is not None:
            different.append(
                Check(
                    "headway's code",
                    "fail",
                    f"differs: {found}",
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
    for title, values, state, remedy in (
        (
            "python",
            [one.python.rpartition(".")[0] for one in hosts],
            "fail",
            "Use one Python version on all hosts.",
        ),
        (
            "cuda",
            [str(one.cuda) for one in hosts],
            "fail",
            "Install the same torch build on all hosts.",
        ),
        (
            "nccl",
            [str(one.nccl) for one in hosts],
            "fail",
            "Install the same torch build on all hosts.",
        ),
        ("driver", [str(one.driver) for one in hosts], "warn", "Update the older drivers."),
        (
            "gpus",
            [_count_names(one.gpus) for one in hosts],
            "warn",
            "Every step waits for the slowest host: use hosts of one kind.",
        ),
    ):
        found = _difference(names, values)
        if found is not None:
            checks.append(Check(title, state, f"differs: {found}", remedy))  # pyright: ignore[reportArgumentType]
    for key in sorted({key for one in hosts for key in one.same}):
        found = _difference(names, [one.same.get(key, "missing") for one in hosts])
        if found is not None:
            checks.append(Check(key, "fail", f"differs: {found}", "Give all hosts the same."))
    return [*checks, *clock_checks(names, offsets)]


def clock_checks(names: Sequence[str], offsets: Sequence[float] | None) -> Iterator[Check]:
    """Clocks that differ."""
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
    return "; ".join(
        f"{value} on {', '.join(n for n, v in zip(names, values, strict=True) if v == value)}"
        for value in dict.fromkeys(values)
    )


def _count_names(gpus: Sequence[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items()) or "none"


def shared_folder_checks(exchange: Exchange, folder: Path, names: Sequence[str]) -> list[Check]:
    """Whether every host sees what another wrote into the folder, and never a half-written file where another renames."""
    made = missing_folders(folder)  # before the first swap: no host has made one yet
    token = exchange.swap(uuid.uuid4().hex)[0]
    place = folder / f".headway-check-{token}"
    problem = ""
    try:
        place.mkdir(parents=True, exist_ok=True)
        (place / f"node-{exchange.rank}").write_text(token)
        if exchange.rank == 0:
            (place / "replaced").write_text(
                CONTENT
            )  # before anybody looks: NFS remembers for a while that a file was missing
    except OSError as error:
        problem = f"cannot write: {error.strerror}"
    written = exchange.swap(problem)
    unseen = _unseen(place, token, [node for node, text in enumerate(written) if not text])
    seen = [json.loads(text) for text in exchange.swap(json.dumps(unseen))]
    is_shared = not any(written) and not any(seen)
    torn = _rename_trouble(place, exchange.rank) if is_shared else ""
    troubles = exchange.swap(torn)
    with suppress(OSError):
        for path in (
            (*place.glob("node-*"), *place.glob("replaced*"))
            if exchange.rank == 0 or not is_shared
            else ()
        ):
            path.unlink(missing_ok=True)
        place.rmdir()
    remove_empty(made)
    exchange.swap("")  # all hosts wait until the last one has removed its files
    return _shared_folder_findings(folder, names, written, seen, troubles)


def _unseen(place: Path, token: str, nodes: Sequence[int]) -> list[int]:
    """The nodes whose file does not appear here in time."""
    deadline = time.monotonic() + SEE_SECONDS
    left = list(nodes)
    while left:
        left = [node for node in left if _content(place / f"node-{node}") != token]
        if not left or time.monotonic() > deadline:
            break
        with suppress(OSError):
            os.listdir(place)  # makes NFS look again
        time.sleep(0.05)
    return left


def _content(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _rename_trouble(place: Path, rank: int) -> str:
    """Node 0 replaces a file again and again; the others read it and must always find a whole one."""
    target, deadline = place / "replaced", time.monotonic() + RENAME_SECONDS
    while time.monotonic() < deadline:
        if rank == 0:
            new = place / "replaced-new"
            new.write_text(CONTENT)
            os.replace(new, target)
            continue
        try:
            text = target.read_text()
        except FileNotFoundError:
            return "the file was missing for a moment"
        except OSError as error:
            if (
                error.errno == errno.ESTALE
            ):  # NFS: the file that was opened has been replaced; a reader opens it again
                continue
            return f"reading failed: {error.strerror}"
        if text != CONTENT:
            return f"{len(text)} of {len(CONTENT)} bytes were there"
    return ""


def _shared_folder_findings(
    folder: Path,
    names: Sequence[str],
    written: Sequence[str],
    seen: Sequence[Sequence[int]],
    troubles: Sequence[str],
) -> list[Check]:
    remedy = "Use a folder that all hosts share (NFS, Lustre, ...) for run.dir."
    if any(written):
        detail = "; ".join(
            f"{name}: {text}" for name, text in zip(names, written, strict=True) if text
        )
        return [
            Check(
                SHARED_FOLDER,
                "fail",
                f"{folder}: {detail}",
                "Make the folder writable on every host.",
            )
        ]
    if any(seen):
        pairs = [
            f"{name} does not see what {', '.join(names[node] for node in nodes)} wrote"
            for name, nodes in zip(names, seen, strict=True)
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
