"""`headway chat`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.cli._options import CHAT_TEMPLATE, GROUP, JSON, MODEL, MaskOptions, with_masks
from headway.cli._output import print_json
from headway.cli.generate import CHUNK_TOKENS, DEVICE, MAX_NEW_TOKENS_HELP, SEED, STOP, TOP_K, TOP_P
from headway.errors import ConfigError, HeadwayError

if TYPE_CHECKING:
    from headway.infer.chat import ChatSession

HELP = """/reset         forget the conversation
/system TEXT   set the system message (no text: remove it) and forget the conversation
/save FILE     write the conversation to a .json file
/exit          leave; so does Ctrl-D. Ctrl-C stops an answer."""


def chat(
    model: Path = MODEL,
    system: str | None = typer.Option(None, metavar="TEXT", help="A system message before the conversation."),
    chat_template: str | None = CHAT_TEMPLATE,
    max_new_tokens: int = typer.Option(1024, help=MAX_NEW_TOKENS_HELP),
    temperature: float = typer.Option(0.7, help="0 takes the most likely token each time; above 0 samples."),
    top_k: int | None = TOP_K,
    top_p: float | None = TOP_P,
    stop: list[str] = STOP,
    seed: int = SEED,
    masks: MaskOptions = GROUP,
    chunk_tokens: int = CHUNK_TOKENS,
    device: str = DEVICE,
    json: bool = JSON,
) -> None:
    """Talk to a model in the terminal; lines of standard input are the questions. With --json the conversation is printed at the end."""
    from headway.infer.chat import ChatSession
    from headway.infer.generate import GenerateOptions
    from headway.infer.load import load_model
    from headway.infer.sampling import Sampling
    from headway.runtime.device import choose_compute

    choice = masks.choice()
    options = GenerateOptions(max_new_tokens, tuple(stop), sampling=Sampling(temperature, top_k, top_p, seed), chunk_tokens=chunk_tokens)
    compute = choose_compute(device, "auto")
    loaded = with_masks(load_model(model, device=compute.device, dtype=compute.dtype), choice)
    session = ChatSession(loaded, chat_template, options, system)
    is_person = sys.stdin is not None and sys.stdin.isatty()
    if is_person:
        typer.echo(f"{model}: say something. /help lists the commands, Ctrl-C stops an answer, Ctrl-D leaves.", err=True)
    for line in _lines(is_person):
        try:
            if not _respond(session, line, is_quiet=json):
                break
        except HeadwayError as error:
            if not is_person:
                raise
            typer.echo(f"error: {error}", err=True)
    if json:
        print_json({"messages": session.messages()})


def _lines(is_person: bool) -> Iterator[str]:
    """What is said, line by line, until the input ends. A Ctrl-C at the prompt only drops the line."""
    if not is_person:
        for line in sys.stdin or ():
            yield line.rstrip("\n")
        return
    try:
        import readline  # noqa: F401 # gives input() a history and editing
    except ImportError:
        pass
    while True:
        try:
            yield input("\n> ")
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D leaves.", err=True)
        except EOFError:
            typer.echo()
            return


def _respond(session: ChatSession, line: str, *, is_quiet: bool) -> bool:
    """Answer a line, or do what a command says; False: leave."""
    if not line.strip():
        return True
    if not line.startswith("/"):
        answer = session.ask(line, (lambda _: None) if is_quiet else lambda piece: typer.echo(piece, nl=False))
        if not is_quiet:
            typer.echo(" [stopped]" if answer.was_interrupted else "")
        return True
    command, _, rest = line.partition(" ")
    rest = rest.strip()
    if command == "/reset":
        session.reset()
    elif command == "/system":
        session.system = rest or None
        session.reset()
    elif command == "/save":
        if not rest:
            raise ConfigError("/save needs the name of a .json file.")
        session.save(Path(rest))
        typer.echo(f"wrote {rest}", err=True)
    elif command == "/help":
        typer.echo(HELP, err=True)
    elif command in ("/exit", "/quit", "/bye"):
        return False
    else:
        raise ConfigError(f"{command} is not a command; there are /reset, /system TEXT, /save FILE, /help and /exit.")
    return True


VERBS = {"chat": chat}
