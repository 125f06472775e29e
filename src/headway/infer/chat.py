"""A conversation with a model: what a person says comes in, the answer goes out piece by piece, and
both become turns.

    ChatSession (turns, media, what is left out)
        -> Responder (an engine in this process, or a server) -> ChatAnswer

When the context is full the oldest turns are no longer sent; they stay in the conversation. The
system message is always sent.
"""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from headway.errors import ConfigError, DataError
from headway.infer.generate_options import GenerateOptions, Say
from headway.infer.load import LoadedModel
from headway.infer.messages import as_messages
from headway.media.items import MediaRef, Modality
from headway.records.encode_media import MARK
from headway.runtime.storage import write_atomic
from headway.tokenizer.chat_template import Turn

LISTED: dict[Modality, str] = {"image": "images", "audio": "audios", "video": "videos"}
"""Keys of a saved conversation under which its media are."""


@dataclass(frozen=True)
class ChatStats:
    """Tokens and seconds that an answer took."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt, computed for an earlier answer."""
    new_tokens: int = 0
    first_seconds: float = 0.0
    """Until the first token."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float | None:
        """Speed after the first token, without reading the prompt; None where too few to tell."""
        spent = self.seconds - self.first_seconds
        if self.new_tokens > 1 and spent > 0:
            return (self.new_tokens - 1) / spent
        return None


@dataclass(frozen=True)
class ChatAnswer:
    """What the model said."""

    text: str
    was_interrupted: bool = False
    """Ctrl-C ended it; what had been said stays in the conversation."""
    was_cut: bool = False
    """It reached max_new_tokens, or the end of the context: the model had not finished."""
    left_out: int = 0
    """Oldest questions that are no longer sent, because the context is full."""
    stats: ChatStats = field(default=ChatStats(), compare=False)


class ContextFull(ConfigError):
    """A conversation is longer than the model's context, or leaves too little room for an
    answer."""


class Responder(Protocol):
    """Answers conversations."""

    @property
    def name(self) -> str:
        """The name of the model, as a person knows it."""
        ...

    @property
    def takes(self) -> frozenset[Modality]:
        """Kinds of media that the model takes."""
        ...

    def answer(
        self,
        turns: Sequence[Turn],
        media: Sequence[MediaRef],
        options: GenerateOptions,
        say: Say,
        *,
        attempt: int = 0,
        is_last_try: bool = False,
    ) -> ChatAnswer:
        """The next turn. Raises ContextFull before anything is said; with `is_last_try` only where
        there is no room at all.

        `attempt` counts answers to the same conversation: each draws other tokens.
        """
        ...

    def describe(self) -> dict[str, Any]:
        """What there is to know of it now: context, cache bytes."""
        ...


class ChatSession:
    """A model, and the turns so far. Every answer is computed from the whole conversation, as far
    as the context holds it."""

    def __init__(
        self,
        model: LoadedModel | Responder,
        template: str | None,
        options: GenerateOptions,
        system: str | None = None,
    ) -> None:
        from headway.infer.chat_engine import EngineResponder

        if isinstance(model, LoadedModel):
            self.responder: Responder = EngineResponder(model, template)
        else:
            self.responder = model
        self.options = options
        self.turns: list[Turn] = []
        self.media: list[MediaRef] = []
        """In the order of the marks <image> and <audio> in the questions."""
        self.system = system
        self.left_out = 0
        """First turns that are not sent."""
        self.last: ChatAnswer | None = None
        self._attempt = 0

    def ask(self, text: str, say: Say, media: Sequence[MediaRef] = ()) -> ChatAnswer:
        """Say something and get the answer. If it cannot be answered, the conversation is as
        before."""
        earlier = list(self.turns)
        if earlier and earlier[-1].role == "user":
            earlier.pop()  # one that was never answered
        earlier_media, _ = _split_media(earlier, self.media)

        # As in training data, a mark stands for each picture or sound, before the text.
        marks = "".join(f"<{ref.modality}>" for ref in media)
        question = Turn("user", f"{marks}\n{text}" if marks else text)
        return self._answer([*earlier, question], [*earlier_media, *media], say, 0)

    def regenerate(self, say: Say) -> ChatAnswer:
        """Answer the last question again."""
        index = self._last_question()
        return self._answer(self.turns[: index + 1], self.media, say, self._attempt + 1)

    def edit(self, text: str, say: Say) -> ChatAnswer:
        """Replace the last question, which keeps its media, and answer it."""
        index = self._last_question()
        marks = "".join(f"<{name}>" for name in MARK.findall(self.turns[index].content))
        question = Turn("user", f"{marks}\n{text}" if marks else text)
        return self._answer([*self.turns[:index], question], self.media, say, 0)

    def last_question(self) -> str:
        """The text of the last question, without marks of media."""
        text = self.turns[self._last_question()].content
        if MARK.search(text):
            return MARK.sub("", text).lstrip("\n")
        return text

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns = []
        self.media = []
        self.left_out = 0
        self.last = None

    def copy_turns(self, other: ChatSession) -> None:
        """Take over the conversation of another session."""
        self.turns = list(other.turns)
        self.media = list(other.media)
        self.system = other.system
        self.left_out = 0

    def _last_question(self) -> int:
        questions = [number for number, turn in enumerate(self.turns) if turn.role == "user"]
        if not questions:
            raise ConfigError("nothing has been asked yet. Say something first.")
        return questions[-1]

    def _answer(
        self, turns: list[Turn], media: list[MediaRef], say: Say, attempt: int
    ) -> ChatAnswer:
        """Ask with as much of the conversation as fits: whole questions are left out, the oldest
        first."""
        # Begin where the last answer had to: what did not fit then does not fit now.
        first = min(self.left_out, max(0, len(turns) - 1))
        while True:
            sent = turns[first:]
            next_first = _next_question(turns, first)
            try:
                _, sent_media = _split_media(turns[:first], media)
                answer = self.responder.answer(
                    self._with_system(sent),
                    sent_media,
                    self.options,
                    say,
                    attempt=attempt,
                    is_last_try=next_first is None,
                )
                break
            except ContextFull:
                if next_first is None:
                    raise
                first = next_first

        if answer.text:
            self.turns = [*turns, Turn("assistant", answer.text)]
            self.media = list(media)
            self.left_out = first
            self._attempt = attempt
        # An empty turn would teach the model to be silent: without a text the conversation is as
        # before.
        left = sum(turn.role == "user" for turn in turns[:first])
        self.last = replace(answer, left_out=left)
        return self.last

    def save(self, path: Path) -> None:
        """Write the conversation as JSON in OpenAI's shape, as `--messages` and training on chats
        read it."""
        save_chats(path, [self])

    def load(self, turns: Sequence[Turn], media: Sequence[MediaRef]) -> None:
        """Continue a conversation that was saved."""
        unknown = next(
            (ref.modality for ref in media if ref.modality not in self.responder.takes), None
        )
        if unknown is not None:
            raise ConfigError(
                f"{self.responder.name} does not take {unknown}, and the conversation holds some."
            )
        system = None
        if turns and turns[0].role == "system":
            system = turns[0].content
            turns = turns[1:]
        self.reset()
        self.system = system
        self.turns = list(turns)
        self.media = list(media)

    def messages(self) -> list[dict[str, str]]:
        """The conversation in OpenAI's shape, the system message first."""
        return as_messages(self._with_system(self.turns))

    def record(self) -> dict[str, Any]:
        """The conversation and its media as training reads them: `messages`, `images`, `audios`."""
        listed: dict[str, list[str]] = {}
        for ref in self.media:
            listed.setdefault(LISTED[ref.modality], []).append(_written(ref))
        return {"messages": self.messages(), **listed}

    def _with_system(self, turns: Sequence[Turn]) -> list[Turn]:
        if self.system:
            return [Turn("system", self.system), *turns]
        return list(turns)


def _next_question(turns: Sequence[Turn], first: int) -> int | None:
    """Where the conversation may begin if it must be shorter; None: only its last question is
    left."""
    return next(
        (index for index in range(first + 1, len(turns)) if turns[index].role == "user"), None
    )


def _split_media(
    turns: Sequence[Turn], media: Sequence[MediaRef]
) -> tuple[list[MediaRef], list[MediaRef]]:
    """The media of some first turns, and those that follow."""
    marks = Counter(name for turn in turns for name in MARK.findall(turn.content))
    inside: list[MediaRef] = []
    after: list[MediaRef] = []
    # Marks and media of a kind are in the same order, so the first turns have the first media.
    for ref in media:
        if marks[ref.modality] > 0:
            inside.append(ref)
        else:
            after.append(ref)
        marks[ref.modality] -= 1
    return inside, after


def _written(ref: MediaRef) -> str:
    """A medium in a saved conversation: its path, or its bytes as a data URL where it has none."""
    if ref.path is not None:
        return str(ref.path.absolute())
    kind = "image/png" if ref.modality == "image" else "audio/wav"  # readers look at the bytes
    return f"data:{kind};base64,{base64.b64encode(ref.data or b'').decode()}"


def save_chats(path: Path, sessions: Sequence[ChatSession]) -> None:
    """Write conversations: one as an object, those of several models as a list with their names."""
    if path.suffix != ".json":
        raise ConfigError(f"{path}: give a name that ends in .json.")
    if len(sessions) == 1:
        records: Any = sessions[0].record()
    else:
        records = [{"model": session.responder.name, **session.record()} for session in sessions]
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.parent}.")
    write_atomic(path, json.dumps(records, ensure_ascii=False, indent=2) + "\n")


def read_chats(path: Path) -> list[tuple[list[Turn], list[MediaRef]]]:
    """Conversations that were saved here or exported by the chat page, with their media."""
    from headway.media.records import parse_media_record
    from headway.records.parse_turns import TurnReader
    from headway.runtime.json_file import load_json
    from headway.text.document import Record

    try:
        value = load_json(path)
    except (OSError, ValueError) as problem:
        raise ConfigError(
            f"{path}: cannot be read: {getattr(problem, 'strerror', None) or problem}."
        ) from None
    if isinstance(value, dict) and isinstance(value.get("conversations"), list):
        raise DataError(
            f"{path}: holds several conversations of the chat page. Export one of them there."
        )
    # A list of messages is one conversation, any other list holds several.
    is_messages = isinstance(value, list) and any(
        isinstance(item, dict) and "role" in item for item in value
    )
    conversations: list[Any] = [value]
    if isinstance(value, list) and value and not is_messages:
        conversations = value

    chats: list[tuple[list[Turn], list[MediaRef]]] = []
    for conversation in conversations:
        record = conversation
        if not isinstance(conversation, dict):
            record = {"messages": conversation}
        messages = record.get("messages")
        if not isinstance(messages, list):
            raise DataError(
                f'{path}: not a conversation; it must be {{"messages": [{{"role": "user", '
                f'"content": "..."}}]}}.'
            )

        media: list[MediaRef] = []
        # Media are listed beside the messages, or are parts of them as in OpenAI's shape.
        has_parts = any(
            isinstance(message, dict) and isinstance(message.get("content"), list)
            for message in messages
        )
        if has_parts or any(record.get(key) for key in LISTED.values()):
            # Other keys, such as the model's name, are not for the parser of training data.
            kept = {key: record[key] for key in ("messages", *LISTED.values()) if key in record}
            parsed = parse_media_record(Record(kept, str(path), 1))
            messages = parsed.record.data["messages"]
            media = list(parsed.media)
        chats.append((TurnReader().turns(messages, f"{path}: messages"), media))
    return chats
