"""Which keys of a record are read, and under which names. In: a record and the user's `keys`;
out: its values by headway's names.

    keys: {prompt: question, response: answer.text, system: sys?, note: ""}

    name: the record's key; dots go into objects; `?`: may be missing; empty: ignored on purpose

Invariant: each key of a record is read, repeats what was read, is refused because it is known to
carry content, or is reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from headway.errors import ConfigError, DataError
from headway.text.document import MISSING, Record, look_up

# The names of values in the known shapes of records (headway/records/chat.py lists the shapes). The
# first of a tuple that a record has counts.
LISTS = ("messages", "conversations", "conversation", "items", "dialogue", "dialog")
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "input")
ANSWERS = ("output", "response", "completion", "answer", "target", "solution")
SYSTEMS = ("system", "system_prompt", "meta_instruction")
TOOLS = ("tools", "functions")
LABELS = ("label", "kto_tag")
PAIR = ("chosen", "rejected")
MEDIA = ("image", "images", "video", "videos", "audio", "audios")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MAIN = frozenset((*LISTS, *QUESTIONS, *ANSWERS, *PAIR, "chat", "plain_text"))
"""Keys that decide the shape of a record."""
CONTENT = MAIN | {
    *SYSTEMS,
    *TOOLS,
    *MEDIA,
    *THOUGHTS,
    "context",
    "history",
    "function_call",
    "tool_calls",
}
"""Keys that carry content in some known shape; a record with such a key unread is refused."""
TURN_CONTENT = frozenset(
    ("content", "value", "text", "message", "tool_calls", "function_call", *MEDIA, *THOUGHTS)
)
"""The same for the keys of a turn."""
NAMES = (
    "messages",
    "prompt",
    "context",
    "response",
    "chosen",
    "rejected",
    "system",
    "history",
    "tools",
    "label",
)
"""The values of a record that the user can map to keys."""
TURN_NAMES = ("role", "content")
"""The same for a turn."""
SPEAKER_NAMES = ("user", "assistant", "tool")
"""Roles for which the user can name the speaker, as in user=Customer."""
KEYS_HELP = "Chat, preference: names of the record's keys, e.g. prompt=question,response=answer."
KEYS_METAVAR = "NAME=KEY,..."


@dataclass(frozen=True)
class KeyMap:
    """The user's names for keys: (headway's name, the record's key).

    An empty key means: ignore the name.
    """

    pairs: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(mapping: Mapping[str, str | None] | None, where: str = "keys") -> KeyMap:
        """A checked mapping; `where` names it in errors."""
        # A tuple of pairs, because a KeyMap is part of the repr that cache keys are made of.
        pairs = tuple((name, key or "") for name, key in (mapping or {}).items())
        for name, key in pairs:
            if key and name not in (*NAMES, *TURN_NAMES, *SPEAKER_NAMES):
                known = ", ".join((*NAMES, *TURN_NAMES, *SPEAKER_NAMES))
                raise ConfigError(
                    f"{where} names {name!r}, which is not one of {known}; write NAME=KEY, KEY "
                    "being the record's."
                )

        return KeyMap(pairs)

    @staticmethod
    def parse(text: str | None) -> KeyMap:
        """`prompt=question,response=answer` from the command line."""
        if not text:
            return KeyMap()
        mapping: dict[str, str | None] = {}
        for part in text.split(","):
            name, equals, key = (side.strip() for side in part.partition("="))
            if not equals or not name or name in mapping:
                raise ConfigError(
                    f"--keys is {text!r}; write NAME=KEY pairs, each name once, as in "
                    "prompt=question,response=answer."
                )

            mapping[name] = key

        return KeyMap.of(mapping, "--keys")

    @property
    def names(self) -> dict[str, str]:
        """Headway's names of values -> the record's keys."""
        return {name: key for name, key in self.pairs if key and name in NAMES}

    @property
    def ignored(self) -> frozenset[str]:
        """Keys of records and turns that are ignored on purpose."""
        return frozenset(name for name, key in self.pairs if not key)

    def turn_key(self, name: str) -> str | None:
        """The key of a turn that holds its speaker (`role`) or text (`content`), if the user
        names one.
        """
        return next((key for known, key in self.pairs if known == name and key), None)

    @property
    def speakers(self) -> dict[str, str]:
        """Names of speakers in the data, in lower case -> role."""
        return {key.lower(): name for name, key in self.pairs if key and name in SPEAKER_NAMES}


class Fields:
    """A record's values by headway's names; keeps track of which were read."""

    def __init__(self, record: Record, keys: KeyMap) -> None:
        self.place = record.place
        self.keys = ", ".join(map(str, record.data)) or "none"
        """The keys of the record, for messages."""
        self._values: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        """Values that no name gives access to: they are unread in any case."""
        self._read: set[str] = set()

        # First the values that the user maps.
        names = keys.names
        for name, key in names.items():
            value = look_up(record.data, key.removesuffix("?"))
            if value is MISSING and not key.endswith("?"):
                raise DataError(
                    f"{self.place}: no key {key!r}, which keys give for {name}; its keys are "
                    f"{self.keys}."
                )

            self._values[name] = None if value is MISSING else value

        # Then the others under their own keys. A record whose shape the user maps is not also read
        # by headway's names for shapes: such keys are left, and refused if they hold content.
        mapped = {key.removesuffix("?") for key in names.values()}
        has_main = not MAIN.isdisjoint(names)
        for key, value in record.data.items():
            if key in mapped or key in keys.ignored:
                continue

            inner = [path for path in mapped if path.startswith(f"{key}.")]
            # Of an object into which a path goes, the other entries are left.
            if inner and isinstance(value, dict):
                nested = cast(dict[str, Any], value)
                self._left |= {
                    f"{key}.{sub_key}": sub_value
                    for sub_key, sub_value in nested.items()
                    if not any(p.startswith(f"{key}.{sub_key}") for p in inner)
                }
            elif key in names or (has_main and key in MAIN):
                self._left[key] = value
            else:
                self._values[key] = value

    def first(self, names: Iterable[str]) -> str | None:
        """The first name with a value that is not empty, else the first name with a value."""
        present = [name for name in names if self._values.get(name) is not None]
        for name in present:
            if not is_empty(self._values[name]):
                return name

        # All are empty: the caller then says which value is empty, not that it is missing.
        if present:
            return present[0]
        return None

    def peek(self, name: str) -> Any:
        """A value, without marking it as read; None if missing."""
        return self._values.get(name)

    def take(self, name: str | None) -> Any:
        """A value, marked as read; None if missing."""
        if name is None:
            return None
        self._read.add(name)
        return self._values.get(name)

    def unread(self, texts: set[str]) -> list[str]:
        """The unread keys; refused if one carries content that is not among the texts that were
        read.
        """
        unread_values = self._left | {
            name: value for name, value in self._values.items() if name not in self._read
        }
        unread_keys = [key for key, value in unread_values.items() if not is_empty(value)]
        for key in unread_keys:
            # Losing content silently would train on half of a conversation.
            if key in CONTENT and not _repeats(unread_values[key], texts):
                raise DataError(f"{self.place}: {_refusal(key, self.keys)}")

        return unread_keys


def _refusal(key: str, keys: str) -> str:
    """What to do about a key with content that is not read."""
    ignore = f"or ignore it with --keys {key}=."
    if key in PAIR:
        return (
            f"{key} is not part of a conversation: set kind: preference (--kind preference), "
            f"{ignore}"
        )

    if key in MEDIA:
        return (
            f"{key} is not text, and chat data holds text only: set kind: multimodal (--kind "
            f"multimodal), {ignore}"
        )

    remedy = (
        "name the keys, as in --keys prompt=KEY,response=KEY (in a recipe keys: {prompt: KEY, ...})"
    )
    return (
        f"{key} carries content that is not read in a record with the keys {keys}; {remedy}, "
        f"{ignore}"
    )


def is_empty(value: Any) -> bool:
    """Whether a value is null or an empty text, list or object."""
    return (
        value is None
        or (isinstance(value, str) and not value.strip())
        or (isinstance(value, (list, dict)) and not value)
    )


def _repeats(value: Any, texts: set[str]) -> bool:
    """Whether every text in a value was read; names of speakers do not count.

    Some sets hold a conversation twice, in two shapes. Reading one of them loses nothing.
    """
    if isinstance(value, str):
        return not value.strip() or value.strip() in texts
    if isinstance(value, list):
        return all(_repeats(item, texts) for item in cast(list[Any], value))

    if isinstance(value, dict):
        return all(
            key in ("role", "from") or _repeats(item, texts)
            for key, item in cast(dict[str, Any], value).items()
        )

    return value is None or isinstance(value, (bool, int, float))
