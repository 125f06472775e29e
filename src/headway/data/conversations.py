"""Records of chat and preference data, whatever shape they have, as turns.

    Alpaca               instruction, output (input, system, history)
    ShareGPT, zero2all   conversations: [{from, value}, ...] (system, tools)
    OpenAI               messages: [{role, content (text or parts), tool_calls}, ...]
    InternLM (xtuner)    conversation: [{input, output (system)}, ...]
    completion           prompt with completion or response
    preference           prompt, chosen, rejected as texts | chosen and rejected as whole message lists | conversations, chosen, rejected

In: a `Record`. Out: a `Conversation` or a `PreferencePair`. What is missing or of another type is a DataError with file, line and key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from headway.errors import DataError
from headway.text.document import Record
from headway.tokenizer.templates import Call, Role, Turn

SPEAKERS: dict[str, Role] = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "chatgpt", "model", "function_call"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "ipython"), "tool"),
}
SHAPES = "Alpaca (instruction, output), ShareGPT (conversations), OpenAI (messages), InternLM (conversation) or prompt with completion"
PAIR_SHAPES = "prompt, chosen and rejected; chosen and rejected as message lists; or conversations with chosen and rejected"
Object = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    """Turns, and the tools the assistant may call."""

    turns: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()


@dataclass(frozen=True)
class PreferencePair:
    """A prompt and two answers to it; each answer is the assistant's turns (more than one where tools are called between)."""

    prompt: tuple[Turn, ...]
    chosen: tuple[Turn, ...]
    rejected: tuple[Turn, ...]
    tools: tuple[Object, ...] = ()


def conversation_of(record: Record) -> Conversation:
    """The conversation of a record; at least one turn of the assistant must carry loss."""
    data, place = record.data, record.place
    listed = next((key for key in ("messages", "conversations", "conversation") if key in data), None)
    if listed is not None:
        turns = _turns(data[listed], f"{place}: {listed}")
        turns = _with_system(turns, data.get("system"), place)
    elif "instruction" in data:
        turns = _alpaca(data, place)
    elif "prompt" in data and ("completion" in data or "response" in data):
        answer = "completion" if "completion" in data else "response"
        turns = [_said("user", data["prompt"], f"{place}: prompt"), _said("assistant", data[answer], f"{place}: {answer}")]
        turns = _with_system(turns, data.get("system"), place)
    else:
        raise DataError(f"{place}: no conversation in it; its keys are {_keys(data)}. Expected {SHAPES}.")
    if not any(turn.role == "assistant" and turn.learn for turn in turns):
        raise DataError(f"{place}: no turn of the assistant to learn from.")
    _no_empty(turns, place)
    return Conversation(tuple(turns), _tools(data.get("tools"), place))


def preference_of(record: Record) -> PreferencePair:
    """The preference pair of a record; chosen and rejected must differ."""
    data, place = record.data, record.place
    missing = [key for key in ("chosen", "rejected") if key not in data]
    if missing:
        raise DataError(f"{place}: no {' and no '.join(missing)}; its keys are {_keys(data)}. Expected {PAIR_SHAPES}.")
    answers = [_answer(data[key], f"{place}: {key}") for key in ("chosen", "rejected")]
    prompt = _prompt(data, place)
    if not prompt:
        shared = _shared(*answers)
        prompt, answers = answers[0][:shared], [turns[shared:] for turns in answers]
        if not prompt:
            raise DataError(f"{place}: no prompt, and chosen and rejected share no first turns. Expected {PAIR_SHAPES}.")
    for key, turns in zip(("chosen", "rejected"), answers, strict=True):
        if not turns or turns[0].role != "assistant" or turns[-1].role != "assistant":
            raise DataError(f"{place}: {key} must be an answer of the assistant to the prompt.")
        _no_empty(turns, f"{place}: {key}")
    if answers[0] == answers[1]:
        raise DataError(f"{place}: chosen and rejected are the same.")
    if prompt[-1].role == "assistant":
        raise DataError(f"{place}: the prompt ends with the assistant; the turn to answer must come last.")
    return PreferencePair(tuple(prompt), tuple(answers[0]), tuple(answers[1]), _tools(data.get("tools"), place))


def _prompt(data: Object, place: str) -> list[Turn]:
    listed = next((key for key in ("conversations", "messages") if key in data), None)
    if listed is not None:
        turns = _turns(data[listed], f"{place}: {listed}")
    elif isinstance(data.get("prompt"), list):
        turns = _turns(data["prompt"], f"{place}: prompt")
    elif isinstance(data.get("chosen"), list):
        return []
    elif "prompt" in data or "question" in data:
        key = "prompt" if "prompt" in data else "question"
        turns = [_said("user", data[key], f"{place}: {key}")]
    elif "instruction" in data:
        turns = [_instruction(data, place)]
    else:
        raise DataError(f"{place}: no prompt; its keys are {_keys(data)}. Expected {PAIR_SHAPES}.")
    turns = _with_system(turns, data.get("system"), place)
    _no_empty(turns, place)
    return turns


def _answer(given: Any, where: str) -> list[Turn]:
    if isinstance(given, str):
        return [Turn("assistant", given)]
    return _turns(given if isinstance(given, list) else [given], where)


def _shared(one: list[Turn], other: list[Turn]) -> int:
    """How many first turns two conversations share, up to the last turn that is not the assistant's."""
    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    while count and one[count - 1].role == "assistant":
        count -= 1
    return count


def _alpaca(data: Object, place: str) -> list[Turn]:
    if "output" not in data:
        raise DataError(f"{place}: instruction without output; its keys are {_keys(data)}.")
    turns: list[Turn] = []
    for number, pair in enumerate(cast(list[Any], data.get("history") or [])):
        where = f"{place}: history[{number}]"
        if not isinstance(pair, list) or len(cast(list[Any], pair)) != 2:
            raise DataError(f"{where} must be [question, answer].")
        question, answer = cast(list[Any], pair)
        turns += [_said("user", question, where), _said("assistant", answer, where)]
    turns += [_instruction(data, place), _said("assistant", data["output"], f"{place}: output")]
    return _with_system(turns, data.get("system"), place)


def _instruction(data: Object, place: str) -> Turn:
    given = data.get("input")
    return Turn("user", _text(data["instruction"], f"{place}: instruction"), _text(given, f"{place}: input") if given else "")


def _turns(listed: Any, where: str) -> list[Turn]:
    if not isinstance(listed, list) or not listed:
        raise DataError(f"{where} must be a list of turns.")
    turns: list[Turn] = []
    for number, one in enumerate(cast(list[Any], listed)):
        if not isinstance(one, dict):
            raise DataError(f"{where}[{number}] must be an object, as in {{'role': 'user', 'content': '...'}}.")
        turns += _turn(cast(dict[str, Any], one), f"{where}[{number}]")
    return turns


def _turn(one: Object, where: str) -> list[Turn]:
    if "input" in one and "output" in one:
        pair = [_said("user", one["input"], f"{where}.input"), _said("assistant", one["output"], f"{where}.output")]
        return _with_system(pair, one.get("system"), where)
    speaker_key, content_key = ("from", "value") if "from" in one else ("role", "content")
    if speaker_key not in one:
        raise DataError(f"{where} has no speaker ('role' or 'from'); its keys are {_keys(one)}.")
    speaker = str(one[speaker_key]).lower()
    if speaker not in SPEAKERS:
        raise DataError(f"{where}: {speaker_key} is {one[speaker_key]!r}; it must be one of {', '.join(SPEAKERS)}.")
    role, calls = SPEAKERS[speaker], _calls(one.get("tool_calls") or (), where)
    content = one.get(content_key, one.get("value") if content_key == "content" else one.get("content"))
    if content is None and not calls:
        raise DataError(f"{where} has no {content_key!r}; its keys are {_keys(one)}.")
    text = "" if content is None else _text(content, f"{where}.{content_key}")
    if speaker == "function_call" and not calls:
        calls = _calls_in(text)
        text = "" if calls else text
    return [Turn(role, text, calls=calls, learn=_learns(one, role, where))]


def _learns(one: Object, role: Role, where: str) -> bool:
    key = next((key for key in ("loss_weight", "weight") if one.get(key) is not None), None)
    if key is None:
        return True
    if one[key] not in (0, 1):
        raise DataError(f"{where}: {key} is {one[key]!r}; headway's loss mask knows 0 and 1 only.")
    if one[key] == 1 and role != "assistant":
        raise DataError(f"{where}: {key} is 1 for a {role} turn; only the assistant's turns carry loss.")
    return role != "assistant" or one[key] == 1


def _calls(given: Any, where: str) -> tuple[Call, ...]:
    calls: list[Call] = []
    for one in cast(list[Any], given):
        function: Any = cast(dict[str, Any], one).get("function", one) if isinstance(one, dict) else None
        if not isinstance(function, dict) or "name" not in function:
            raise DataError(f"{where}: each of tool_calls must name a function.")
        named = cast(dict[str, Any], function)
        arguments = named.get("arguments", named.get("parameters", {}))
        calls.append(Call(str(named["name"]), _parsed(arguments) if isinstance(arguments, str) else arguments))
    return tuple(calls)


def _calls_in(text: str) -> tuple[Call, ...]:
    """The calls a function_call turn spells as JSON; none where it is written in another way (then it stays text)."""
    found = _parsed(text)
    listed = cast(list[Any], found) if isinstance(found, list) else [found]
    if not listed or not all(isinstance(one, dict) and isinstance(cast(dict[str, Any], one).get("name"), str) for one in listed):
        return ()
    return _calls(listed, "")


def _tools(given: Any, place: str) -> tuple[Object, ...]:
    found = _parsed(given) if isinstance(given, str) and given.strip() else given
    if not found:
        return ()
    listed = cast(list[Any], found) if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) for one in listed):
        raise DataError(f"{place}: tools must be a list of JSON objects.")
    return tuple(cast(list[Object], listed))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _with_system(turns: list[Turn], system: Any, place: str) -> list[Turn]:
    if not system:
        return turns
    if turns and turns[0].role == "system":
        raise DataError(f"{place}: two system prompts, one under 'system' and one as the first turn.")
    return [Turn("system", _text(system, f"{place}: system")), *turns]


def _said(role: Role, content: Any, where: str) -> Turn:
    return Turn(role, _text(content, where))


def _text(content: Any, where: str) -> str:
    """A content: a text, or a list of text parts, which are joined."""
    if isinstance(content, list):
        parts: list[str] = []
        for part in cast(list[Any], content):
            kind = cast(dict[str, Any], part).get("type", "text") if isinstance(part, dict) else type(part).__name__
            text = cast(dict[str, Any], part).get("text", cast(dict[str, Any], part).get("value")) if isinstance(part, dict) else part
            if kind not in ("text", "str") or not isinstance(text, str):
                raise DataError(f"{where}: a part of type {kind!r}; chat data holds text only.")
            parts.append(text)
        content = "".join(parts)
    if not isinstance(content, str):
        raise DataError(f"{where} is of type {type(content).__name__}; a text is expected.")
    if not content.isascii():
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise DataError(f"{where} has a lone surrogate at character {error.start}, which is no Unicode.") from None
    return content


def _no_empty(turns: list[Turn], place: str) -> None:
    for number, turn in enumerate(turns):
        if turn.role in ("user", "assistant") and not turn.content.strip() and not turn.calls:
            raise DataError(f"{place}: turn {number} ({turn.role}) is empty.")


def _keys(data: Object) -> str:
    return ", ".join(map(str, data)) or "none"
