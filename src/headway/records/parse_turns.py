"""Turns of a conversation in any known spelling, tool calls and tool definitions, as `Turn`s.

    lists      {from, value} | {role, content (text or parts), tool_calls, function_call}
               | {input, output} | {human, assistant} | ...
    hh-rlhf    "\\n\\nHuman: Hi\\n\\nAssistant: Hello"
    BELLE      "Human:Hi\\nAssistant:Hello\\nHuman:Bye\\nAssistant:"    (answer under another key)
    MOSS       "[Human]: Hi<eoh>\\n[MOSS]: Hello<eoa>"
               or chat: {turn_1: {Human: "<|Human|>: Hi<eoh>\\n", MOSS: "..."}, turn_2: ...}

A missing value or one of another type is a DataError. Invariant: each key of a turn is read,
reported in `TurnReader.unread`, or refused because it carries content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, cast

from headway.errors import DataError
from headway.text.record_keys import THOUGHTS, TURN_CONTENT, KeyMap, is_empty
from headway.tokenizer.chat_template import Call, Role, Turn

SPOKEN: dict[str, Role] = {"Human": "user", "Assistant": "assistant", "MOSS": "assistant"}
"""Speakers in texts of hh-rlhf, BELLE and MOSS."""
MOSS_MARK = re.compile(r"(?:\[([A-Za-z ]+)\]|<\|([A-Za-z ]+)\|>):[ \t]*")
"""`[Human]: ` or `<|Human|>: `, which begins what a speaker says."""
MOSS_END = re.compile(r"<eo[a-z]>\s*$")
"""`<eoh>`, `<eom>`, ...: the end of what a speaker says, which the chat template writes anew."""
MOSS_NOTHING = ("", "None")
"""What MOSS writes for a plugin that was not used."""
MOSS_PLUGINS = "Inner Thoughts=,Commands=,Tool Responses=,Results="
"""The parts of a round that plugins write, as `--keys` ignores them."""
SPEAKERS: dict[str, Role] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "bot", "chatgpt", "model", "moss", "function_call"), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
}
"""Names of speakers in lower case -> role."""
ROUNDS = (
    ("input", "output"),
    ("human", "assistant"),
    ("user", "assistant"),
    ("question", "answer"),
    ("prompt", "response"),
    ("query", "response"),
    ("instruction", "output"),
)
"""Keys of a question and its answer in one object."""
WEIGHTS = ("loss_weight", "weight", "loss", "train")
"""Keys of a turn that switch its loss on or off, in the words of several systems."""
Object = Mapping[str, Any]


class Transcript(NamedTuple):
    """The turns of a text."""

    turns: list[Turn]
    is_open: bool
    """The text ends with `Assistant:`, and the answer is missing (it is under another key)."""


def transcript_of(text: str) -> Transcript | None:
    """The turns of a text in which `Human:` and `Assistant:` begin paragraphs (or lines); None
    for any other text.
    """
    stripped = text.lstrip()
    if not stripped.startswith("Human:"):
        return None

    # hh-rlhf separates turns by blank lines. Then a line in an answer may begin with "Human:" and
    # is no turn. BELLE separates turns by single line breaks.
    breaks = r"(?:^|\n\n)" if "\n\nAssistant:" in stripped else r"(?:^|\n)"
    parts = re.split(rf"{breaks}(Human|Assistant):", stripped)[1:]
    turns = [
        Turn(SPOKEN[speaker], said.strip())
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]

    # A text that merely begins with "Human:" is no transcript.
    if all(turn.role == "user" for turn in turns):
        return None

    is_open = turns[-1].role == "assistant" and not turns[-1].content
    if is_open:
        turns.pop()
    return Transcript(turns, is_open)


def moss_text(content: Any, where: str, ignored: Collection[str] = ()) -> list[Turn]:
    """The turns of MOSS's plain text; `ignored` speakers are left out."""
    if not isinstance(content, str):
        raise DataError(
            f"{where} is of type {type(content).__name__}; a text with [Human]: and [MOSS]: is "
            "expected."
        )

    marks = list(MOSS_MARK.finditer(content))
    if not marks or content[: marks[0].start()].strip():
        raise DataError(
            f"{where} must begin with [Human]: or <|Human|>:, as MOSS writes conversations."
        )

    # Each speaker says what stands between his mark and the next one.
    stops = [mark.start() for mark in marks[1:]] + [len(content)]
    turns: list[Turn] = []
    for mark, stop in zip(marks, stops, strict=True):
        speaker = mark[1] or mark[2]
        turns += _moss_turn(speaker, content[mark.end() : stop], where, ignored)

    return turns


def moss_chat(content: Any, where: str, ignored: Collection[str] = ()) -> list[Turn]:
    """The turns of MOSS's `chat` object: turn_1, turn_2 and so on; `ignored` speakers are left
    out.
    """
    if not isinstance(content, dict) or not all(
        isinstance(round_, dict) for round_ in cast(dict[str, Any], content).values()
    ):
        raise DataError(
            f"{where} must be an object of turns, as in {{'turn_1': {{'Human': '...', 'MOSS': "
            f"'...'}}}}."
        )

    # By number: the order of keys is that of some JSON writer, and turn_10 sorts before turn_2.
    rounds = sorted(
        cast(dict[str, Any], content).items(), key=lambda item: _round_number(item[0], where)
    )
    turns: list[Turn] = []
    for name, round_ in rounds:
        turns += _moss_round(round_, f"{where}.{name}", ignored)

    return turns


def _round_number(name: str, where: str) -> int:
    """3 of `turn_3`."""
    match = re.fullmatch(r"turn_(\d{1,9})", name)
    if match is None:
        raise DataError(f"{where}: {name!r} is not a turn; turn_1, turn_2 and so on are expected.")
    return int(match[1])


def _moss_round(round_: Mapping[str, Any], where: str, ignored: Collection[str]) -> list[Turn]:
    """The turns of one round: {Human: text, MOSS: text, and what plugins wrote}."""
    turns: list[Turn] = []
    for speaker, text in round_.items():
        if not isinstance(text, str):
            raise DataError(
                f"{where}.{speaker} is of type {type(text).__name__}; a text is expected."
            )

        # The key already names the speaker; some releases repeat it in the text.
        mark = MOSS_MARK.match(text)
        if mark is not None:
            text = text[mark.end() :]
        turns += _moss_turn(speaker, text, where, ignored)

    return turns


def _moss_turn(speaker: str, text: str, where: str, ignored: Collection[str]) -> list[Turn]:
    """One turn; none for a plugin that was not used or that the user ignores."""
    said = MOSS_END.sub("", text).strip()
    if speaker in SPOKEN:
        return [Turn(SPOKEN[speaker], said)]
    if said in MOSS_NOTHING or speaker in ignored:
        return []

    raise DataError(
        f"{where}: {speaker} holds {said[:40]!r}; MOSS's plugins (thoughts, commands, results) "
        "are not supported. Leave such records out with --drop-bad (in a recipe drop_bad: true), "
        f"or learn the answers alone with --keys '{MOSS_PLUGINS}'."
    )


class TurnReader:
    """Reads lists of turns in all spellings; use one for each record."""

    def __init__(self, keys: KeyMap = KeyMap()) -> None:
        self.keys = keys
        self.unread: dict[str, None] = {}
        """The unread keys of turns, as `messages[].name`, in the order they were met."""
        self._speakers: dict[str, Role] = {**SPEAKERS, **cast(dict[str, Role], keys.speakers)}

    def turns(self, listed: Any, where: str) -> list[Turn]:
        """The turns of a list of objects."""
        if not isinstance(listed, list) or not listed:
            raise DataError(f"{where} must be a list of turns.")

        turns: list[Turn] = []
        for number, entry in enumerate(cast(list[Any], listed)):
            if not isinstance(entry, dict):
                raise DataError(
                    f"{where}[{number}] must be an object, as in {{'role': 'user', 'content': "
                    f"'...'}}."
                )

            turns += self._turn(cast(dict[str, Any], entry), f"{where}[{number}]")

        return turns

    def history(self, content: Any, where: str) -> list[Turn]:
        """Earlier rounds: [[question, answer], ...], or turns."""
        if is_empty(content):
            return []
        if isinstance(content, list) and isinstance(cast(list[Any], content)[0], dict):
            return self.turns(content, where)

        rounds: list[Any] = [content]
        if isinstance(content, list):
            rounds = cast(list[Any], content)

        turns: list[Turn] = []
        for number, pair in enumerate(rounds):
            if not isinstance(pair, list) or len(cast(list[Any], pair)) != 2:
                raise DataError(f"{where}[{number}] must be [question, answer].")

            question, answer = cast(list[Any], pair)
            turns += [
                make_turn("user", question, f"{where}[{number}]"),
                make_turn("assistant", answer, f"{where}[{number}]"),
            ]

        return turns

    def _turn(self, entry: Object, where: str) -> list[Turn]:
        """One turn, or the two turns of a question and its answer in one object."""
        round_keys = next(
            (
                pair
                for pair in ROUNDS
                if entry.get(pair[0]) is not None and entry.get(pair[1]) is not None
            ),
            None,
        )

        # An object with a speaker is a single turn, even if it also has, say, `input` and `output`.
        if round_keys is not None and "role" not in entry and "from" not in entry:
            pair = [
                make_turn("user", entry[round_keys[0]], f"{where}.{round_keys[0]}"),
                make_turn("assistant", entry[round_keys[1]], f"{where}.{round_keys[1]}"),
            ]
            self._check_unread(entry, {*round_keys, "system"}, where)
            return with_system(pair, entry.get("system"), where)

        # ShareGPT's names or OpenAI's, unless the user names the keys.
        if "from" in entry:
            speaker_key = "from"
            content_key = "value"
        else:
            speaker_key = "role"
            content_key = "content"

        speaker_key = self.keys.turn_key("role") or speaker_key
        content_key = self.keys.turn_key("content") or content_key
        if speaker_key not in entry:
            raise DataError(
                f"{where} has no speaker ('role' or 'from'); its keys are {_keys(entry)}."
            )

        speaker = str(entry[speaker_key]).lower()
        if speaker not in self._speakers:
            raise DataError(
                f"{where}: {speaker_key} is {entry[speaker_key]!r}; it must be one of "
                f"{', '.join(SPEAKERS)}, or named as in --keys user=NAME,assistant=NAME."
            )

        # Some sets mix the two: {role, value} or {from, content}.
        if content_key not in entry:
            content_key = next((key for key in ("content", "value") if key in entry), content_key)

        content = entry.get(content_key)
        role = self._speakers[speaker]
        calls = _calls(entry.get("tool_calls"), where) or _calls(entry.get("function_call"), where)
        if content is None and not calls:
            raise DataError(f"{where} has no {content_key!r}; its keys are {_keys(entry)}.")

        text = ""
        if content is not None:
            text = text_of(content, f"{where}.{content_key}")

        # ShareGPT writes a call as a turn of the speaker `function_call` whose text is JSON.
        if speaker == "function_call" and not calls:
            calls = _calls_in(text)
            if calls:
                text = ""

        if calls and role != "assistant":
            raise DataError(f"{where}: a {role} turn calls tools; only the assistant's turns do.")

        self._check_unread(
            entry, {speaker_key, content_key, "tool_calls", "function_call", *WEIGHTS}, where
        )
        if not is_empty(entry.get("tool_calls")) and not is_empty(entry.get("function_call")):
            raise DataError(f"{where} has both tool_calls and function_call; keep one.")

        return [Turn(role, text, calls=calls, learn=_carries_loss(entry, role, where))]

    def _check_unread(self, entry: Object, read: set[str], where: str) -> None:
        """Refuse content under a key that was not read; note other unread keys.

        A value that repeats a text that was read loses nothing.
        """
        texts = [entry[key] for key in read if isinstance(entry.get(key), str)]
        for key, value in entry.items():
            if key in read or key in self.keys.ignored or is_empty(value) or value in texts:
                continue

            if key in THOUGHTS:
                raise DataError(
                    f"{where}: {key} is not a field of a turn; write it into the content, as in "
                    "<think>...</think>."
                )

            if key in TURN_CONTENT:
                raise DataError(
                    f"{where}: {key} carries content that is not read; ignore it with --keys "
                    f"{key}=."
                )

            # "data.jsonl:3: messages[4]" becomes "messages": one name for this key of all turns.
            list_name = where.rpartition(": ")[2].partition("[")[0]
            self.unread[f"{list_name}[].{key}"] = None


def _carries_loss(entry: Object, role: Role, where: str) -> bool:
    """`Turn.learn`: true unless a turn of the assistant has a loss weight of 0.

    Weights between 0 and 1 are refused, because a loss mask has no place for them.
    """
    key = next((key for key in WEIGHTS if entry.get(key) is not None), None)
    if key is None:
        return True
    if entry[key] not in (0, 1):
        raise DataError(f"{where}: {key} is {entry[key]!r}; it must be 0 or 1.")

    if entry[key] == 1 and role != "assistant":
        raise DataError(
            f"{where}: {key} is 1 for a {role} turn; only the assistant's turns carry loss."
        )

    return role != "assistant" or entry[key] == 1


def _calls(content: Any, where: str) -> tuple[Call, ...]:
    """The tool calls of a turn, from `tool_calls` (a list) or `function_call` (one object)."""
    calls: list[Call] = []
    for entry in _entries(content):
        # OpenAI wraps a call: {"type": "function", "function": {"name": ..., "arguments": ...}}.
        function: Any = None
        if isinstance(entry, dict):
            function = cast(dict[str, Any], entry).get("function", entry)
        if not isinstance(function, dict) or "name" not in function:
            raise DataError(f"{where}: each of tool_calls must name a function.")

        named = cast(dict[str, Any], function)
        arguments = named.get("arguments", named.get("parameters", {}))
        # OpenAI writes the arguments as JSON in a text. Templates want the object.
        if isinstance(arguments, str):
            arguments = parse_json(arguments)
        calls.append(Call(str(named["name"]), arguments))

    return tuple(calls)


def _entries(content: Any) -> list[Any]:
    """The entries of a list, of one object, or of either as JSON in a text."""
    value = content
    if isinstance(content, str):
        value = parse_json(content)
    if is_empty(value):
        return []

    if isinstance(value, list):
        return cast(list[Any], value)
    return [value]


def _calls_in(text: str) -> tuple[Call, ...]:
    """The calls in a function_call turn written as JSON; none if it is written otherwise (then
    it stays text).
    """
    entries = _entries(text)
    if not all(
        isinstance(entry, dict) and isinstance(cast(dict[str, Any], entry).get("name"), str)
        for entry in entries
    ):
        return ()

    return _calls(entries, "")


def tools_of(content: Any, place: str) -> tuple[Object, ...]:
    """Tool definitions: a list of objects, one object, or either as JSON in a text."""
    entries = _entries(content)
    if not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f"{place}: tools must be a list of JSON objects.")
    return tuple(cast(list[Object], entries))


def parse_json(text: str) -> Any:
    """A text parsed as JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def with_system(turns: list[Turn], system: Any, place: str) -> list[Turn]:
    """The turns with the system prompt, if any, in front; one that repeats the first turn is
    dropped.
    """
    if is_empty(system):
        return turns

    text = text_of(system, f"{place}: system")
    if turns and turns[0].role == "system":
        if turns[0].content.strip() == text.strip():
            return turns

        raise DataError(
            f"{place}: two system prompts, one under 'system' and one as the first turn."
        )

    return [Turn("system", text), *turns]


def make_turn(role: Role, content: Any, where: str) -> Turn:
    """A turn with this content."""
    return Turn(role, text_of(content, where))


def text_of(content: Any, where: str) -> str:
    """The content of a turn: a text, or a list of text parts, which are joined."""
    if isinstance(content, list):
        parts: list[str] = []
        for part in cast(list[Any], content):
            kind = type(part).__name__
            text = part
            if isinstance(part, dict):
                values = cast(dict[str, Any], part)
                kind = values.get("type", "text")
                text = values.get("text", values.get("value"))

            if kind not in ("text", "str") or not isinstance(text, str):
                raise DataError(
                    f"{where}: a part of type {kind!r}; chat data holds text only. Media need "
                    "kind: multimodal."
                )

            parts.append(text)

        content = "".join(parts)

    if not isinstance(content, str):
        raise DataError(f"{where} is of type {type(content).__name__}; a text is expected.")

    # JSON may hold half of a surrogate pair, which cannot be encoded as UTF-8. The tokenizer would
    # fail on it later, without file and line. ASCII is checked first because it is far cheaper.
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has a lone surrogate at character {error.start}, which is not valid "
                "Unicode."
            ) from None

    return content


def _keys(data: Object) -> str:
    return ", ".join(map(str, data)) or "none"
