"""One way to open what a user names: regular files only."""

import errno
import os
import stat


def regular_only(path: str | os.PathLike[str], flags: int) -> int:
    """The `opener` of `open`: a device or a pipe is an OSError like any other, and is never waited
    for.
    """
    # Opening a pipe that nobody writes to would wait forever without O_NONBLOCK. The check comes
    # after opening, on the descriptor: a path may be replaced between a check and an open.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "is a device or a pipe; a file is expected", str(path))
