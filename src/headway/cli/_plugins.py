"""Verbs of other packages.

In: entry points of the group `headway.verbs` (`hello = "my_lab.verbs:hello"`); out: verbs beside
headway's own.

Only the names are read until such a verb is called, and only for help and for a word headway does
not know: other verbs start as fast as without plug-ins, and a broken one breaks nothing but itself.
"""

from __future__ import annotations

import logging
from typing import Any

import typer
from typer.core import TyperCommand

from headway.cli._group import VerbCommand, VerbGroup
from headway.cli._options import flatten
from headway.errors import ConfigError, HeadwayError, first_line

GROUP = "headway.verbs"
log = logging.getLogger("headway")


class RootGroup(VerbGroup):
    """All verbs, with those of other packages."""

    _plugins: dict[str, TyperCommand] | None = None

    def plugins(self) -> dict[str, TyperCommand]:
        """The verbs of other packages by name."""
        if self._plugins is not None:
            return self._plugins

        self._plugins = {}
        for entry in _entry_points():
            if entry.name in self.commands:
                log.warning(
                    "the verb %s of %s is left out: headway has a verb of this name",
                    entry.name,
                    _package(entry),
                )
            elif entry.name.replace("-", "_").isidentifier():
                self._plugins[entry.name] = PluginCommand(entry)
            else:
                log.warning(
                    "the verb %r of %s is left out: a verb is one word of letters and dashes",
                    entry.name,
                    _package(entry),
                )
        return self._plugins

    def list_commands(self, ctx: Any) -> list[str]:
        """The names for the help and for completion."""
        return [*super().list_commands(ctx), *sorted(self.plugins())]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb by name."""
        return super().get_command(ctx, cmd_name) or self.plugins().get(cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb; one of another package if headway has none of this name."""
        # headway's verbs come first: reading the entry points of all packages takes a while.
        if args and args[0] not in self.commands:
            plugin = self.plugins().get(args[0])
            if plugin is not None:
                return args[0], plugin, args[1:]
        return super().resolve_command(ctx, args)


class PluginCommand(TyperCommand):
    """A verb of another package, imported when it is called."""

    def __init__(self, entry: Any) -> None:
        # Every word after the verb, --help included, goes to the plug-in's own parser.
        settings = {
            "ignore_unknown_options": True,
            "allow_extra_args": True,
            "help_option_names": [],
        }
        super().__init__(
            entry.name,
            help=f"{entry.value} of {_package(entry)}.",
            context_settings=settings,
            add_help_option=False,
        )
        self.entry = entry

    def invoke(self, ctx: Any) -> Any:
        """Import the function and call it with the words that are left."""
        command = _as_command(self.entry)
        return command.main(args=ctx.args, prog_name=f"headway {self.name}", standalone_mode=False)


def _as_command(entry: Any) -> Any:
    """The verb's function as a command with options.

    A plug-in that cannot be imported ends in one line, not in a traceback of code that is not the
    user's.
    """
    verb = f"the verb {entry.name} of {_package(entry)} ({entry.value})"
    try:
        function = entry.load()
    except HeadwayError:
        raise  # it is one line already
    except Exception as error:  # a plug-in's import may raise anything
        raise ConfigError(
            f"{verb} cannot be imported: {type(error).__name__}: {first_line(error)}. Reinstall "
            "or remove it."
        ) from error
    if not callable(function):
        raise ConfigError(f"{verb} is no function. Ask its authors.")

    # An application of one command: typer then leaves the name of the command out.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    help_names = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
    try:
        app.command(entry.name, cls=VerbCommand, context_settings=help_names)(flatten(function))
        return typer.main.get_command(app)
    except (RuntimeError, TypeError, KeyError, NameError) as error:
        raise ConfigError(
            f"{verb} has parameters that are no options: {first_line(error)}. They need types "
            "such as str or Path."
        ) from error


def _entry_points() -> list[Any]:
    from importlib.metadata import entry_points

    try:
        return list(entry_points(group=GROUP))
    except Exception as error:  # damaged metadata of any package must not break headway
        log.warning("verbs of other packages are left out: %s", first_line(error))
        return []


def _package(entry: Any) -> str:
    if entry.dist is None:
        return "an unknown package"
    return f"{entry.dist.name} {entry.dist.version}"
