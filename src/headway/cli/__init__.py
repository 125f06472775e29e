"""The command line.

Each module here maps the words of its verbs to functions: `VERBS = {"data tokenize": tokenize}`.
Modules whose names begin with `_` have no verbs.

A verb's function holds options and printing; the work is a typed function of another package. It
is imported inside the verb, so that `--help` imports neither torch nor numpy nor pydantic.

    words -> modules that may hold the verb -> typer application -> verb -> exit code
"""

import errno
import importlib
import logging
import os
import pkgutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from headway import __version__
from headway.cli._group import VerbCommand, VerbGroup
from headway.cli._options import flatten
from headway.cli._plugins import RootGroup
from headway.errors import HeadwayError
from headway.runtime.kernel_cache import keep_kernels
from headway.runtime.log import start_logging
from headway.runtime.output import ReaderGone, standard_streams
from headway.runtime.process import leave_outcome, raise_open_files
from headway.runtime.storage import explain

GROUPS = {
    "config": "Show and describe recipes.",
    "doctor": "Check this machine; `doctor data`, `doctor recipe` and `doctor model` check data, a recipe, a model.",
    "data": "Turn raw data into token stores, inspect them and convert them between formats.",
    "eval": "Measure a model.",
    "export": "Write models in the formats of other tools.",
    "launch": "Start a job on this machine, other machines or a cluster, and look after it.",
    "masks": "Head masks: which heads attend to the whole context.",
    "tokenizer": "Train and inspect tokenizers.",
    "verify": "Prove that a run resumes exactly, that a checkpoint is complete, that files are "
    "what was written.",
}
"""First words that have verbs below them, with their help."""
ELSEWHERE = {
    "download": "data",
    "list": "config",
    "masks": "export",
    "pull": "hub",
    "push": "hub",
    "report": "board",
    "stop": "train",
    "top": "board",
}
"""First words of verbs -> the module that holds them, where its name is another one.

`data` means `data.py` and every `data_*.py`.
"""
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
"""Errors of the operating system that a wrong path on the command line causes."""
DISKS_STATE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors that the state of the disk causes; their message says more than the system's."""
BAD_INPUT = 2
"""Exit code after a mistake in the command line, a recipe or data."""
GAVE_UP = 3
"""Exit code of `GaveUpError`."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def build_app(words: Sequence[str] = ()) -> typer.Typer:
    """Assemble the application.

    With the words of a command line that begins with a verb, only the modules of that verb are
    imported.
    """
    # Errors and help pages are headway's own: those that typer draws with rich are off.
    app = typer.Typer(
        name="headway",
        help="One LLM training system, from raw text to an evaluated and exported model.",
        cls=RootGroup,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_global_options)
    _add_verbs(app, _find_verbs(words))
    return app


def _find_verbs(words: Sequence[str]) -> dict[str, Callable[..., None]]:
    """The verbs by their words.

    Help, an unknown word and its suggestions need all of them; a verb needs only those of its
    modules.
    """
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    modules = [name for name in names if not name.startswith("_")]

    if words:
        prefix = ELSEWHERE.get(words[0], words[0])
        verbs = _read_verbs(name for name in modules if name.partition("_")[0] == prefix)

        # After the word of a group comes one of its verbs. If it does not, the answer is a help
        # page or a suggestion, and these need all verbs.
        is_verb = words[0] in verbs and words[0] not in GROUPS
        if is_verb or " ".join(words[:2]) in verbs:
            return verbs

    return _read_verbs(modules)


def _read_verbs(modules: Iterable[str]) -> dict[str, Callable[..., None]]:
    """Import these modules and join their `VERBS`."""
    verbs: dict[str, Callable[..., None]] = {}
    for name in modules:
        verbs |= importlib.import_module(f"{__name__}.{name}").VERBS
    return verbs


def _add_verbs(app: typer.Typer, verbs: dict[str, Callable[..., None]]) -> None:
    groups = {
        name: typer.Typer(cls=VerbGroup, help=text, rich_markup_mode=None)
        for name, text in GROUPS.items()
    }

    # Sorted, since help lists verbs in the order in which they are added.
    for words in sorted(verbs):
        function = flatten(verbs[words])
        if words in groups:
            # A verb that has others below it (`doctor`). typer calls it before those, too.
            groups[words].callback(invoke_without_command=True)(function)
            continue

        group_name, _, name = words.rpartition(" ")
        parent = app
        if group_name:
            parent = groups[group_name]
        parent.command(name, cls=VerbCommand)(function)

    for name, group in groups.items():
        # The other groups are those whose modules were not imported.
        if any(words.startswith(f"{name} ") for words in verbs):
            app.add_typer(group, name=name)


def _print_version(is_given: bool) -> None:
    if is_given:
        from headway.runtime.machine import source_commit

        commit = source_commit()
        suffix = ""
        if commit is not None:
            suffix = f" ({commit})"
        typer.echo(f"headway {__version__}{suffix}")
        raise typer.Exit


def _global_options(
    context: typer.Context,
    verbose: bool = typer.Option(
        False, "--verbose", "-v", help="Log more; LOG_LEVEL=DEBUG does the same."
    ),
    version: bool = typer.Option(
        False,
        "--version",
        help="Print the version and its commit, where it is known, and exit.",
        is_eager=True,
        callback=_print_version,
    ),
) -> None:
    """One LLM training system, from raw text to an evaluated and exported model."""
    level = "DEBUG"
    if not verbose:
        level = os.environ.get("LOG_LEVEL", "INFO").upper()

    context.call_on_close(start_logging(level=level).close)


class _Interrupt:
    """Remembers a Ctrl-C.

    An import may swallow the KeyboardInterrupt. The half-imported module then fails with another
    error, whose traceback must not reach the user.
    """

    def __init__(self) -> None:
        self.received = False

        # `main` is also called by tests and programs: a handler that somebody else has installed
        # stays, and only the main thread may install one.
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
    """Run one verb.

    The exit code is also written for a supervisor, since a launcher in between may not pass it on.
    """
    with standard_streams():
        code = _main(arguments)

        # After these a restart would fail in the same way, so the supervisor must see them.
        if code in (BAD_INPUT, GAVE_UP):
            leave_outcome(code)
        return code


def _main(arguments: Sequence[str] | None) -> int:
    """Run one verb.

    A user's mistake ends in one line on standard error and exit code 2, never in a traceback.
    """
    # Idle CPU threads should sleep, not spin: spinning slows everything else on the machine. torch
    # reads this when it is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    keep_kernels()
    # Shards of a store and sockets of ranks are files, of which shells allow few.
    raise_open_files()
    interrupt = _Interrupt()

    words = sys.argv[1:]
    typer_arguments = None
    if arguments is not None:
        words = list(arguments)
        typer_arguments = list(arguments)

    try:
        # Without standalone mode the code of `typer.Exit` comes back as the result.
        code = build_app(words)(args=typer_arguments, prog_name="headway", standalone_mode=False)

        # A reader that has gone shows itself here, and not while Python shuts down.
        sys.stdout.flush()
        if isinstance(code, int):
            return code
        return 0
    except ReaderGone as gone:
        return gone.exit_code
    except HeadwayError as error:
        for line in str(error).splitlines():
            _print_error(line)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return _stopped()
    except OSError as problem:
        # Without a file name it is nothing that a user can mend, and the traceback is needed.
        if problem.filename is None or interrupt.received:
            raise
        logging.getLogger("headway").debug("where it happened", exc_info=True)

        path = Path(os.fsdecode(problem.filename))
        reason = f"{problem.strerror}."
        if problem.errno in DISKS_STATE:
            reason = explain(problem, path)
        _print_error(f"{path}: {reason}")

        if problem.errno in USERS_PATH:
            return BAD_INPUT
        return 1
    except Exception as error:
        if interrupt.received:
            return _stopped()
        if not _is_usage_error(error):
            raise
        _print_error(_explain_usage(error, words))
        return BAD_INPUT
    finally:
        interrupt.restore()


def _print_error(line: str) -> None:
    print(f"error: {line}", file=sys.stderr)  # noqa: T201


def _stopped() -> int:
    print("stopped", file=sys.stderr)  # noqa: T201
    return INTERRUPTED


def _is_usage_error(error: Exception) -> bool:
    """Whether typer found a mistake in the command line.

    Some versions of typer bring a copy of click, whose exceptions are not those of the package
    `click`. So the module's name and the method decide, not the class.
    """
    is_of_typer = type(error).__module__.startswith(("click", "typer"))
    return is_of_typer and hasattr(error, "format_message")


def _explain_usage(error: Any, words: Sequence[str]) -> str:
    """One line for a mistake in the command line: how headway writes the option, or click's."""
    from headway.cli._foreign_options import explain_option

    explained = explain_option(error, words)
    if explained is not None:
        return explained

    message = error.format_message()
    # "Did you mean --x?" and "(Possible options: ...)" are complete; others lack the full stop.
    if not message.endswith(("?", ")")):
        message = f"{message.rstrip('.')}."

    context = getattr(error, "ctx", None)
    if context is None:
        return message
    return f"{message} Try '{context.command_path} --help'."
