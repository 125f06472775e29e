"""Conversations that lie in one text, or under numbered keys, as turns.

    hh-rlhf     "\\n\\nHuman: Hi\\n\\nAssistant: Hello"
    BELLE       "Human:Hi\\nAssistant:Hello\\nHuman:Bye\\nAssistant:"      the answer comes under another key
    MOSS        "[Human]: Hi<eoh>\\n[MOSS]: Hello<eoa>", or chat: {turn_1: {Human: "<|Human|>: Hi<eoh>\\n", MOSS: "..."}, turn_2: ...}

In: a text or an object. Out: turns, and whether an answer is yet to come. A text in none of these forms is no transcript (None).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from headway.errors import DataError
from headway.tokenizer.chat_template import Role, Turn

SPOKEN: dict[str, Role] = {"Human": "user", "Assistant": "assistant", "MOSS": "assistant"}
MOSS_MARK = re.compile(r"(?:\[([A-Za-z ]+)\]|<\|([A-Za-z ]+)\|>):[ \t]*")
MOSS_END = re.compile(r"<eo[a-z]>\s*$")
MOSS_NOTHING = ("", "None")


class Transcript(NamedTuple):
    """Turns; `is_open`: the last speaker is the assistant, who has said nothing yet."""

    turns: list[Turn]
    is_open: bool


def transcript_of(text: str) -> Transcript | None:
    """The turns of a text in which `Human:` and `Assistant:` begin paragraphs (or lines); None for any other text."""
    begun = text.lstrip()
    if not begun.startswith("Human:"):
        return None
    breaks = r"(?:^|\n\n)" if "\n\nAssistant:" in begun else r"(?:^|\n)"
    parts = re.split(rf"{breaks}(Human|Assistant):", begun)[1:]
    turns = [Turn(SPOKEN[speaker], said.strip()) for speaker, said in zip(parts[::2], parts[1::2], strict=True)]
    if all(turn.role == "user" for turn in turns):
        return None
    is_open = turns[-1].role == "assistant" and not turns[-1].content
    return Transcript(turns[:-1] if is_open else turns, is_open)


def moss_text(given: Any, where: str) -> list[Turn]:
    """The turns of MOSS's plain text."""
    if not isinstance(given, str):
        raise DataError(f"{where} is of type {type(given).__name__}; a text with [Human]: and [MOSS]: is expected.")
    marks = list(MOSS_MARK.finditer(given))
    if not marks or given[: marks[0].start()].strip():
        raise DataError(f"{where} must begin with [Human]: or <|Human|>:, as MOSS writes conversations.")
    stops = [mark.start() for mark in marks[1:]] + [len(given)]
    said = [(mark[1] or mark[2], given[mark.end() : stop]) for mark, stop in zip(marks, stops, strict=True)]
    return [turn for speaker, text in said for turn in _moss_turn(speaker, text, where)]


def moss_chat(given: Any, where: str) -> list[Turn]:
    """The turns of MOSS's `chat` object: turn_1, turn_2 and so on."""
    if not isinstance(given, dict) or not all(isinstance(one, dict) for one in cast(dict[str, Any], given).values()):
        raise DataError(f"{where} must be an object of turns, as in {{'turn_1': {{'Human': '...', 'MOSS': '...'}}}}.")
    turns: list[Turn] = []
    for name, one in sorted(cast(dict[str, Any], given).items(), key=lambda item: _number(item[0], where)):
        turns += _moss_round(one, f"{where}.{name}")
    return turns


def _number(name: str, where: str) -> int:
    found = re.fullmatch(r"turn_(\d{1,9})", name)
    if found is None:
        raise DataError(f"{where}: {name!r} is no turn; turn_1, turn_2 and so on are expected.")
    return int(found[1])


def _moss_round(one: Mapping[str, Any], where: str) -> list[Turn]:
    turns: list[Turn] = []
    for speaker, text in one.items():
        if not isinstance(text, str):
            raise DataError(f"{where}.{speaker} is of type {type(text).__name__}; a text is expected.")
        mark = MOSS_MARK.match(text)
        turns += _moss_turn(speaker, text[mark.end() :] if mark else text, where)
    return turns


def _moss_turn(speaker: str, text: str, where: str) -> list[Turn]:
    said = MOSS_END.sub("", text).strip()
    if speaker in SPOKEN:
        return [Turn(SPOKEN[speaker], said)]
    if said in MOSS_NOTHING:
        return []
    raise DataError(
        f"{where}: {speaker} holds {said[:40]!r}; MOSS's plugins (thoughts, commands, results) have no place in a conversation."
    )
