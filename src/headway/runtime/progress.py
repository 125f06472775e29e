"""How far long work is: a bar with rate and time left on a terminal, a plain log line every ten
seconds elsewhere.

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
"""Called with the amount of work that was done since the last call."""


@contextmanager
def progress(label: str, total: float | None = None, unit: str = "") -> Iterator[Advance]:
    """Show how far the work `label` is; the block gets a function to call with how much was done.

    Safe to call from threads.
    """
    # Two bars would overwrite each other.
    has_bar = getattr(sys.stderr, "status", None) is not None
    can_draw = Lossy(sys.stderr).isatty() and os.environ.get("TERM", "dumb") != "dumb"
    if can_draw and not has_bar:
        with _bar(label, total, unit) as advance:
            yield advance
    else:
        with _lines(label, total, unit) as advance:
            yield advance


@contextmanager
def _bar(label: str, total: float | None, unit: str) -> Iterator[Advance]:
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
        task = shown.add_task(label, total=total, state="")

        def advance(amount: float = 1) -> None:
            nonlocal done
            done += amount
            shown.update(
                task, advance=amount, state=_state(done, total, unit, time.monotonic() - started)
            )

        yield advance


@contextmanager
def _lines(label: str, total: float | None, unit: str) -> Iterator[Advance]:
    log = logging.getLogger("headway")
    lock = threading.Lock()
    started = time.monotonic()
    last_line = started
    done = 0.0

    def advance(amount: float = 1) -> None:
        nonlocal done, last_line
        with lock:
            done += amount
            now = time.monotonic()
            if now - last_line < LINE_EVERY_SECONDS:
                return
            last_line = now
        left = ""
        if total and done:
            left = f", {duration((total - done) * (now - started) / done)} left"
        log.info("%s: %s%s", label, _state(done, total, unit, now - started), left)

    yield advance

    # Work that was over before its first line would have come is not worth one.
    seconds = time.monotonic() - started
    level = logging.INFO if seconds >= LINE_EVERY_SECONDS else logging.DEBUG
    log.log(
        level, "%s: done, %s in %s", label, _state(done, None, unit, seconds), duration(seconds)
    )


def _state(done: float, total: float | None, unit: str, seconds: float) -> str:
    """`3/8 prompts (38%), 1.5 prompts/s`."""
    share = quantity(done, unit)
    if total:
        # Bytes scale by themselves: `900 MB/1.2 GB`. Other units stand once: `3/8 prompts`.
        numerator = quantity(done, unit if unit == "bytes" else "")
        share = f"{numerator}/{quantity(total, unit)} ({done / total:.0%})"
    rate = ""
    if seconds > 0 and done:
        rate = f", {quantity(done / seconds, unit)}/s"
    return share + rate


def quantity(value: float, unit: str = "") -> str:
    """A readable number: `1.5 GB` for bytes, `1.5M tokens` otherwise."""
    prefixes = ("", "k", "M", "B", "T")
    if unit == "bytes":
        prefixes = ("", "k", "M", "G", "T", "P")

    # 999.5 would be rounded to four digits.
    scaled = float(value)
    index = 0
    while abs(scaled) >= 999.5 and index < len(prefixes) - 1:
        scaled /= 1000
        index += 1

    if abs(scaled) >= 100 or (index == 0 and scaled == int(scaled)):
        number = f"{scaled:.0f}"
    else:
        number = f"{scaled:.1f}"
    if unit == "bytes":
        return f"{number} {prefixes[index]}B"
    return f"{number}{prefixes[index]} {unit}".rstrip()


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
