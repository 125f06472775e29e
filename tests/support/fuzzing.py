"""Hostile input for every reader and setting, within a budget of seconds: what is accepted or refused in one line is fine, what ends in
another exception, a dead process or an endless loop is a finding.

A target makes cases from a random generator and runs them. Cases run in a forked child with a limit of memory, one after another; each has
a limit of seconds. A child that dies takes one case with it and is replaced.
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from headway.errors import HeadwayError

CASE_SECONDS = 10.0
MEMORY_BYTES = 2 << 30
"""What a case may take beyond what the process holds when it begins.

A model that fits is allowed, whatever its settings look like. So a busy machine must be able to fill this
much within CASE_SECONDS.
"""


class Hang(BaseException):
    """A case took longer than it may."""


@dataclass(frozen=True)
class Target:
    """One reader or surface: `prepare` makes what cases share (once, in a folder), `case` runs one and says what it was."""

    name: str
    case: Callable[[random.Random, Path], tuple[str, Callable[[], Any]]]
    prepare: Callable[[Path], None] = lambda folder: None


@dataclass
class Tally:
    """What became of a target's cases."""

    cases: int = 0
    accepted: int = 0
    refused: int = 0
    findings: list[str] = field(default_factory=list)

    def line(self, name: str) -> str:
        return f"{name}: {self.cases} cases, {self.accepted} accepted, {self.refused} refused, {len(self.findings)} findings"


def fuzz(
    target: Target, folder: Path, seconds: float, seed: int = 0, only: int | None = None
) -> Tally:
    """Run a target's cases until the seconds are over. Case N of a seed is always the same: `only` runs that one."""
    folder.mkdir(parents=True, exist_ok=True)
    target.prepare(folder)
    tally = Tally()
    end = time.monotonic() + seconds
    number = 0 if only is None else only
    while time.monotonic() < end and (only is None or number == only):
        number = _child(target, folder, seed, number, end if only is None else 0.0, tally)
    return tally


def _child(target: Target, folder: Path, seed: int, number: int, end: float, tally: Tally) -> int:
    """Fork, run cases from `number` on, and read what the child says of each; returns the number of the next case."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        _run_cases(target, folder, seed, number, end, writing)
    os.close(writing)
    started = None
    for said in _events(reading, pid):
        if said["event"] == "begin":
            started = said["case"]
            number = number + 1
            tally.cases += 1
            continue
        started = None
        if said["event"] in ("accepted", "refused"):
            setattr(tally, said["event"], getattr(tally, said["event"]) + 1)
        else:
            tally.findings.append(
                f"{target.name} case {number - 1} (seed {seed}): {said['case']}\n{said['text']}"
            )
    _, status = os.waitpid(pid, 0)
    if started is not None:
        code = os.waitstatus_to_exitcode(status)
        tally.findings.append(
            f"{target.name} case {number - 1} (seed {seed}): {started}\nthe process ended with {code}"
        )
    return number


def _events(reading: int, pid: int) -> Iterator[dict[str, str]]:
    """What the child says; one that says nothing for long hangs where no signal reaches Python, and is killed."""
    waiting = b""
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], 2 * CASE_SECONDS)[0]:
                os.kill(pid, signal.SIGKILL)
            chunk = pipe.read(65536)
            if not chunk:
                return
            *lines, waiting = (waiting + chunk).split(b"\n")
            yield from map(json.loads, lines)


def _run_cases(
    target: Target, folder: Path, seed: int, number: int, end: float, writing: int
) -> None:
    # what the parent had mapped already
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY_BYTES, mapped + MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out = os.fdopen(writing, "w", encoding="utf-8", errors="replace")
    signal.signal(signal.SIGALRM, _ring)
    while True:
        name, call = target.case(random.Random(f"{target.name}-{seed}-{number}"), folder)
        _say(out, event="begin", case=name[:400])
        _say(out, case=name[:400], **_one(call))
        number += 1
        if time.monotonic() > end:
            break
    out.flush()
    os._exit(0)


def _one(call: Callable[[], Any]) -> dict[str, str]:
    quiet = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, CASE_SECONDS)
    try:
        with redirect_stdout(quiet), redirect_stderr(quiet):
            code = call()
        if "Traceback (most recent call last)" in quiet.getvalue():
            return {"event": "finding", "text": quiet.getvalue()[-3000:]}
        return {"event": "refused" if isinstance(code, int) and code else "accepted"}
    except HeadwayError as error:
        text = str(error)
        if not text.strip() or len(text) > 5000:
            return {"event": "finding", "text": f"an error of {len(text)} characters: {text[:500]}"}
        return {"event": "refused"}
    except Hang:
        return {"event": "finding", "text": "hangs:\n" + traceback.format_exc()[-3000:]}
    except SystemExit as left:
        return {"event": "refused"} if left.code else {"event": "accepted"}
    except BaseException:
        return {"event": "finding", "text": traceback.format_exc()[-3000:]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _ring(number: int, frame: FrameType | None) -> None:
    raise Hang(f"after {CASE_SECONDS} s")


def _say(out: io.TextIOBase, **fields: str) -> None:
    out.write(json.dumps(fields) + "\n")
    out.flush()


# --- what is hostile -----------------------------------------------------------------------------------------------------------------

HOSTILE_TEXTS = (
    "", " ", "0", "-1", "1", "2", "3", "0.5", "1e-9", "1e308", "-1e308", "1e400", ".inf", "-.inf", ".nan", "nan", "inf", "10**14",
    "100000000000000", "9223372036854775807", "9223372036854775808", "-9223372036854775809", "99999999999999999999999999", "1" * 500,
    "null", "~", "true", "false", "no", "auto", "all", "none", "own", "[]", "{}", "[[]]", "[1]", "[1, 2, 3]", "[-1]", "[null]", "['']",
    "[a, b]", "{a: 1}", "{kind: x}", "[{}]", "[{path: x}]", "../../../x", "/", "/dev/null", "/dev/full", "/proc/self/mem", "~/x", ".", "..",
    "a/b", "a b", "a\\nb", "'a\nb'", "\x01", "\t", "\u202e", "名字", "²", "½", "é" * 300, "x" * 5000, "%s%n", "{0}", "{{7*7}}", "${HOME}",
    "`id`", "$(id)", "; ls", "| cat", "--help", "-1e5", "2026-11-31", "2026-01-01", "12:30", "0x1f", "1_0", "s3://x", "s3://", "http://x",
    "hf://x", "kind", "os.path", "headway.tasks.dpo", "...", ".x", "x.", "a..b", "*", "**", "?", "[", "]", "{", "}", "&a", "*a", "!!x", "@",
    "@0.5", "x@", "x@y", "x@nan", "layers.0-99999999999", "layers.-1", "layers.5-2", "cos", "linear", "fp16", "fp8", "cuda", "cpu:99", "bf16",
)  # fmt: skip


HOSTILE_NUMBERS = (
    "0", "1", "2", "3", "5", "7", "-1", "0.0", "0.1", "0.9", "1.0", "1.5", "-0.5", "1e-30", "1e30", "1e308", "100", "10000000", "10000000000",
    "100000000000000", "9223372036854775807",
)  # fmt: skip


def hostile_text(rng: random.Random) -> str:
    """A value somebody could put behind `key=` or an option."""
    if rng.random() < 0.3:
        return rng.choice(HOSTILE_NUMBERS)
    if rng.random() < 0.8:
        return rng.choice(HOSTILE_TEXTS)
    return "".join(
        chr(rng.choice((rng.randrange(32, 127), rng.randrange(1, 0x2FFF))))
        for _ in range(rng.randrange(1, 40))
    )


HOSTILE_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 1e308, -0.5, 0.0, "", "x", "\x00", "\ud800", "1", "nan", [], [[]], {}, {"a": 1},
    [None], [1, "a"], "x" * 10_000, {"": ""}, "../../x", [0] * 1000, 1e-320,
)  # fmt: skip


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Plain data with one thing in it changed: a value of another type, a key gone, a key twice as deep."""
    if not isinstance(value, (dict, list)) or not value or rng.random() < 0.15:
        return rng.choice((*HOSTILE_VALUES, _deep(rng.choice((50, 500)))))
    if isinstance(value, dict):
        key = rng.choice(sorted(value, key=str))
        changed = dict(value)
        how = rng.random()
        if how < 0.2:
            del changed[key]
        elif how < 0.3:
            changed[rng.choice(("x", "", "kind", "__class__"))] = changed[key]
        else:
            changed[key] = mutate_value(value[key], rng)
        return changed
    index = rng.randrange(len(value))
    items = list(value)
    if rng.random() < 0.3:
        del items[index]
    else:
        items[index] = mutate_value(items[index], rng)
    return items


def _deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """A file's bytes with some flipped, cut off, put in, blanked or repeated."""
    how = rng.random()
    if how < 0.08:
        return b""
    if how < 0.16:
        return rng.randbytes(rng.randrange(1, 200))
    if how < 0.4 and data:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        index = rng.randrange(len(changed) + 1)
        kind = rng.random()
        if kind < 0.5 and index < len(changed):
            changed[index] ^= 1 << rng.randrange(8)
        elif kind < 0.7:
            changed[index:index] = rng.choice(
                (b"\x00", b"\xff\xff\xff\xff", b"{", b"[" * 2000, b"\n", b'"', rng.randbytes(8))
            )
        elif kind < 0.85:
            changed[index : index + rng.randrange(1, 64)] = b"\x00" * rng.randrange(0, 64)
        else:
            changed[index:index] = changed[: rng.randrange(0, 256)]
    return bytes(changed)


def mutate_file(path: Path, rng: random.Random) -> str:
    """Change one file on disk: its bytes, its JSON, or what it is; returns what was done."""
    how = rng.random()
    if how < 0.05:
        path.unlink()
        return f"{path.name} is gone"
    if how < 0.1:
        path.unlink()
        path.mkdir()
        return f"{path.name} is a folder"
    if how < 0.14:
        path.unlink()
        path.symlink_to(rng.choice(("nowhere", path.name, "/dev/null", "/dev/full", ".")))
        return f"{path.name} is a link"
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl") and how < 0.65:
        try:
            lines = data.decode().splitlines() if path.suffix == ".jsonl" else [data.decode()]
            index = rng.randrange(len(lines))
            lines[index] = json.dumps(mutate_value(json.loads(lines[index]), rng))
            path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass")
            return f"{path.name} with another value: {lines[index][:200]}"
        except (ValueError, IndexError, RecursionError):
            pass
    path.write_bytes(mutate_bytes(data, rng))
    return f"{path.name} with other bytes"


def run_verb(arguments: list[str]) -> int:
    """The command line in this process; returns its exit code, raises what `main` lets through."""
    from headway.cli import main

    before = sys.argv
    sys.argv = ["headway", *arguments]
    try:
        return main(arguments)
    finally:
        sys.argv = before
