"""Log output: standard error, and train.log in the run folder. Of other libraries only warnings are shown."""

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
FILE_FORMAT = "%(asctime)s %(levelname)s %(message)s"
FILE_ONLY, SCREEN_ONLY = {"place": "file"}, {"place": "screen"}
"""`extra` of a line that a terminal shows in another form, and of that form."""
COLOURS = {
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[31m",
    logging.DEBUG: "\x1b[2m",
}


class ConsoleHandler(logging.Handler):
    """Writes to the current sys.stderr, so that lines go above a progress bar instead of through it.

    A line that cannot be written is dropped: a broken terminal must not end a run.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record; warnings and errors say what they are."""
        if getattr(record, "place", None) == "file":
            return
        line = self.format(record)
        if record.levelno >= logging.WARNING:
            line = f"{record.levelname.lower()}: {line}"
        stream = Lossy(sys.stderr)
        if record.levelno in COLOURS and stream.isatty() and wants_colour():
            line = f"{COLOURS[record.levelno]}{line}\x1b[0m"
        stream.write(line + "\n")
        stream.flush()


class Logging:
    """Log handlers in place; `close` takes them out, closes the file and brings back what they replaced."""

    def __init__(
        self,
        handlers: list[logging.Handler],
        replaced: list[logging.Handler],
        levels: tuple[int, int],
    ) -> None:
        self._handlers = handlers
        self._replaced = replaced
        self._levels = levels

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
    """Send log lines to standard error and to the run folder: rank 0 to train.log, others to logs/ and, from warnings up, to the console.

    `level` is that of headway's lines; None keeps the level set before. Existing console handlers are removed until the end.
    `also` is another run folder that gets the same lines: that of the run whose stage this one is.
    """
    root, headway = logging.getLogger(), logging.getLogger("headway")
    levels = root.level, headway.level
    ours = (ConsoleHandler, _RunFile)
    old: list[logging.Handler] = [
        one for one in root.handlers if type(one) is logging.StreamHandler or isinstance(one, ours)
    ]
    if level is not None:
        headway.setLevel(_level(level))
    elif headway.level == logging.NOTSET:
        headway.setLevel(root.level if old else logging.INFO)
    root.setLevel(logging.WARNING)
    for handler in old:
        root.removeHandler(handler)
    console = ConsoleHandler(logging.NOTSET if rank == 0 else logging.WARNING)
    console.setFormatter(
        logging.Formatter("%(message)s" if rank == 0 else f"[rank {rank}] %(message)s")
    )
    handlers: list[logging.Handler] = [console]
    for folder in (run_dir, also):
        if folder is None:
            continue
        path = folder / "train.log" if rank == 0 else folder / "logs" / f"rank-{rank:05}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _RunFile(path)
        file.setFormatter(logging.Formatter(FILE_FORMAT))
        handlers.append(file)
    for handler in handlers:
        root.addHandler(handler)
    return Logging(handlers, old, levels)


class _RunFile(logging.Handler):
    """The log file of a run; appended to, so that a resumed run continues it. Lines wait while the disk is full."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._writes = path, Deferred(LOG_WAITING_BYTES)
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
