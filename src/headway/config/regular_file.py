"""One way to open what a user names: regular files only."""

import errno
import os
import re
import stat

NOT_A_FILE = "is a device or a pipe; a file is expected"
GIVEN_DESCRIPTOR = re.compile(r"/(?:dev|proc/self)/fd/(\d+)")
"""How a shell names what it has opened already, such as the pipe of `<(command)`."""


def regular_only(path: str | os.PathLike[str], flags: int) -> int:
    """The `opener` of `open`: a device or a pipe is an OSError like any other, and is never waited
    for.
    """
    # Opening a pipe that nobody writes to would wait forever without O_NONBLOCK. The check comes
    # after opening, on the descriptor: a path may be replaced between a check and an open.
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as problem:
        # A pipe that nobody reads, opened for writing; "No such device" would mislead.
        if problem.errno == errno.ENXIO:
            raise OSError(errno.EINVAL, NOT_A_FILE, str(path)) from None
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, NOT_A_FILE, str(path))


def regular_or_given(path: str | os.PathLike[str], flags: int) -> int:
    """The `opener` for what is read once, from its start to its end: a regular file, or what the
    user opened already (`/dev/stdin`, `/dev/fd/N`).

    `<(command)` names a pipe on purpose: it has a writer and it ends. A named pipe has neither for
    sure, and is refused.
    """
    name = os.fspath(path)
    number = None
    if name == "/dev/stdin":
        number = 0
    elif match := GIVEN_DESCRIPTOR.fullmatch(name):
        number = int(match[1])
    if number is None or stat.S_ISREG(os.fstat(number).st_mode):
        return regular_only(path, flags)
    # A copy of the descriptor: opening its name again would wait where the shell opened a named
    # pipe for it.
    return os.dup(number)


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raise OSError for what is no regular file, before a library opens it that would wait."""
    os.close(regular_only(path, os.O_RDONLY))
