"""What can go wrong that is not a bug of ours: each error is one line with key, value, expectation and remedy."""

import re

CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")


def hide_credentials(text: str) -> str:
    """A message without the user and password of any address in it: endpoints and proxies in the environment may hold them."""
    return CREDENTIALS.sub("***@", text)


def first_line(error: BaseException, most: int = 200) -> str:
    """The first line of what another library says, at most so many characters, without the full stop; its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0][:most].rstrip(".")


class HeadwayError(Exception):
    """A problem the user can act on. The command line prints it as one line and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        super().__init__(hide_credentials(message))


class ConfigError(HeadwayError):
    """A recipe or a flag is wrong; known before any work starts."""

    exit_code = 2


class DataError(HeadwayError):
    """Data that is given cannot be read as what it claims to be."""

    exit_code = 2


class ParallelError(HeadwayError):
    """A layout that this world, model or batch does not allow."""

    exit_code = 2


class LaunchError(HeadwayError):
    """A process, device or node that was asked for cannot be had."""

    exit_code = 2


class CheckpointError(HeadwayError):
    """A checkpoint cannot be written or read."""


class TrainingError(HeadwayError):
    """Training had to end: the disk is full, the loss is lost, memory ran out."""


class CommunicationError(TrainingError):
    """Ranks lost each other: one is gone, or did not come to an exchange in time."""


class GaveUpError(TrainingError):
    """Training cannot go on by itself, and starting it again would not help; somebody has to look."""

    exit_code = 3
