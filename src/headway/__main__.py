"""`python -m headway` and the `headway` command."""

from headway.cli import main
from headway.runtime.process import end_process


def run() -> None:
    """Entry point of the installed command."""
    end_process(main())


if __name__ == "__main__":
    run()
