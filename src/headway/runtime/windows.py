"""headway does not run on Windows itself: one line names WSL, before anything that Windows lacks is
imported.
"""

import sys
from pathlib import PureWindowsPath
from typing import NoReturn

WHERE = (
    "headway runs on Linux and macOS. On Windows use it inside WSL: run `wsl --install`, then "
    "install headway in the Linux it gives you."
)


def refuse_windows() -> NoReturn:
    """End the command with one line, or the import with an ImportError that says the same."""
    # A command, by its script or as a module, ends without a traceback.
    name = PureWindowsPath(sys.argv[0] if sys.argv else "").stem
    if name == "headway" or " ".join(sys.orig_argv[1:3]) == "-m headway":
        print(f"error: {WHERE}", file=sys.stderr)  # noqa: T201
        raise SystemExit(2)
    raise ImportError(WHERE)
