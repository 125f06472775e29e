"""`headway chat`."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    MaskOptions,
    SpeculateOptions,
    at_revision,
    model_option,
    refuse_flags,
    with_masks,
)
from headway.cli._output import print_json
from headway.cli.generate import CHUNK_TOKENS, DEVICE, MAX_NEW_TOKENS_HELP, SEED, STOP, TOP_K, TOP_P
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.infer.chat import Responder
    from headway.infer.generate import GenerateOptions

TOKEN = "HEADWAY_SERVE_TOKEN"
BLOCK = '"""'
MOST_MODELS = 2


@dataclass(frozen=True)
class ChatModels:
    """Which models answer, and where they compute."""

    model: list[Path] = model_option(
        [],
        metavar="MODEL",
        help=f"{MODEL_HELP} Given twice: two models side by side. With --url: the name of a model there; default: its first.",
    )
    revision: str | None = REVISION
    url: str | None = typer.Option(
        None,
        metavar="ADDRESS",
        help=f"Talk to a running headway serve instead, e.g. http://127.0.0.1:8000; its token is read from {TOKEN}.",
    )
    chat_template: str | None = CHAT_TEMPLATE
    chunk_tokens: int = CHUNK_TOKENS
    device: str = DEVICE

    def opener(self, masks: MaskOptions) -> Callable[[Sequence[str]], list[Responder]]:
        """What opens models by their names."""
        if self.url is not None:
            used = {
                "--masks": masks.masks,
                "--stream-window": masks.stream_window,
                "--stream-sinks": masks.stream_sinks,
            }
            used |= {"--chat-template": self.chat_template, "--revision": self.revision}
            refuse_flags("--url: the server has loaded its models", used)
            return self._from_server
        choice = masks.choice()
        opened: dict[str, Responder] = {}

        def open_one(name: str) -> Responder:
            from headway.infer.chat_engine import EngineResponder
            from headway.infer.load import load_model
            from headway.runtime.device import choose_compute

            if name not in opened:
                compute = choose_compute(self.device, "auto")
                path = at_revision(Path(name), self.revision)
                loaded = with_masks(
                    load_model(path, device=compute.device, dtype=compute.dtype), choice
                )
                opened[name] = EngineResponder(loaded, self.chat_template, name)
            return opened[name]

        def open_models(names: Sequence[str]) -> list[Responder]:
            found = [open_one(name) for name in names]
            for name in opened.keys() - set(names):  # its memory is needed
                del opened[name]
            return found

        return open_models

    def _from_server(self, names: Sequence[str]) -> list[Responder]:
        from headway.infer.chat_server import ChatServer, ServerResponder

        assert self.url is not None
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
                f"no model is given. Name it after the verb or with --model, or give --url. {MODEL_HELP}"
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
    max_new_tokens: int = typer.Option(1024, help=MAX_NEW_TOKENS_HELP),
    temperature: float = typer.Option(
        0.7, help="0 takes the most likely token each time; above 0 samples."
    ),
    top_k: int | None = TOP_K,
    top_p: float | None = TOP_P,
    stop: list[str] = STOP,
    seed: int = SEED,
    masks: MaskOptions = GROUP,
    guess: SpeculateOptions = GROUP,
    markdown: bool = typer.Option(
        True, "--markdown/--no-markdown", help="On a terminal, draw Markdown instead of its signs."
    ),
    json: bool = JSON,
) -> None:
    """Talk to a model in the terminal; lines of standard input are the questions. With --json the conversation is printed at the end."""
    from headway.infer.chat import ChatSession
    from headway.infer.generate import GenerateOptions
    from headway.infer.sampling import Sampling

    if models.url is not None:
        refuse_flags("--url: the server decides how it decodes", {"--speculate": guess.speculate})
    names, open_models = models.names(), models.opener(masks)
    sampling = Sampling(temperature, top_k, top_p, seed)
    options: GenerateOptions = GenerateOptions(
        max_new_tokens,
        tuple(stop),
        sampling=sampling,
        chunk_tokens=models.chunk_tokens,
        speculation=guess.speculation(),
    )
    sessions = [ChatSession(one, None, options, system) for one in open_models(names)]
    is_person = sys.stdin is not None and sys.stdin.isatty()
    screen = open_screen(is_quiet=json, draws_markdown=markdown)
    talk = Chat(sessions, screen, open_models, _edited if is_person else None)
    if is_person:
        named = " and ".join(session.responder.name for session in sessions)
        hint = f"{named}: say something. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves."
        typer.echo(
            textwrap.fill(
                hint, max(20, shutil.get_terminal_size().columns - 1), break_long_words=False
            ),
            err=True,
        )
    for line in _lines(is_person):
        try:
            if not talk.respond(line):
                break
        except HeadwayError as error:
            if not is_person:
                raise
            typer.echo(f"error: {error}", err=True)
    if json:
        records = [session.record() for session in talk.sessions]
        named = [
            {"model": session.responder.name, **record}
            for session, record in zip(talk.sessions, records, strict=True)
        ]
        print_json(records[0] if len(records) == 1 else {"conversations": named})


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
    """Give the prompt a history, editing, and completion of commands and files, where readline is there."""
    try:
        import readline
    except ImportError:
        return
    readline.set_completer_delims("")
    readline.set_completer(lambda text, state: dict(enumerate(completions(text))).get(state))
    readline.parse_and_bind(
        "bind ^I rl_complete" if "libedit" in (readline.__doc__ or "") else "tab: complete"
    )


def _text(line: str) -> str:
    r'''A line and those that continue it: after a \ at the end, or from """ to """.'''
    if line.lstrip().startswith(BLOCK):
        line = line.lstrip()[len(BLOCK) :]
        lines = [line]
        while not lines[-1].rstrip().endswith(BLOCK):
            lines.append(input("… "))
        lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
        return " " * lines[0].startswith("/") + "\n".join(lines).strip("\n")
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
