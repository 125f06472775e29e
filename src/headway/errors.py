"""Errors that are not bugs in headway. Each message is one line with key, value, expectation and remedy."""

import re

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def hide_credentials(text: str) -> str:
    """A message without user names and passwords in its URLs: endpoints and proxies in the environment may contain them."""
    return CREDENTIALS.sub("***@", text)


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of another library's error, shortened, without the full stop; the type of the error if it has no message."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most].rstrip(".")


class HeadwayError(Exception):
    """A problem the user can act on. The command line prints it as one line and exits with `exit_code`."""

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


class TrainingError(HeadwayError):
    """Training had to end: the disk is full, the loss is not finite or memory ran out."""


class CommunicationError(TrainingError):
    """A rank is gone, or did not join a collective in time."""


class GaveUpError(TrainingError):
    """Training cannot continue and a restart would not help; a person must decide."""

    exit_code = 3
