"""Errors that are not bugs in headway.

Each message is one line with key, value, expectation and remedy.
"""

import re
from collections.abc import Mapping
from typing import Any

CREDENTIALS = re.compile(r"(?<=:/)(/?)[^/@\s]+@")
"""USER:PASSWORD@ in a URL; one slash too: a Path swallows the other."""


def hide_credentials(text: str) -> str:
    """A message without user names and passwords in its URLs: endpoints and proxies in the
    environment may contain them.
    """
    return CREDENTIALS.sub(r"\1***@", text)


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of another library's error, shortened, without the full stop; the type of the
    error if it has no message.
    """
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0][:most].rstrip(".")


class Terminated(SystemExit):
    """SIGTERM, or another signal that ends a process, stopped `train`, which has saved the run
    first: the same call continues it.

    A program that does not catch it exits with 128 + the signal's number (SIGTERM: 143) and without
    a traceback.
    """

    def __init__(
        self,
        message: str = "",
        exit_code: int = 143,
        summary: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(exit_code)
        self.message = message
        self.exit_code = exit_code
        self.summary = dict(summary or {})

    def __str__(self) -> str:
        return self.message

    @property
    def run(self) -> str | None:
        """The run folder."""
        return self.summary.get("run")


class Interrupted(KeyboardInterrupt, Terminated):
    """Ctrl-C stopped `train`, which has saved the run first: the same call continues it.

    A KeyboardInterrupt, so that a sweep over several runs stops too. It is also a SystemExit:
    Python exits with 1 and a traceback after any subclass of KeyboardInterrupt, and with 130 and
    nothing more after this one.
    """

    def __init__(self, message: str = "", summary: Mapping[str, Any] | None = None) -> None:
        Terminated.__init__(self, message, 130, summary)


class HeadwayError(Exception):
    """A problem the user can act on.

    The command line prints it as one line and exits with `exit_code`.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(hide_credentials(message))


class ConfigError(HeadwayError):
    """A recipe or a flag is wrong; found before any work starts."""

    exit_code = 2


class DataError(HeadwayError):
    """Input data is missing, damaged or not in the expected format."""

    exit_code = 2


class ParallelError(HeadwayError):
    """The parallel layout does not fit the number of ranks, the model or the batch."""

    exit_code = 2


class LaunchError(HeadwayError):
    """A requested process, device or node is not available."""

    exit_code = 2


class CheckpointError(HeadwayError):
    """A checkpoint cannot be written or read."""


class ObjectStoreUnavailable(CheckpointError):
    """The object store did not answer: the same call may succeed later."""


class TrainingError(HeadwayError):
    """Training had to end: the disk is full, the loss is not finite or memory ran out."""


class CommunicationError(TrainingError):
    """A rank is gone, or did not join a collective in time."""


class GaveUpError(TrainingError):
    """Training cannot continue and a restart would not help; a person must decide."""

    exit_code = 3
