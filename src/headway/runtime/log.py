"""Log output: standard error, and train.log in the run folder.

The handlers are on the root logger, so that they also get lines of other libraries, of which only
warnings and errors are shown.
"""

import logging
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from headway.errors import ConfigError
from headway.runtime.deferred import Deferred
from headway.runtime.output import Lossy
from headway.runtime.status_line import wants_colour

LOG_WAITING_BYTES = 4 << 20
"""Lines that wait in memory while the disk is full."""
FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
FILE_ONLY = {"place": "file"}
"""`extra` of a line that goes to train.log only, because the terminal shows it in another form."""
SCREEN_ONLY = {"place": "screen"}
"""`extra` of that other form, which goes to the terminal only."""
COLOURS = {
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31m",
    logging.DEBUG: "\x1b[2m",
}


class ConsoleHandler(logging.Handler):
    """Writes to the current sys.stderr, so that lines go above a progress bar, not through it.

    A line that cannot be written is dropped: a broken terminal must not end a run.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; warnings and errors say what they are."""
        if getattr(record, "place", None) == "file":
            return
        # An information line is what the program has to say; only trouble gets a label.
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        stream = Lossy(sys.stderr)
        if record.levelno in COLOURS and stream.isatty() and wants_colour():
            line = f"{COLOURS[record.levelno]}{line}\x1b[0m"
        stream.write(line + "\n")
        stream.flush()


class Logging:
    """Log handlers in place; `close` removes them and brings back those that they replaced."""

    def __init__(
        self,
        handlers: list[logging.Handler],
        replaced: list[logging.Handler],
        levels: tuple[int, int],
    ) -> None:
        self._handlers = handlers
        self._replaced = replaced
        self._levels = levels
        """Levels of the root logger and of headway's logger, before."""

    def close(self) -> None:
        """Log as before."""
        root = logging.getLogger()
        for handler in self._handlers:
            root.removeHandler(handler)
            handler.close()
        for handler in self._replaced:
            root.addHandler(handler)
        root.setLevel(self._levels[0])
        logging.getLogger("headway").setLevel(self._levels[1])

    def __enter__(self) -> "Logging":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def start_logging(
    run_dir: Path | None = None,
    level: int | str | None = None,
    rank: int = 0,
    *,
    also: Path | None = None,
) -> Logging:
    """Send log lines to standard error and to the run folder.

    Rank 0 writes to train.log; others write to logs/ and, from warnings up, to the console. `level`
    is that of headway's lines; None keeps the level set before. `also` is another run folder that
    gets the same lines: that of the run whose stage this one is.

    Until the result is closed, existing console handlers are removed, and so are the handlers of an
    earlier call that is still open: its console and its log files get no lines meanwhile.
    """
    root = logging.getLogger()
    headway = logging.getLogger("headway")
    old_levels = (root.level, headway.level)

    # A program's console handlers are exactly of the class StreamHandler: its subclasses write to
    # files or elsewhere, and stay. The other two are of an earlier call.
    old_handlers: list[logging.Handler] = []
    for handler in root.handlers:
        if type(handler) is logging.StreamHandler or isinstance(
            handler, (ConsoleHandler, _RunFile)
        ):
            old_handlers.append(handler)

    # A program that has set up logging itself, as its handlers show, keeps its level for headway's
    # lines.
    if level is not None:
        headway.setLevel(_level(level))
    elif headway.level == logging.NOTSET:
        headway.setLevel(root.level if old_handlers else logging.INFO)
    root.setLevel(logging.WARNING)

    for handler in old_handlers:
        root.removeHandler(handler)

    if rank == 0:
        console = ConsoleHandler(logging.NOTSET)
        console.setFormatter(logging.Formatter("%(message)s"))
    else:
        console = ConsoleHandler(logging.WARNING)
        console.setFormatter(logging.Formatter(f"[rank {rank}] %(message)s"))
    handlers: list[logging.Handler] = [console]

    for folder in (run_dir, also):
        if folder is None:
            continue
        path = folder / "train.log"
        if rank != 0:
            path = folder / "logs" / f"rank-{rank:05}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _RunFile(path)
        file.setFormatter(logging.Formatter(FILE_FORMAT))
        handlers.append(file)

    for handler in handlers:
        root.addHandler(handler)
    return Logging(handlers, old_handlers, old_levels)


class _RunFile(logging.Handler):
    """The log file of a run; appended to, so that a resumed run continues it.

    Lines wait while the disk is full.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._writes = Deferred(LOG_WAITING_BYTES)
        self._writes.recovered = lambda text: None  # a log must not log about itself

    def emit(self, record: logging.LogRecord) -> None:
        """Append one record."""
        if getattr(record, "place", None) == "screen":
            return
        self._writes.append(
            self._path, f"{self.format(record)}\n".encode(errors="backslashreplace")
        )

    def close(self) -> None:
        """Try once more to write what waits."""
        self._writes.retry()
        super().close()


def _level(level: Any) -> int:
    if isinstance(level, int):
        return level
    names = logging.getLevelNamesMapping()
    if str(level).upper() not in names:
        raise ConfigError(f"log level is {level!r}; it must be one of DEBUG, INFO, WARNING, ERROR.")
    return names[str(level).upper()]
