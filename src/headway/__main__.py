"""`python -m headway` and the `headway` command."""

import sys

from headway.cli import main


def run() -> None:
    """Entry point of the installed command."""
    sys.exit(main())


if __name__ == "__main__":
    run()
