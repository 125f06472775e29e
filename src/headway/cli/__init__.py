"""The command line. Each module here maps the words of its verbs to functions: `VERBS = {"data tokenize": tokenize}`.

A function holds options and printing; the work is a typed function of another package, imported inside, so that help is instant.
"""

import errno
import importlib
import logging
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import typer

from headway import __version__
from headway.cli._foreign_options import explain_option
from headway.cli._group import VerbCommand, VerbGroup
from headway.cli._options import flatten
from headway.cli._plugins import RootGroup
from headway.errors import HeadwayError
from headway.runtime.log import start_logging
from headway.runtime.output import ReaderGone, standard_streams
from headway.runtime.process import leave_outcome, raise_open_files
from headway.runtime.storage import explain

GROUPS = {
    "config": "Show and describe recipes.",
    "doctor": "Check this machine; `doctor data` and `doctor recipe` check your data and a recipe.",
    "data": "Turn raw data into token stores, inspect them and convert them between formats.",
    "eval": "Measure a model.",
    "export": "Write models in the formats of other tools.",
    "launch": "Start a job on this machine, other machines or a cluster, and look after it.",
    "masks": "Head masks: which heads attend to the whole context.",
    "tokenizer": "Train and inspect tokenizers.",
    "verify": "Prove that a run resumes exactly, that a checkpoint is complete, that files are what was written.",
}
USERS_PATH = (
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.EACCES,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EINVAL,
    errno.ENXIO,
)
"""The given path is wrong, not the machine."""
DISKS_STATE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def build_app() -> typer.Typer:
    """Assemble the application from the verb files."""
    app = typer.Typer(
        name="headway",
        help="One LLM training system, from raw text to an evaluated and exported model.",
        cls=RootGroup,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_global_options)
    _add_verbs(app)
    return app


def _add_verbs(app: typer.Typer) -> None:
    groups = {
        name: typer.Typer(cls=VerbGroup, help=text, rich_markup_mode=None)
        for name, text in GROUPS.items()
    }
    modules = [one.name for one in pkgutil.iter_modules(__path__) if not one.name.startswith("_")]
    verbs = {
        words: verb
        for name in modules
        for words, verb in importlib.import_module(f"{__name__}.{name}").VERBS.items()
    }
    for words in sorted(verbs):
        group, _, name = words.rpartition(" ")
        if words in groups:  # a verb that has others below it
            groups[words].callback(invoke_without_command=True)(flatten(verbs[words]))
            continue
        (groups[group] if group else app).command(name, cls=VerbCommand)(flatten(verbs[words]))
    for name, group in groups.items():
        app.add_typer(group, name=name)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"headway {__version__}")
        raise typer.Exit


def _global_options(
    context: typer.Context,
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="Log more; LOG_LEVEL=DEBUG does the same."
    ),
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and exit.",
        is_eager=True,
        callback=_print_version,
    ),
) -> None:
    """One LLM training system, from raw text to an evaluated and exported model."""
    level = "DEBUG" if verbose else os.environ.get("LOG_LEVEL", "INFO").upper()
    context.call_on_close(start_logging(level=level).close)


class _Interrupt:
    """Remembers a Ctrl-C: an import may swallow it, and the half-imported module then fails with another error."""

    def __init__(self) -> None:
        self.received = False
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self.is_installed = is_default and threading.current_thread() is threading.main_thread()
        if self.is_installed:
            signal.signal(signal.SIGINT, self._receive)

    def restore(self) -> None:
        """Put Python's handler back."""
        if self.is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.default_int_handler(number, frame)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb. The exit code is also written for a supervisor, since a launcher in between may not pass it on."""
    with standard_streams():
        code = _main(arguments)
        if code in (2, 3):
            leave_outcome(code)
        return code


def _main(arguments: Sequence[str] | None) -> int:
    """Run one verb. A user's mistake ends in one line on standard error and exit code 2, never in a traceback."""
    # Idle CPU threads should sleep, not spin: spinning slows everything else on the machine. torch reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    raise_open_files()
    interrupt = _Interrupt()
    try:
        # without standalone mode the code of `typer.Exit` comes back as the result
        code = build_app()(
            args=list(arguments) if arguments is not None else None,
            prog_name="headway",
            standalone_mode=False,
        )
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except ReaderGone as gone:
        return gone.exit_code
    except HeadwayError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        print("stopped", file=sys.stderr)  # noqa: T201
        return 130
    except OSError as problem:
        if problem.filename is None or interrupt.received:
            raise
        logging.getLogger("headway").debug("where it happened", exc_info=True)
        path = Path(os.fsdecode(problem.filename))
        reason = explain(problem, path) if problem.errno in DISKS_STATE else f"{problem.strerror}."
        print(f"error: {path}: {reason}", file=sys.stderr)  # noqa: T201
        return 2 if problem.errno in USERS_PATH else 1
    except Exception as error:
        if interrupt.received:
            print("stopped", file=sys.stderr)  # noqa: T201
            return 130
        if type(error).__module__.startswith(("click", "typer")) and hasattr(
            error, "format_message"
        ):
            words = sys.argv[1:] if arguments is None else list(arguments)
            explained = explain_option(error, words)
            if explained is not None:
                print(f"error: {explained}", file=sys.stderr)  # noqa: T201
                return 2
            context = getattr(error, "ctx", None)
            hint = f" Try '{context.command_path} --help'." if context is not None else ""
            message = error.format_message()  # pyright: ignore[reportAttributeAccessIssue]
            message = message if message.endswith(("?", ")")) else f"{message.rstrip('.')}."
            print(f"error: {message}{hint}", file=sys.stderr)  # noqa: T201
            return 2
        raise
    finally:
        interrupt.restore()
