"""The hosts of a job.

In: `--hosts a,b,user@c:2222` or a host file. Out: `Host` values with distinct labels, or one line
per mistake.

Host files, one host on a line, # begins a comment:

    gpu01                    its number of ranks comes from --nproc or its GPUs; a name on several
                             lines gets one rank for each
    gpu01 slots=8            OpenMPI, DeepSpeed; also max_slots=, and port= for ssh
    gpu01:8                  MPICH: eight ranks
    me@gpu01 slots=8
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError
from headway.runtime.json_file import read_bounded

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*|[0-9A-Fa-f:]+(%[A-Za-z0-9_.-]+)?")
"""No option of ssh and nothing that a shell reads: a name begins with a letter, a digit or _.

The second form is an IPv6 address.
"""
USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.@\\-]*")
FIRST_PORT = 22
"""A smaller number after a colon in --hosts is a number of ranks, as horovodrun and mpiexec write
it.
"""
LARGEST_FILE = 4 << 20
MAX_PORT = 65535
MAX_PROBLEMS = 20
"""Bad lines of a host file that the error lists."""


@dataclass(frozen=True)
class Host:
    """One host as ssh is called for it."""

    name: str
    user: str | None = None
    port: int | None = None
    slots: int | None = None
    """Ranks, if the host file says so."""
    label: str = ""
    """How log lines and errors name it; distinct among the hosts of a job."""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def parse_hosts(text: str) -> list[Host]:
    """The hosts of `--hosts`."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(
            f"--hosts is {text[:200]!r}; an entry is empty. Write HOST[,HOST...], each "
            "[USER@]HOST[:PORT]."
        )
    hosts = [_parse_host(part, f"--hosts: {part[:100]!r}") for part in parts]
    return with_labels(hosts, "--hosts")


def _parse_host(text: str, where: str) -> Host:
    """`[user@]host[:port]`, also `[::1]:port`."""
    user, at_sign, address = text.rpartition("@")
    bracketed = re.fullmatch(r"\[([^\]]*)\](?::(.*))?", address)
    port: str | None = None
    if bracketed:
        name = bracketed[1]
        port = bracketed[2]
    elif address.count(":") > 1:
        name = address  # IPv6 without a port
    else:
        name, colon, after = address.partition(":")
        if colon:
            port = after

    # isascii: other scripts have digits too.
    if port is not None and not (port.isdecimal() and port.isascii() and 0 < int(port) <= MAX_PORT):
        raise ConfigError(
            f"{where}: the port is {port[:40]!r}; it must be 1 to 65535, as in user@host:2222."
        )
    if port is not None and int(port) < FIRST_PORT:
        raise ConfigError(
            f"{where}: {port} is no port of ssh. Give ranks per host with --nproc, or in a "
            f"--hostfile: `{name} slots={port}`."
        )
    host = Host(name, user if at_sign else None, None if port is None else int(port))
    return _checked(host, where)


def _checked(host: Host, where: str) -> Host:
    """The host, unless its names are none."""
    if not NAME.fullmatch(host.name):
        raise ConfigError(
            f"{where}: {host.name[:100]!r} is no host name. Write [USER@]HOST[:PORT], e.g. "
            "gpu01 or me@10.0.0.2:2222."
        )
    if host.user is not None and not USER.fullmatch(host.user):
        raise ConfigError(
            f"{where}: {host.user[:100]!r} is no user name. Write [USER@]HOST[:PORT]."
        )
    return host


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a host file; every bad line is named by its number."""
    try:
        text = read_bounded(path, LARGEST_FILE).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(
            f"--hostfile {path}: cannot be read: {error.strerror or error}."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(
            f"--hostfile {path}: is not UTF-8 text. Write one host on a line."
        ) from None

    hosts: list[Host] = []
    problems: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if words:
            # All bad lines are reported at once.
            try:
                hosts.append(_parse_line(words, f"--hostfile {path}, line {number}"))
            except ConfigError as problem:
                problems.append(str(problem))
    if problems:
        raise ConfigError("\n".join(problems[:MAX_PROBLEMS]))
    if not hosts:
        raise ConfigError(
            f"--hostfile {path}: names no host. Write one on a line, e.g. `gpu01 slots=8`."
        )
    return with_labels(_merged(hosts, path), f"--hostfile {path}")


def _parse_line(words: Sequence[str], where: str) -> Host:
    """A host and its settings, in any of the three forms above."""
    settings: dict[str, int] = {}
    user, at_sign, address = words[0].rpartition("@")
    # One colon is MPICH's number of ranks; an IPv6 address has more.
    if address.count(":") == 1:
        address, _, slots = address.partition(":")
        settings["slots"] = _number(slots, "slots", where)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        key = key.lower().replace("-", "_")
        if not equals or key not in ("slots", "max_slots", "port"):
            raise ConfigError(
                f"{where}: {word[:80]!r} is not understood. Write HOST, HOST:N or HOST slots=N "
                "[port=P]."
            )
        if key in settings:
            raise ConfigError(f"{where}: {key} is given twice. Give it once.")
        settings[key] = _number(value, key, where)

    slots = settings.get("slots")
    max_slots = settings.get("max_slots")
    if slots is not None and max_slots is not None and max_slots < slots:
        raise ConfigError(f"{where}: slots={slots} is more than max_slots={max_slots}.")
    if slots is None:
        slots = max_slots
    user_name = user if at_sign else None
    return _checked(Host(address.strip("[]"), user_name, settings.get("port"), slots), where)


def _number(text: str, key: str, where: str) -> int:
    # The length first limits what `int` is given: a host file may hold anything.
    is_number = text.isascii() and text.isdecimal() and len(text) < 9
    if not is_number or not 0 < int(text) <= MAX_PORT:
        raise ConfigError(f"{where}: {key} is {text[:40]!r}; it must be a whole number from 1.")
    return int(text)


def _merged(hosts: Sequence[Host], path: Path) -> list[Host]:
    """A host on several plain lines, as PBS writes it, gets one rank for each line."""
    counts = Counter((host.name, host.user, host.port) for host in hosts)
    merged: dict[tuple[str, str | None, int | None], Host] = {}
    for host in hosts:
        key = (host.name, host.user, host.port)
        if counts[key] > 1 and host.slots is not None:
            raise ConfigError(
                f"--hostfile {path}: {host.name} stands there {counts[key]} times and with a "
                "number of slots. Write it once."
            )
        slots = counts[key] if counts[key] > 1 else host.slots
        merged.setdefault(key, replace(host, slots=slots))
    return list(merged.values())


def with_labels(hosts: Sequence[Host], where: str) -> list[Host]:
    """The hosts with distinct labels; one that is named twice is refused."""
    keys = Counter((host.name, host.user, host.port) for host in hosts)
    if twice := [name for (name, _, _), count in keys.items() if count > 1]:
        raise ConfigError(
            f"{where}: {twice[0]} is named twice. Name each host once; "
            "--nproc says how many ranks it gets."
        )

    # The name alone, unless two hosts have it: one machine with two users, or two ports.
    names = Counter(host.name for host in hosts)
    labelled: list[Host] = []
    for host in hosts:
        label = host.name
        if names[host.name] > 1:
            if host.user is not None:
                label = f"{host.user}@{label}"
            if host.port is not None:
                label = f"{label}:{host.port}"
        labelled.append(replace(host, label=label))
    return labelled
