"""The commands of a chat: a line that begins with / comes in, something about the conversation
changes, and one line says what.
"""

from __future__ import annotations

import shlex
import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from headway.cli._chat_screen import QuietAnswer, harmless
from headway.errors import ConfigError, DataError

if TYPE_CHECKING:
    from headway.infer.chat import ChatAnswer, ChatSession, Responder
    from headway.infer.generate_options import Say
    from headway.media.items import MediaRef, Modality

HELP = (
    ("/system TEXT", "set the system message (no text: remove it) and forget the conversation"),
    (
        "/set NAME VALUE",
        "temperature, top_k, top_p, max_new_tokens, seed, stop; `off` removes a limit. /set alone "
        "shows them",
    ),
    ("/regenerate", "answer the last question again"),
    ("/edit TEXT", "replace the last question and answer it (no text: edit it in place)"),
    ("/image FILE", "a picture for the next question; /audio FILE: a sound"),
    ("/save FILE", "write the conversation to a .json file; /load FILE continues one"),
    ("/show", "print the conversation"),
    ("/model A [B]", "talk to another model, or to two side by side; /model alone names them"),
    ("/stats", "tokens/s, time to the first token, context and cache"),
    ("/reset", "forget the conversation"),
    ("/exit", "leave; so does Ctrl-D. Ctrl-C stops an answer"),
    ("text \\", "a line that ends in \\ continues on the next"),
    ('"""', "begins and ends a text of several lines"),
)
NAMES = (
    "/system, /set, /regenerate, /edit, /image, /audio, /save, /load, /show, /model, /stats, "
    "/reset, /help and /exit"
)

SETTINGS = ("temperature", "top_k", "top_p", "max_new_tokens", "seed", "stop")
MOST_FILES = 200
"""Completions of a file name."""
TWO_COLUMNS = 60
"""Columns of a terminal that is wide enough for commands beside what they do."""


@dataclass
class Chat:
    """The sessions of a chat, one for each model, and how they are shown."""

    sessions: list[ChatSession]
    screen: QuietAnswer
    open_models: Callable[[Sequence[str]], list[Responder]]
    """Loads the models that /model names."""
    edit_line: Callable[[str], str] | None = None
    """Lets a person change a line; None where nobody types."""
    waiting: list[MediaRef] = field(default_factory=list)
    """Media for the next question."""

    def ask(self, text: str) -> None:
        """Ask every model the same question, with the media that wait for it."""
        media = self.waiting
        self.waiting = []
        try:
            self.answer_all(lambda session, say: session.ask(text, say, media))
        except DataError:
            # A file that cannot be read. It is dropped: it would stop the next question, too.
            raise
        except BaseException:
            # Also after Ctrl-C: the question was not answered, and is probably asked again.
            self.waiting = media
            raise

    def answer_all(self, act: Callable[[ChatSession, Say], ChatAnswer]) -> None:
        """Have every model answer, one after the other."""
        for session in self.sessions:
            left_out_before = 0
            if session.last is not None:
                left_out_before = session.last.left_out
            self.begin_session(session)

            note = ""
            try:
                answer = act(session, self.screen.say)
                if answer.was_interrupted:
                    note = "stopped"
            finally:
                self.screen.end(note)

            if answer.was_cut:
                # Beside the answer, so that a pipe gets the model's words alone.
                limit = session.options.max_new_tokens
                reason = "the context is full"
                if answer.stats.new_tokens >= limit:
                    reason = f"--max-new-tokens is {limit}"
                typer.echo(f"[cut after {answer.stats.new_tokens} tokens: {reason}]", err=True)
            if answer.left_out > left_out_before:
                turns = "oldest turn is"
                if answer.left_out != 1:
                    turns = f"{answer.left_out} oldest turns are"
                typer.echo(f"The context is full: the {turns} no longer sent.", err=True)

    def begin_session(self, session: ChatSession) -> None:
        """Show which model answers, where several do."""
        name = None
        if len(self.sessions) > 1:
            name = session.responder.name
        self.screen.begin(name)

    def respond(self, line: str) -> bool:
        """Answer a line, or do what a command says; False: leave."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.ask(line)
            return True
        # "/" at the beginning of a line is a command, also of a line that a program sends.
        command, _, argument = line.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        action = COMMANDS.get(command)
        if action is None:
            raise ConfigError(
                f"{command} is not a command; there are {NAMES}. A space before / makes it a text."
            )
        action(self, argument.strip())
        return True


def _path(text: str) -> Path:
    """A file as people type or paste it: with ~, in quotes."""
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    if is_quoted:
        text = text[1:-1]
    return Path(text).expanduser()


def completions(line: str) -> list[str]:
    """What a line may become: names of commands, and of files after those that take one."""
    command, space, argument = line.partition(" ")
    if not space:
        return [name for name in (*COMMANDS, "/exit") if command and name.startswith(command)]
    if command == "/set":
        return [f"/set {name} " for name in SETTINGS if name.startswith(argument)]
    if command not in ("/save", "/load", "/image", "/audio", "/model"):
        return []

    folder, slash, begun = argument.rpartition("/")
    try:
        inside = sorted(
            path
            for path in _path(f"{folder}{slash}" or ".").iterdir()
            if path.name.startswith(begun)
        )
    except (OSError, ValueError, RuntimeError):  # no such folder, no such user
        return []
    return [
        f"{command} {folder}{slash}{path.name}{'/' if path.is_dir() else ''}"
        for path in inside[:MOST_FILES]
        if begun or not path.name.startswith(".")
    ]


def _reset(chat: Chat, argument: str) -> None:
    chat.waiting = []
    for session in chat.sessions:
        session.reset()


def _system(chat: Chat, argument: str) -> None:
    # Answers so far were given under another system message.
    for session in chat.sessions:
        session.system = argument or None
        session.reset()


def _save(chat: Chat, argument: str) -> None:
    from headway.infer.chat import save_chats

    if not argument:
        raise ConfigError("/save needs the name of a .json file.")
    save_chats(_path(argument), chat.sessions)
    typer.echo(f"wrote {argument}", err=True)


def _load(chat: Chat, argument: str) -> None:
    from headway.infer.chat import read_chats

    if not argument:
        raise ConfigError("/load needs the name of a .json file.")
    conversations = read_chats(_path(argument))
    if len(conversations) not in (1, len(chat.sessions)):
        raise ConfigError(
            f"{argument}: holds {len(conversations)} conversations; {len(chat.sessions)} are open "
            "here."
        )

    # One conversation is continued by every model that is open.
    if len(conversations) == 1:
        conversations = conversations * len(chat.sessions)
    for session, conversation in zip(chat.sessions, conversations, strict=True):
        session.load(*conversation)

    turns = len(chat.sessions[0].turns)
    hint = ""
    if turns and chat.sessions[0].turns[-1].role == "user":
        hint = "; /regenerate answers the last one"
    typer.echo(f"read {argument}: {turns} messages{hint}", err=True)


def _show(chat: Chat, argument: str) -> None:
    for session in chat.sessions:
        chat.begin_session(session)
        for message in session.messages():
            typer.echo(f"{message['role']}: {harmless(message['content'])}", err=True)


def _regenerate(chat: Chat, argument: str) -> None:
    chat.answer_all(lambda session, say: session.regenerate(say))


def _edit(chat: Chat, argument: str) -> None:
    # The question of the first session is edited, and asked of every model. It is looked up even
    # with a text: without a question there is nothing to edit, and the session says so.
    last_question = chat.sessions[0].last_question()
    if not argument and chat.edit_line is not None:
        argument = chat.edit_line(last_question)
    if not argument.strip():
        raise ConfigError("/edit needs a text: what to ask instead of the last question.")
    chat.answer_all(lambda session, say: session.edit(argument, say))


def _media(kind: Modality) -> Callable[[Chat, str], None]:
    """The command that attaches a file of this modality to the next question."""

    def attach(chat: Chat, argument: str) -> None:
        from headway.media.items import MediaRef

        if not argument:
            raise ConfigError(f"/{kind} needs the name of a file.")
        for session in chat.sessions:
            if kind not in session.responder.takes:
                raise ConfigError(
                    f"{session.responder.name} does not take {kind}s; a model trained with "
                    "`multimodal` does."
                )
        ref = MediaRef(kind, _path(argument))
        size = ref.size()  # refuses what is no file
        chat.waiting.append(ref)
        typer.echo(f"{argument} ({size:,} bytes) goes with the next question.", err=True)

    return attach


def _set(chat: Chat, argument: str) -> None:
    options = chat.sessions[0].options
    sampling = options.sampling
    values = (
        sampling.temperature,
        sampling.top_k,
        sampling.top_p,
        options.max_new_tokens,
        sampling.seed,
        list(options.stop) or None,
    )
    shown: dict[str, Any] = {}
    for name, value in zip(SETTINGS, values, strict=True):
        shown[name] = "off" if value is None else value
    if not argument:
        lines = [f"{name:<15}{value}" for name, value in shown.items()]
        typer.echo("\n".join(lines), err=True)
        return

    # /set max-tokens 100 is understood: options of the command line are written with dashes.
    written, _, text = argument.partition(" ")
    name = written.replace("-", "_")
    text = text.strip()
    if name == "max_tokens":
        name = "max_new_tokens"
    if name not in shown:
        raise ConfigError(
            f"/set {name[:40]}: there is no such setting; there are {', '.join(shown)}."
        )
    if not text:
        raise ConfigError(f"/set {name} needs a value; it is {shown[name]} now.")

    value = _value(name, text)
    for session in chat.sessions:
        if name in ("max_new_tokens", "stop"):
            session.options = replace(session.options, **{name: value})
        else:
            sampling = replace(session.options.sampling, **{name: value})
            session.options = replace(session.options, sampling=sampling)


def _value(name: str, text: str) -> Any:
    """The value of a setting that a person typed."""
    if name == "stop":
        if text == "off":
            return ()
        return (text,)
    if text == "off" and name in ("top_k", "top_p"):
        return None

    kind = int
    expected = "whole number"
    if name in ("temperature", "top_p"):
        kind = float
        expected = "number"
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"/set {name} is {text[:40]!r}; it must be a {expected}.") from None


def _model(chat: Chat, argument: str) -> None:
    if not argument:
        typer.echo("\n".join(session.responder.name for session in chat.sessions), err=True)
        return
    from headway.infer.chat import ChatSession

    try:
        names = shlex.split(argument)
    except ValueError as problem:
        raise ConfigError(f"/model {argument[:200]}: {problem}.") from None
    if len(names) > 2:
        raise ConfigError(f"/model names {len(names)} models; one or two can be talked to.")

    # The new models continue the conversation. Sessions are replaced only when all can take it.
    first = chat.sessions[0]
    sessions = [
        ChatSession(responder, None, first.options) for responder in chat.open_models(names)
    ]
    for session in sessions:
        not_taken = next(
            (ref.modality for ref in first.media if ref.modality not in session.responder.takes),
            None,
        )
        if not_taken is not None:
            raise ConfigError(
                f"{session.responder.name} does not take {not_taken}s, and the conversation has "
                "some. /reset forgets it."
            )
        session.copy_turns(first)
    chat.sessions = sessions


def _stats(chat: Chat, argument: str) -> None:
    for session in chat.sessions:
        facts = session.responder.describe()
        headline = f"{session.responder.name}: {len(session.turns)} messages"
        if session.left_out:
            headline += f", {session.left_out} of them not sent"
        lines = [headline]

        if session.last is not None:
            stats = session.last.stats
            speed = f"  last answer: {stats.new_tokens} tokens in {stats.seconds:.2f} s"
            # One token, or none, has no rate.
            if stats.tokens_per_second is not None:
                speed += f", {stats.tokens_per_second:.1f} tokens/s"
            lines.append(f"{speed}, first after {stats.first_seconds * 1000:.0f} ms")

            prompt = (
                f"  prompt: {stats.prompt_tokens} tokens, {stats.cached_tokens} of them from the "
                "cache"
            )
            if facts.get("context"):
                used = stats.prompt_tokens + stats.new_tokens
                prompt += f"; context {used} of {facts['context']}"
            lines.append(prompt)

        if "cache_bytes" in facts:
            lines.append(
                f"  cache: {_bytes(facts['cache_bytes'])} of {_bytes(facts['cache_budget_bytes'])}"
            )
        typer.echo("\n".join(lines), err=True)


def _help(width: int) -> str:
    """The commands: in two columns, or below each other on a narrow terminal."""
    has_columns = width >= TWO_COLUMNS
    indent = 4
    if has_columns:
        indent = max(len(usage) for usage, _ in HELP) + 2

    lines: list[str] = []
    for usage, text in HELP:
        wrapped = textwrap.wrap(text, max(16, width - indent - 1))
        if has_columns:
            lines.append(usage.ljust(indent) + wrapped.pop(0))
        else:
            lines.append(usage)
        lines += [" " * indent + line for line in wrapped]
    return "\n".join(lines)


def _bytes(value: int) -> str:
    for size, mark in ((1 << 30, "GB"), (1 << 20, "MB"), (1 << 10, "KB")):
        if value >= size:
            return f"{value / size:.1f} {mark}"
    return f"{value} bytes"


COMMANDS: dict[str, Callable[[Chat, str], None]] = {
    "/reset": _reset,
    "/system": _system,
    "/save": _save,
    "/load": _load,
    "/show": _show,
    "/regenerate": _regenerate,
    "/edit": _edit,
    "/image": _media("image"),
    "/audio": _media("audio"),
    "/set": _set,
    "/model": _model,
    "/stats": _stats,
    "/help": lambda chat, argument: typer.echo(_help(shutil.get_terminal_size().columns), err=True),
}
