"""`headway chat`."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._chat_commands import Chat, completions
from headway.cli._chat_screen import open_screen
from headway.cli._options import (
    CHAT_TEMPLATE,
    GROUP,
    JSON,
    MODEL_HELP,
    REVISION,
    SpeculateOptions,
    at_revision,
    group,
    model_option,
    refuse_flags,
    with_masks,
)
from headway.cli._output import print_json
from headway.cli.generate import DEVICE
from headway.errors import ConfigError, HeadwayError
from headway.infer.generate_options import GenerateOptions
from headway.infer.sampling import Sampling
from headway.model.head_masks.choice import MaskChoice

if TYPE_CHECKING:
    from headway.infer.chat import Responder

TOKEN = "HEADWAY_SERVE_TOKEN"
"""The environment variable that `headway serve` reads, too."""
BLOCK = '"""'
"""Begins and ends a text of several lines."""
MOST_MODELS = 2
NARROWEST = 20
"""Columns of a terminal; narrower ones break the lines themselves."""


@dataclass(frozen=True)
class ChatModels:
    """Which models answer, and where they compute."""

    model: list[Path] = model_option(
        [],
        metavar="MODEL",
        help=f"{MODEL_HELP} Given twice: two models side by side. With --url: the name of a model "
        "there; default: its first.",
    )
    revision: str | None = REVISION
    url: str | None = typer.Option(
        None,
        metavar="ADDRESS",
        help="Talk to a running headway serve instead, e.g. http://127.0.0.1:8000; its token is "
        f"read from {TOKEN}.",
    )
    chat_template: str | None = CHAT_TEMPLATE
    device: str = DEVICE

    def opener(self, choice: MaskChoice) -> Callable[[Sequence[str]], list[Responder]]:
        """A function that opens models by their names; those that are open stay loaded."""
        if self.url is not None:
            local_flags = {
                "--masks": choice.masks,
                "--stream-window": choice.stream_window,
                "--stream-sinks": choice.stream_sinks,
                "--chat-template": self.chat_template,
                "--revision": self.revision,
            }
            refuse_flags("--url: the server has loaded its models", local_flags)
            return self._from_server

        opened: dict[str, Responder] = {}

        def open_model(name: str) -> Responder:
            from headway.infer.chat_engine import EngineResponder
            from headway.infer.load import load_model
            from headway.runtime.device import choose_compute

            if name in opened:
                return opened[name]
            compute = choose_compute(self.device, "auto")
            path = at_revision(Path(name), self.revision)
            loaded = load_model(path, device=compute.device, dtype=compute.dtype)
            opened[name] = EngineResponder(with_masks(loaded, choice), self.chat_template, name)
            return opened[name]

        def open_models(names: Sequence[str]) -> list[Responder]:
            responders = [open_model(name) for name in names]
            # After /model: the memory of a model that no longer answers is needed.
            for name in opened.keys() - set(names):
                del opened[name]
            return responders

        return open_models

    def _from_server(self, names: Sequence[str]) -> list[Responder]:
        from headway.infer.chat_server import ChatServer, ServerResponder

        assert self.url is not None
        # Never an option: those are seen by everybody who lists the processes of a machine.
        server = ChatServer(self.url, os.environ.get(TOKEN))
        known = server.models()
        if not known:
            raise ConfigError(f"--url is {self.url}, which has no model.")
        unknown = next((name for name in names if name not in known), None)
        if unknown is not None:
            raise ConfigError(f"--model is {unknown!r}; {self.url} has {', '.join(known)}.")
        return [ServerResponder(server, name) for name in names or known[:1]]

    def names(self) -> list[str]:
        """The models, checked."""
        if not self.model and self.url is None:
            raise ConfigError(
                "no model is given. Name it after the verb or with --model, or give --url. "
                f"{MODEL_HELP}"
            )
        names = [str(path) for path in self.model or ()]
        if len(names) > MOST_MODELS:
            raise ConfigError(
                f"{len(names)} models are given; one model, or two side by side, can be talked to."
            )
        return names


def chat(
    models: ChatModels = GROUP,
    system: str | None = typer.Option(
        None, metavar="TEXT", help="A system message before the conversation."
    ),
    options: GenerateOptions = group(
        GenerateOptions(1024, sampling=Sampling(0.7)),
        ("max_new_tokens", "stop", "sampling", "chunk_tokens"),
    ),
    choice: MaskChoice = GROUP,
    guess: SpeculateOptions = GROUP,
    markdown: bool = typer.Option(
        True, "--markdown/--no-markdown", help="On a terminal, draw Markdown instead of its signs."
    ),
    json: bool = JSON,
) -> None:
    """Talk to a model in the terminal; lines of standard input are the questions. With --json the conversation is printed at the end."""
    from headway.infer.chat import ChatSession

    if models.url is not None:
        refuse_flags("--url: the server decides how it decodes", {"--speculate": guess.speculate})

    names = models.names()
    open_models = models.opener(choice)
    options = replace(options, speculation=guess.speculation())
    sessions = [ChatSession(responder, None, options, system) for responder in open_models(names)]

    # From a pipe or a file come questions of a program, which needs neither hints nor a prompt,
    # and whose mistakes end the verb.
    is_person = sys.stdin is not None and sys.stdin.isatty()
    screen = open_screen(is_quiet=json, draws_markdown=markdown)
    talk = Chat(sessions, screen, open_models, _edited if is_person else None)
    if is_person:
        named = " and ".join(session.responder.name for session in sessions)
        hint = (
            f"{named}: say something. /help lists the commands, Ctrl-C stops an answer, Ctrl-D "
            "leaves."
        )
        width = max(NARROWEST, shutil.get_terminal_size().columns - 1)
        typer.echo(textwrap.fill(hint, width, break_long_words=False), err=True)

    for line in _lines(is_person):
        try:
            if not talk.respond(line):
                break
        except HeadwayError as error:
            if not is_person:
                raise
            typer.echo(f"error: {error}", err=True)

    if not json:
        return
    if len(talk.sessions) == 1:
        print_json(talk.sessions[0].record())
        return
    conversations = [
        {"model": session.responder.name, **session.record()} for session in talk.sessions
    ]
    print_json({"conversations": conversations})


def _lines(is_person: bool) -> Iterator[str]:
    """What is said, until the input ends. A Ctrl-C at the prompt only drops the line."""
    if not is_person:
        for line in sys.stdin or ():
            yield line.rstrip("\n")
        return
    _complete_lines()
    while True:
        try:
            yield _text(input("\n> "))
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D leaves.", err=True)
        except EOFError:
            typer.echo()
            return


def _complete_lines() -> None:
    """Give the prompt a history, editing, and completion of commands and files, where readline is
    there.
    """
    try:
        import readline
    except ImportError:
        return

    # Without delimiters the completer sees the whole line: which files fit depends on the command.
    readline.set_completer_delims("")
    # readline asks for completion 0, 1, ... until it gets None.
    readline.set_completer(lambda text, state: dict(enumerate(completions(text))).get(state))

    # macOS has libedit under the name of readline, with another syntax of key bindings.
    binding = "tab: complete"
    if "libedit" in (readline.__doc__ or ""):
        binding = "bind ^I rl_complete"
    readline.parse_and_bind(binding)


def _text(line: str) -> str:
    r'''A line and those that continue it: after a \ at the end, or from """ to """.'''
    if line.lstrip().startswith(BLOCK):
        line = line.lstrip()[len(BLOCK) :]
        lines = [line]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(input("… "))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        text = "\n".join(lines).strip("\n")
        # A block is never a command; a space in front makes a / a text.
        if lines[0].startswith("/"):
            text = f" {text}"
        return text
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('… ')}"
    return line


def _edited(before: str) -> str:
    """A line that a person changes in place; new lines are shown as \\n."""
    try:
        import readline
    except ImportError:
        return ""
    readline.set_startup_hook(lambda: readline.insert_text(before.replace("\n", "\\n")))
    try:
        return input("edit> ").replace("\\n", "\n")
    finally:
        readline.set_startup_hook(None)


VERBS = {"chat": chat}
