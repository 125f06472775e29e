"""Turns of a conversation in any known spelling, tool calls and tool definitions, as `Turn`s.

    lists         {from, value} | {role, content (text or parts), tool_calls, function_call} | {input, output} | {human, assistant} | ...
    hh-rlhf       "\\n\\nHuman: Hi\\n\\nAssistant: Hello"
    BELLE         "Human:Hi\\nAssistant:Hello\\nHuman:Bye\\nAssistant:"      the answer is under another key
    MOSS          "[Human]: Hi<eoh>\\n[MOSS]: Hello<eoa>", or chat: {turn_1: {Human: "<|Human|>: Hi<eoh>\\n", MOSS: "..."}, turn_2: ...}

A missing value or one of another type is a DataError. Invariant: each key of a turn is read, reported in `TurnReader.unread`, or refused
because it carries content.
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
MOSS_MARK = re.compile(r"(?:\[([A-Za-z ]+)\]|<\|([A-Za-z ]+)\|>):[ \t]*")
MOSS_END = re.compile(r"<eo[a-z]>\s*$")
MOSS_NOTHING = ("", "None")
MOSS_PLUGINS = "Inner Thoughts=,Commands=,Tool Responses=,Results="
"""The parts of a round that plugins write, as `--keys` ignores them."""


class Transcript(NamedTuple):
    """Turns; `is_open`: the last speaker is the assistant, whose answer is missing."""

    turns: list[Turn]
    is_open: bool


def transcript_of(text: str) -> Transcript | None:
    """The turns of a text in which `Human:` and `Assistant:` begin paragraphs (or lines); None for any other text."""
    begun = text.lstrip()
    if not begun.startswith("Human:"):
        return None
    breaks = r"(?:^|\n\n)" if "\n\nAssistant:" in begun else r"(?:^|\n)"
    parts = re.split(rf"{breaks}(Human|Assistant):", begun)[1:]
    turns = [
        Turn(SPOKEN[speaker], said.strip())
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    ]
    if all(turn.role == "user" for turn in turns):
        return None
    is_open = turns[-1].role == "assistant" and not turns[-1].content
    return Transcript(turns[:-1] if is_open else turns, is_open)


def moss_text(given: Any, where: str, ignored: Collection[str] = ()) -> list[Turn]:
    """The turns of MOSS's plain text; `ignored` speakers are left out."""
    if not isinstance(given, str):
        raise DataError(
            f"{where} is of type {type(given).__name__}; a text with [Human]: and [MOSS]: is expected."
        )
    marks = list(MOSS_MARK.finditer(given))
    if not marks or given[: marks[0].start()].strip():
        raise DataError(
            f"{where} must begin with [Human]: or <|Human|>:, as MOSS writes conversations."
        )
    stops = [mark.start() for mark in marks[1:]] + [len(given)]
    said = [
        (mark[1] or mark[2], given[mark.end() : stop])
        for mark, stop in zip(marks, stops, strict=True)
    ]
    return [turn for speaker, text in said for turn in _moss_turn(speaker, text, where, ignored)]


def moss_chat(given: Any, where: str, ignored: Collection[str] = ()) -> list[Turn]:
    """The turns of MOSS's `chat` object: turn_1, turn_2 and so on; `ignored` speakers are left out."""
    if not isinstance(given, dict) or not all(
        isinstance(one, dict) for one in cast(dict[str, Any], given).values()
    ):
        raise DataError(
            f"{where} must be an object of turns, as in {{'turn_1': {{'Human': '...', 'MOSS': '...'}}}}."
        )
    turns: list[Turn] = []
    for name, one in sorted(
        cast(dict[str, Any], given).items(), key=lambda item: _number(item[0], where)
    ):
        turns += _moss_round(one, f"{where}.{name}", ignored)
    return turns


def _number(name: str, where: str) -> int:
    found = re.fullmatch(r"turn_(\d{1,9})", name)
    if found is None:
        raise DataError(f"{where}: {name!r} is not a turn; turn_1, turn_2 and so on are expected.")
    return int(found[1])


def _moss_round(one: Mapping[str, Any], where: str, ignored: Collection[str]) -> list[Turn]:
    turns: list[Turn] = []
    for speaker, text in one.items():
        if not isinstance(text, str):
            raise DataError(
                f"{where}.{speaker} is of type {type(text).__name__}; a text is expected."
            )
        mark = MOSS_MARK.match(text)
        turns += _moss_turn(speaker, text[mark.end() :] if mark else text, where, ignored)
    return turns


def _moss_turn(speaker: str, text: str, where: str, ignored: Collection[str]) -> list[Turn]:
    said = MOSS_END.sub("", text).strip()
    if speaker in SPOKEN:
        return [Turn(SPOKEN[speaker], said)]
    if said in MOSS_NOTHING or speaker in ignored:
        return []
    raise DataError(
        f"{where}: {speaker} holds {said[:40]!r}; MOSS's plugins (thoughts, commands, results) are not supported. Leave such records out "
        f"with --drop-bad (in a recipe drop_bad: true), or learn the answers alone with --keys '{MOSS_PLUGINS}'."
    )


SPEAKERS: dict[str, Role] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(
        ("assistant", "gpt", "bot", "chatgpt", "model", "moss", "function_call"), "assistant"
    ),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
}
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
Object = Mapping[str, Any]


class TurnReader:
    """Reads lists of turns; `unread` names the unread keys of turns."""

    def __init__(self, keys: KeyMap = KeyMap()) -> None:
        self.keys = keys
        self.unread: dict[str, None] = {}
        self._speakers: dict[str, Role] = {**SPEAKERS, **cast(dict[str, Role], keys.speakers)}

    def turns(self, listed: Any, where: str) -> list[Turn]:
        """The turns of a list of objects."""
        if not isinstance(listed, list) or not listed:
            raise DataError(f"{where} must be a list of turns.")
        turns: list[Turn] = []
        for number, one in enumerate(cast(list[Any], listed)):
            if not isinstance(one, dict):
                raise DataError(
                    f"{where}[{number}] must be an object, as in {{'role': 'user', 'content': '...'}}."
                )
            turns += self._turn(cast(dict[str, Any], one), f"{where}[{number}]")
        return turns

    def history(self, given: Any, where: str) -> list[Turn]:
        """Earlier rounds: [[question, answer], ...], or turns."""
        if is_empty(given):
            return []
        if isinstance(given, list) and isinstance(cast(list[Any], given)[0], dict):
            return self.turns(given, where)
        turns: list[Turn] = []
        for number, pair in enumerate(
            cast(list[Any], given) if isinstance(given, list) else [given]
        ):
            if not isinstance(pair, list) or len(cast(list[Any], pair)) != 2:
                raise DataError(f"{where}[{number}] must be [question, answer].")
            question, answer = cast(list[Any], pair)
            turns += [
                make_turn("user", question, f"{where}[{number}]"),
                make_turn("assistant", answer, f"{where}[{number}]"),
            ]
        return turns

    def _turn(self, one: Object, where: str) -> list[Turn]:
        found = next(
            (
                pair
                for pair in ROUNDS
                if one.get(pair[0]) is not None and one.get(pair[1]) is not None
            ),
            None,
        )
        if found is not None and "role" not in one and "from" not in one:
            pair = [
                make_turn("user", one[found[0]], f"{where}.{found[0]}"),
                make_turn("assistant", one[found[1]], f"{where}.{found[1]}"),
            ]
            self._check_unread(one, {*found, "system"}, where)
            return with_system(pair, one.get("system"), where)
        speaker_key, content_key = ("from", "value") if "from" in one else ("role", "content")
        speaker_key, content_key = (
            self.keys.turn_key("role") or speaker_key,
            self.keys.turn_key("content") or content_key,
        )
        if speaker_key not in one:
            raise DataError(
                f"{where} has no speaker ('role' or 'from'); its keys are {_keys(one)}."
            )
        speaker = str(one[speaker_key]).lower()
        if speaker not in self._speakers:
            raise DataError(
                f"{where}: {speaker_key} is {one[speaker_key]!r}; it must be one of {', '.join(SPEAKERS)}, "
                "or named as in --keys user=NAME,assistant=NAME."
            )
        if content_key not in one:
            content_key = next((key for key in ("content", "value") if key in one), content_key)
        content, role = one.get(content_key), self._speakers[speaker]
        calls = _calls(one.get("tool_calls"), where) or _calls(one.get("function_call"), where)
        if content is None and not calls:
            raise DataError(f"{where} has no {content_key!r}; its keys are {_keys(one)}.")
        text = "" if content is None else text_of(content, f"{where}.{content_key}")
        if speaker == "function_call" and not calls:
            calls = _calls_in(text)
            text = "" if calls else text
        if calls and role != "assistant":
            raise DataError(f"{where}: a {role} turn calls tools; only the assistant's turns do.")
        self._check_unread(
            one, {speaker_key, content_key, "tool_calls", "function_call", *WEIGHTS}, where
        )
        if is_empty(one.get("tool_calls")) or is_empty(one.get("function_call")):
            return [Turn(role, text, calls=calls, learn=_carries_loss(one, role, where))]
        raise DataError(f"{where} has both tool_calls and function_call; keep one.")

    def _check_unread(self, one: Object, read: set[str], where: str) -> None:
        texts = [one[key] for key in read if isinstance(one.get(key), str)]
        for key, value in one.items():
            if key in read or key in self.keys.ignored or is_empty(value) or value in texts:
                continue
            if key in THOUGHTS:
                raise DataError(
                    f"{where}: {key} is not a field of a turn; write it into the content, as in <think>...</think>."
                )
            if key in TURN_CONTENT:
                raise DataError(
                    f"{where}: {key} carries content that is not read; ignore it with --keys {key}=."
                )
            self.unread[f"{where.rpartition(': ')[2].partition('[')[0]}[].{key}"] = None


def _carries_loss(one: Object, role: Role, where: str) -> bool:
    key = next((key for key in WEIGHTS if one.get(key) is not None), None)
    if key is None:
        return True
    if one[key] not in (0, 1):
        raise DataError(f"{where}: {key} is {one[key]!r}; it must be 0 or 1.")
    if one[key] == 1 and role != "assistant":
        raise DataError(
            f"{where}: {key} is 1 for a {role} turn; only the assistant's turns carry loss."
        )
    return role != "assistant" or one[key] == 1


def _calls(given: Any, where: str) -> tuple[Call, ...]:
    found = parse_json(given) if isinstance(given, str) else given
    if is_empty(found):
        return ()
    calls: list[Call] = []
    for one in cast(list[Any], found) if isinstance(found, list) else [found]:
        function: Any = (
            cast(dict[str, Any], one).get("function", one) if isinstance(one, dict) else None
        )
        if not isinstance(function, dict) or "name" not in function:
            raise DataError(f"{where}: each of tool_calls must name a function.")
        named = cast(dict[str, Any], function)
        arguments = named.get("arguments", named.get("parameters", {}))
        calls.append(
            Call(
                str(named["name"]),
                parse_json(arguments) if isinstance(arguments, str) else arguments,
            )
        )
    return tuple(calls)


def _calls_in(text: str) -> tuple[Call, ...]:
    """The calls in a function_call turn written as JSON; none if it is written otherwise (then it stays text)."""
    found = parse_json(text)
    listed = cast(list[Any], found) if isinstance(found, list) else [found]
    if not listed or not all(
        isinstance(one, dict) and isinstance(cast(dict[str, Any], one).get("name"), str)
        for one in listed
    ):
        return ()
    return _calls(listed, "")


def tools_of(given: Any, place: str) -> tuple[Object, ...]:
    """Tool definitions: a list of objects, one object, or either as JSON in a text."""
    found = parse_json(given) if isinstance(given, str) else given
    if is_empty(found):
        return ()
    listed = cast(list[Any], found) if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) for one in listed):
        raise DataError(f"{place}: tools must be a list of JSON objects.")
    return tuple(cast(list[Object], listed))


def parse_json(text: str) -> Any:
    """A text parsed as JSON; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def with_system(turns: list[Turn], system: Any, place: str) -> list[Turn]:
    """The turns with the system prompt, if any, in front."""
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
            kind = (
                cast(dict[str, Any], part).get("type", "text")
                if isinstance(part, dict)
                else type(part).__name__
            )
            text = (
                cast(dict[str, Any], part).get("text", cast(dict[str, Any], part).get("value"))
                if isinstance(part, dict)
                else part
            )
            if kind not in ("text", "str") or not isinstance(text, str):
                raise DataError(
                    f"{where}: a part of type {kind!r}; chat data holds text only. Media need kind: multimodal."
                )
            parts.append(text)
        content = "".join(parts)
    if not isinstance(content, str):
        raise DataError(f"{where} is of type {type(content).__name__}; a text is expected.")
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where} has a lone surrogate at character {error.start}, which is not valid Unicode."
            ) from None
    return content


def _keys(data: Object) -> str:
    return ", ".join(map(str, data)) or "none"
