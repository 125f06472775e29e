"""How far long work is: a bar with rate and time left on a terminal, a plain log line every ten seconds elsewhere.

with progress("tokenize", total=size_bytes, unit="bytes") as advance:
    advance(len(chunk))
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

from headway.runtime.output import Lossy

LINE_EVERY_SECONDS = 10.0
Advance = Callable[[float], None]


@contextmanager
def progress(what: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Show how far `what` is; the block gets a function that is called with how much was done. Safe to call from threads."""
    has_bar = getattr(sys.stderr, "status", None) is not None  # two bars would overwrite each other
    if not has_bar and Lossy(sys.stderr).isatty() and os.environ.get("TERM", "dumb") != "dumb":
        with _bar(what, total, unit) as advance:
            yield advance
    else:
        with _lines(what, total, unit) as advance:
            yield advance


@contextmanager
def _bar(what: str, total: float | None, unit: str) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
    )
    started = time.monotonic()
    done = 0.0
    with Progress(*columns, console=Console(file=cast(IO[str], Lossy(sys.stderr)))) as shown:
        task = shown.add_task(what, total=total, state="")

        def advance(amount: float = 1) -> None:
            nonlocal done
            done += amount
            shown.update(
                task, advance=amount, state=_state(done, total, unit, time.monotonic() - started)
            )

        yield advance


@contextmanager
def _lines(what: str, total: float | None, unit: str) -> Iterator[Advance]:
    log = logging.getLogger("headway")
    lock = threading.Lock()
    started = said = time.monotonic()
    done = 0.0

    def advance(amount: float = 1) -> None:
        nonlocal done, said
        with lock:
            done += amount
            now = time.monotonic()
            if now - said < LINE_EVERY_SECONDS:
                return
            said = now
        left = (
            f", {duration((total - done) * (now - started) / done)} left" if total and done else ""
        )
        log.info("%s: %s%s", what, _state(done, total, unit, now - started), left)

    yield advance
    seconds = time.monotonic() - started
    level = logging.INFO if seconds >= LINE_EVERY_SECONDS else logging.DEBUG
    log.log(level, "%s: done, %s in %s", what, _state(done, None, unit, seconds), duration(seconds))


def _state(done: float, total: float | None, unit: str, seconds: float) -> str:
    """`3/8 prompts (38%), 1.5 prompts/s`."""
    share = (
        f"{quantity(done, unit if unit == 'bytes' else '')}/{quantity(total, unit)} ({done / total:.0%})"
        if total
        else quantity(done, unit)
    )
    rate = f", {quantity(done / seconds, unit)}/s" if seconds > 0 and done else ""
    return share + rate


def quantity(value: float, unit: str = "") -> str:
    """A readable number: `1.5 GB` for bytes, `1.5M tokens` otherwise."""
    steps = ("", "k", "M", "G", "T", "P") if unit == "bytes" else ("", "k", "M", "B", "T")
    scaled, index = float(value), 0
    while abs(scaled) >= 999.5 and index < len(steps) - 1:
        scaled, index = scaled / 1000, index + 1
    number = (
        f"{scaled:.0f}"
        if abs(scaled) >= 100 or (index == 0 and scaled == int(scaled))
        else f"{scaled:.1f}"
    )
    if unit == "bytes":
        return f"{number} {steps[index]}B"
    return f"{number}{steps[index]} {unit}".rstrip()


def duration(seconds: float) -> str:
    """A readable time span: `8s`, `4m 05s`, `3h 07m`, `2d 04h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02}h"
