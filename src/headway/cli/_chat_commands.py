"""The commands of a chat: a line that begins with / comes in, something about the conversation changes, and one line says what."""

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
    from headway.infer.stream import Say
    from headway.media.items import MediaRef, Modality

HELP = (
    ("/system TEXT", "set the system message (no text: remove it) and forget the conversation"),
    (
        "/set NAME VALUE",
        "temperature, top_k, top_p, max_new_tokens, seed, stop; `off` removes a limit. /set alone shows them",
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
NAMES = "/system, /set, /regenerate, /edit, /image, /audio, /save, /load, /show, /model, /stats, /reset, /help and /exit"

SETTINGS = ("temperature", "top_k", "top_p", "max_new_tokens", "seed", "stop")


@dataclass
class Chat:
    """The sessions of a chat, one for each model, and how they are shown."""

    sessions: list[ChatSession]
    screen: QuietAnswer
    open_models: Callable[[Sequence[str]], list[Responder]]
    edit_line: Callable[[str], str] | None = None
    """Lets a person change a line; None where nobody types."""
    waiting: list[MediaRef] = field(default_factory=list)
    """Media for the next question."""

    def ask(self, text: str) -> None:
        """Say something to every model."""
        media, self.waiting = self.waiting, []
        try:
            self.each(lambda session, say: session.ask(text, say, media))
        except DataError:  # a file that cannot be read: it would stop the next question too
            raise
        except BaseException:
            self.waiting = media
            raise

    def each(self, act: Callable[[ChatSession, Say], ChatAnswer]) -> None:
        """Have every model answer, one after the other."""
        for session in self.sessions:
            before = session.last.left_out if session.last is not None else 0
            self.screen.begin(session.responder.name if len(self.sessions) > 1 else None)
            note = ""
            try:
                answer = act(session, self.screen.say)
                note = "stopped" if answer.was_interrupted else ""
            finally:
                self.screen.end(note)
            if answer.was_cut:
                # Beside the answer, so that a pipe gets the model's words alone.
                limit = session.options.max_new_tokens
                reason = (
                    f"--max-new-tokens is {limit}"
                    if answer.stats.new_tokens >= limit
                    else "the context is full"
                )
                typer.echo(f"[cut after {answer.stats.new_tokens} tokens: {reason}]", err=True)
            if answer.left_out > before:
                what = (
                    "oldest turn is"
                    if answer.left_out == 1
                    else f"{answer.left_out} oldest turns are"
                )
                typer.echo(f"The context is full: the {what} no longer sent.", err=True)

    def respond(self, line: str) -> bool:
        """Answer a line, or do what a command says; False: leave."""
        if not line.strip():
            return True
        if not line.startswith("/"):
            self.ask(line)
            return True
        command, _, rest = line.partition(" ")
        if command in ("/exit", "/quit", "/bye"):
            return False
        found = COMMANDS.get(command)
        if found is None:
            raise ConfigError(
                f"{command} is not a command; there are {NAMES}. A space before / makes it a text."
            )
        found(self, rest.strip())
        return True


def _path(given: str) -> Path:
    """A file as people type or paste it: with ~, in quotes."""
    quoted = len(given) > 1 and given[0] == given[-1] and given[0] in "'\""
    return Path(given[1:-1] if quoted else given).expanduser()


def completions(line: str) -> list[str]:
    """What a line may become: names of commands, and of files after those that take one."""
    command, space, rest = line.partition(" ")
    if not space:
        return [name for name in (*COMMANDS, "/exit") if command and name.startswith(command)]
    if command == "/set":
        return [f"/set {name} " for name in SETTINGS if name.startswith(rest)]
    if command not in ("/save", "/load", "/image", "/audio", "/model"):
        return []
    folder, slash, begun = rest.rpartition("/")
    try:
        inside = sorted(
            one for one in _path(f"{folder}{slash}" or ".").iterdir() if one.name.startswith(begun)
        )
    except (OSError, ValueError, RuntimeError):  # no such folder, no such user
        return []
    return [
        f"{command} {folder}{slash}{one.name}{'/' if one.is_dir() else ''}"
        for one in inside[:200]
        if begun or not one.name.startswith(".")
    ]


def _reset(chat: Chat, rest: str) -> None:
    chat.waiting = []
    for session in chat.sessions:
        session.reset()


def _system(chat: Chat, rest: str) -> None:
    for session in chat.sessions:
        session.system = rest or None
        session.reset()


def _save(chat: Chat, rest: str) -> None:
    from headway.infer.chat import save_chats

    if not rest:
        raise ConfigError("/save needs the name of a .json file.")
    save_chats(_path(rest), chat.sessions)
    typer.echo(f"wrote {rest}", err=True)


def _load(chat: Chat, rest: str) -> None:
    from headway.infer.chat import read_chats

    if not rest:
        raise ConfigError("/load needs the name of a .json file.")
    found = read_chats(_path(rest))
    if len(found) not in (1, len(chat.sessions)):
        raise ConfigError(
            f"{rest}: holds {len(found)} conversations; {len(chat.sessions)} are open here."
        )
    for number, session in enumerate(chat.sessions):
        session.load(*found[number if len(found) > 1 else 0])
    turns = len(chat.sessions[0].turns)
    is_open = bool(turns) and chat.sessions[0].turns[-1].role == "user"
    typer.echo(
        f"read {rest}: {turns} messages{'; /regenerate answers the last one' if is_open else ''}",
        err=True,
    )


def _show(chat: Chat, rest: str) -> None:
    for session in chat.sessions:
        chat.screen.begin(session.responder.name if len(chat.sessions) > 1 else None)
        for one in session.messages():
            typer.echo(f"{one['role']}: {harmless(one['content'])}", err=True)


def _regenerate(chat: Chat, rest: str) -> None:
    chat.each(lambda session, say: session.regenerate(say))


def _edit(chat: Chat, rest: str) -> None:
    before = chat.sessions[0].last_question()
    if not rest and chat.edit_line is not None:
        rest = chat.edit_line(before)
    if not rest.strip():
        raise ConfigError("/edit needs a text: what to ask instead of the last question.")
    chat.each(lambda session, say: session.edit(rest, say))


def _media(kind: Modality) -> Callable[[Chat, str], None]:
    def attach(chat: Chat, rest: str) -> None:
        from headway.media.items import MediaRef

        if not rest:
            raise ConfigError(f"/{kind} needs the name of a file.")
        lacks = next(
            (one.responder.name for one in chat.sessions if kind not in one.responder.takes), None
        )
        if lacks is not None:
            raise ConfigError(
                f"{lacks} does not take {kind}s; a model trained with `multimodal` does."
            )
        ref = MediaRef(kind, _path(rest))
        size = ref.size()  # refuses what is no file
        chat.waiting.append(ref)
        typer.echo(f"{rest} ({size:,} bytes) goes with the next question.", err=True)

    return attach


def _set(chat: Chat, rest: str) -> None:
    options = chat.sessions[0].options
    values = (
        options.sampling.temperature, options.sampling.top_k, options.sampling.top_p,
        options.max_new_tokens, options.sampling.seed, list(options.stop) or None,
    )  # fmt: skip
    shown: dict[str, Any] = dict(zip(SETTINGS, values, strict=True))
    if not rest:
        typer.echo(
            "\n".join(
                f"{name:<15}{'off' if value is None else value}" for name, value in shown.items()
            ),
            err=True,
        )
        return
    name, _, given = rest.partition(" ")
    name, given = name.replace("-", "_"), given.strip()
    if name == "max_tokens":
        name = "max_new_tokens"
    if name not in shown:
        raise ConfigError(
            f"/set {name[:40]}: there is no such setting; there are {', '.join(shown)}."
        )
    if not given:
        raise ConfigError(
            f"/set {name} needs a value; it is {'off' if shown[name] is None else shown[name]} now."
        )
    value = _value(name, given)
    for session in chat.sessions:
        sampling = session.options.sampling
        if name in ("max_new_tokens", "stop"):
            session.options = replace(session.options, **{name: value})
        else:
            session.options = replace(session.options, sampling=replace(sampling, **{name: value}))


def _value(name: str, given: str) -> Any:
    if name == "stop":
        return () if given == "off" else (given,)
    if given == "off" and name in ("top_k", "top_p"):
        return None
    kind = float if name in ("temperature", "top_p") else int
    try:
        return kind(given)
    except ValueError:
        raise ConfigError(
            f"/set {name} is {given[:40]!r}; it must be a {'number' if kind is float else 'whole number'}."
        ) from None


def _model(chat: Chat, rest: str) -> None:
    if not rest:
        typer.echo("\n".join(session.responder.name for session in chat.sessions), err=True)
        return
    from headway.infer.chat import ChatSession

    try:
        names = shlex.split(rest)
    except ValueError as problem:
        raise ConfigError(f"/model {rest[:200]}: {problem}.") from None
    if len(names) > 2:
        raise ConfigError(f"/model names {len(names)} models; one or two can be talked to.")
    first = chat.sessions[0]
    made = [ChatSession(one, None, first.options) for one in chat.open_models(names)]
    for session in made:
        unknown = next(
            (ref.modality for ref in first.media if ref.modality not in session.responder.takes),
            None,
        )
        if unknown is not None:
            raise ConfigError(
                f"{session.responder.name} does not take {unknown}s, and the conversation has some. /reset forgets it."
            )
        session.copy_turns(first)
    chat.sessions = made


def _stats(chat: Chat, rest: str) -> None:
    for session in chat.sessions:
        facts = session.responder.describe()
        lines = [
            f"{session.responder.name}: {len(session.turns)} messages"
            + (f", {session.left_out} of them not sent" if session.left_out else "")
        ]
        if session.last is not None:
            used, rate = session.last.stats, session.last.stats.tokens_per_second
            lines.append(
                f"  last answer: {used.new_tokens} tokens in {used.seconds:.2f} s"
                + (f", {rate:.1f} tokens/s" if rate is not None else "")
                + f", first after {used.first_seconds * 1000:.0f} ms"
            )
            context = facts.get("context")
            lines.append(
                f"  prompt: {used.prompt_tokens} tokens, {used.cached_tokens} of them from the cache"
                + (
                    f"; context {used.prompt_tokens + used.new_tokens} of {context}"
                    if context
                    else ""
                )
            )
        if "cache_bytes" in facts:
            lines.append(
                f"  cache: {_bytes(facts['cache_bytes'])} of {_bytes(facts['cache_budget_bytes'])}"
            )
        typer.echo("\n".join(lines), err=True)


def _help(width: int) -> str:
    """The commands: in two columns, or below each other on a narrow terminal."""
    indent = max(len(usage) for usage, _ in HELP) + 2 if width >= 60 else 4
    lines: list[str] = []
    for usage, text in HELP:
        wrapped = textwrap.wrap(text, max(16, width - indent - 1))
        if width >= 60:
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
    "/reset": _reset, "/system": _system, "/save": _save, "/load": _load, "/show": _show, "/regenerate": _regenerate, "/edit": _edit,
    "/image": _media("image"), "/audio": _media("audio"), "/set": _set, "/model": _model, "/stats": _stats,
    "/help": lambda chat, rest: typer.echo(_help(shutil.get_terminal_size().columns), err=True),
}  # fmt: skip
