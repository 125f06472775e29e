"""A chat template that came with a tokenizer or in a file (jinja), and which of its characters
the assistant wrote.

    whole    <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello.<|im_end|>\\n
    prompt   <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    loss                                                           Hello.<|im_end|>

The prompt is all up to this answer, with the generation prompt. The loss is from there to the token
that ends the answer.

Where the template marks the answers ({% generation %}), the marks are used. Invariant: each
prompt must be the beginning of the whole; if it is not, or an answer has no end token, the
template is refused for training, because its loss mask would be a guess. Templates cannot read
the date: the same conversation has the same ids on any day.

A template may leave out what it has no place for: tool calls, tool definitions, tool turns, a
system prompt. A model would then learn an empty answer, or an answer to something it never saw.
`check_written` refuses that. It searches contents between the answers around them, calls inside
their answer and tools outside of all answers; a text counts if it is written verbatim or as JSON
spells it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn, cast

import jinja2

from headway.errors import ConfigError, DataError
from headway.tokenizer.chat_template import ControlToken, Segment, Turn, unused_private_characters
from headway.tokenizer.jinja_sandbox import Budget, Sandbox, one_line, render
from headway.tokenizer.load import Tokenizer

Message = Mapping[str, Any]
Span = tuple[int, int]
ADVICE = "Use a built-in template, or mark the answers in it with {% generation %}."


@dataclass(frozen=True, eq=False)
class CustomTemplate:
    """A jinja chat template with the special tokens of its tokenizer."""

    name: str
    source: str
    variables: Mapping[str, str]
    specials: Mapping[str, tuple[bool, bool]]
    """Spelling of each special token -> whether it strips white space on its left, on its right."""

    @staticmethod
    def of(name: str, source: str, tokenizer: Tokenizer) -> CustomTemplate:
        """The template with what it may name (`bos_token`, ...) and the special tokens it may
        write.
        """
        flags = {
            token.content: (token.lstrip, token.rstrip)
            for token in tokenizer.fast.get_added_tokens_decoder().values()
        }
        specials = {
            spelled: flags.get(spelled, (False, False)) for spelled in tokenizer.special_tokens
        }
        return CustomTemplate(
            name,
            source,
            {f"{role}_token": spelled for role, spelled in tokenizer.roles.items()},
            specials,
        )

    def segments(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """A whole conversation, for training."""
        rendering = Rendering(self, turns, tools)
        answers = rendering.answers()
        check_written(
            self.name, rendering.whole, rendering.messages, rendering.tools or [], answers
        )
        return self._split(
            rendering.whole,
            [span for i, span in answers.items() if turns[i].learn],
            rendering.breaker,
        )

    def prompt(
        self, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[Segment]:
        """A conversation up to where the assistant's next answer begins, for generation."""
        rendering = Rendering(self, turns, tools)
        text = rendering.text(len(turns), prompt=True)
        check_written(self.name, text, rendering.messages, rendering.tools or [], {})
        return self._split(text, [], rendering.breaker)

    def export(self, tokenizer: Tokenizer) -> str:
        """The source, unchanged."""
        return self.source

    @property
    def cache_key(self) -> str:
        """What decides how it writes, spelled as the keys of cached stores have always spelled
        it.
        """
        variables = dict(self.variables)
        specials = dict(self.specials)
        return (
            f"JinjaTemplate(name={self.name!r}, source={self.source!r}, variables={variables!r}, "
            f"specials={specials!r})"
        )

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds special tokens, the longest first."""
        # The first alternative that matches counts, so a token comes before its own beginning.
        spelled = sorted(self.specials, key=len, reverse=True)
        if not spelled:
            # An empty pattern would match everywhere; this one matches nowhere.
            return re.compile("(?!)")
        return re.compile("|".join(map(re.escape, spelled)))

    @cached_property
    def end_pattern(self) -> re.Pattern[str]:
        """Finds what may end an answer: white space and a special token."""
        return re.compile(rf"\s*(?:{self.special_pattern.pattern})")

    @cached_property
    def compiled(self) -> jinja2.Template:
        """The template, compiled once; its environment is a `Sandbox` of its own."""
        sandbox = Sandbox()
        try:
            return sandbox.compiled(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(
                f"chat template {self.name}: not valid jinja: {one_line(error)}."
            ) from None
        except Exception as error:
            # jinja compiles to Python, which has its own limits (nesting, size of constants).
            raise ConfigError(
                f"chat template {self.name} cannot be compiled: {one_line(error)}."
            ) from None

    def _split(self, whole: str, spans: Sequence[Span], breaker: str) -> list[Segment]:
        """The text as segments: special tokens, and the texts between them, targets in `spans`."""
        # No segment may cross the edge of the loss.
        edges = sorted({0, len(whole), *(edge for span in spans for edge in span)})
        segments: list[Segment] = []
        for start, stop in pairwise(edges):
            target = any(first <= start and stop <= last for first, last in spans)
            text_start = start
            for special in self.special_pattern.finditer(whole, start, stop):
                segments += self._text(whole, text_start, special.start(), target, breaker)
                segments.append(Segment(ControlToken(special[0]), target))
                text_start = special.end()

            segments += self._text(whole, text_start, stop, target, breaker)

        return segments

    def _text(self, whole: str, start: int, stop: int, target: bool, breaker: str) -> list[Segment]:
        """The text of a stretch without special tokens, as the tokenizer would read it there.

        A special token may swallow the white space beside it (lstrip, rstrip). Special tokens that
        a person typed lose their breaker again: as plain text they are harmless.
        """
        text = whole[start:stop]
        if whole.endswith(self._stripping(right=True), 0, start):
            text = text.lstrip()
        if whole.startswith(self._stripping(right=False), stop):
            text = text.rstrip()

        text = text.replace(breaker, "")
        if text:
            return [Segment(text, target)]
        return []

    def _stripping(self, right: bool) -> tuple[str, ...]:
        return tuple(spelled for spelled, sides in self.specials.items() if sides[right])


class Rendering:
    """One conversation rendered: in whole, and up to each answer.

    Special tokens typed in it are broken by a private character (`breaker`), so that every special
    token in the result was written by the template. Two more private characters (`marks`) enclose
    what the template puts into {% generation %}.
    """

    def __init__(
        self, template: CustomTemplate, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]
    ) -> None:
        self.template = template
        self.turns = turns
        # The budget of the sandbox grows with the conversation.
        calls_and_tools = json.dumps(
            [list(tools), [[call.name, call.arguments] for turn in turns for call in turn.calls]],
            ensure_ascii=False,
        )
        self.size = len(calls_and_tools) + sum(
            len(turn.content) + len(turn.context) for turn in turns
        )

        self.breaker, *marks = unused_private_characters(turns, tools, 3, template.source)
        self.marks = (marks[0], marks[1])

        self.messages = [self._message(turn) for turn in turns]
        self.tools = [self._without_specials(dict(tool)) for tool in tools] or None
        self.marked = self._render(self.messages, prompt=False)
        self.whole = self._unmarked(self.marked)

    def answers(self) -> dict[int, Span]:
        """Where the assistant's turns are in the whole: [start, stop) of each, with the token
        that ends it.
        """
        answers = [i for i, turn in enumerate(self.turns) if turn.role == "assistant"]
        generated = self._generated()
        if generated and len(generated) != len(answers):
            raise DataError(
                f"chat template {self.template.name} marks {len(generated)} answers of "
                f"{len(answers)}; the loss mask is unclear."
            )

        spans: dict[int, Span] = {}
        last = 0
        for number, i in enumerate(answers):
            if generated:
                start, stop = generated[number]
                span = start, self._end_token(start, stop, i)
            else:
                span = self._answer(i)

            if span[0] < last:
                raise DataError(
                    f"chat template {self.template.name}: answers overlap, so the loss mask is "
                    f"unclear. {ADVICE}"
                )

            spans[i] = span
            last = span[1]

        return spans

    def text(self, count: int, prompt: bool) -> str:
        """The first turns, with or without the generation prompt."""
        return self._unmarked(self._render(self.messages[:count], prompt))

    def _answer(self, i: int) -> tuple[int, int]:
        """The span of answer `i`, found by rendering what comes before it."""
        if i == 0:
            raise DataError(
                f"chat template {self.template.name}: the conversation begins with the assistant; "
                "there is nothing to answer."
            )

        prompt = self.text(i, prompt=True)
        if not self.whole.startswith(prompt):
            raise DataError(
                f"chat template {self.template.name} writes the turns before answer {i} "
                f"differently once the answer is there, so its loss mask is unclear. {ADVICE}"
            )

        start = len(prompt)
        # A template writes a call in a form of its own, so it cannot be searched for.
        if self.turns[i].calls or not self.turns[i].content.strip():
            return start, self._end_of_call(i, start)

        # The content may occur earlier in what the template writes. It counts where a special
        # token follows it; `first` is the fallback, and `_end_token` then says what is wrong.
        content = self._escaped(self.turns[i].content).strip()
        first = self.whole.find(content, start)
        position = first
        while position >= 0 and not self.template.end_pattern.match(
            self.whole, position + len(content)
        ):
            position = self.whole.find(content, position + 1)

        if first < 0:
            raise DataError(
                f"chat template {self.template.name} changes the assistant's text, so its loss "
                f"mask is unclear. {ADVICE}"
            )

        # The template ignores add_generation_prompt, so the header of the answer is not in the
        # prompt and would become a target.
        if (
            position >= 0
            and self.whole[start:position].strip()
            and prompt == self.text(i, prompt=False)
        ):
            raise DataError(
                f"chat template {self.template.name} has no generation prompt, so its loss mask "
                f"is unclear. {ADVICE}"
            )

        if position < 0:
            position = first
        return start, self._end_token(start, position + len(content), i)

    def _end_of_call(self, i: int, start: int) -> int:
        """Where an answer ends that is a tool call, or empty: at the last special token of its
        turn.
        """
        closed = self.text(i + 1, prompt=False)
        ends = [match.end() for match in self.template.special_pattern.finditer(closed, start)]
        if not self.whole.startswith(closed) or not ends:
            raise DataError(
                f"chat template {self.template.name}: where the answer in turn {i} ends is "
                f"unclear. {ADVICE}"
            )

        return ends[-1]

    def _end_token(self, start: int, stop: int, i: int) -> int:
        """The end of the special token that ends an answer: the last inside the span, or the one
        right after it.
        """
        specials = self.template.special_pattern
        inside = [m.end() for m in specials.finditer(self.whole, start, stop)]
        if inside and not self.whole[inside[-1] : stop].strip():
            return inside[-1]

        following = specials.search(self.whole, stop)
        if following is None or self.whole[stop : following.start()].strip():
            raise DataError(
                f"chat template {self.template.name} puts no special token after the answer in "
                f"turn {i}: a model trained on it would never stop. {ADVICE}"
            )

        return following.end()

    def _generated(self) -> list[tuple[int, int]]:
        """The spans in {% generation %}, in positions of `whole`, which has no marks."""
        spans: list[tuple[int, int]] = []
        shift = 0
        for match in re.finditer(f"{self.marks[0]}(.*?){self.marks[1]}", self.marked, re.DOTALL):
            start = match.start() - shift
            spans.append((start, start + len(match[1])))
            shift += len(self.marks)
        return spans

    def _render(self, messages: Sequence[Mapping[str, Any]], prompt: bool) -> str:
        """What the template writes for some messages, marks included, within a fresh budget."""
        compiled = self.template.compiled
        sandbox = cast(Sandbox, compiled.environment)
        sandbox.marks = self.marks
        sandbox.budget = Budget(self.size)
        return render(
            compiled,
            self.template.name,
            messages=messages,
            tools=self.tools,
            add_generation_prompt=prompt,
            **self.template.variables,
        )

    def _unmarked(self, text: str) -> str:
        return text.replace(self.marks[0], "").replace(self.marks[1], "")

    def _message(self, turn: Turn) -> dict[str, Any]:
        """A turn in OpenAI's form, which templates expect, with special tokens broken."""
        if turn.context:
            content = f"{turn.content}\n{turn.context}"
        else:
            content = turn.content

        message: dict[str, Any] = {"role": turn.role, "content": self._escaped(content)}
        if turn.calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "function": self._without_specials(
                        {"name": call.name, "arguments": call.arguments}
                    ),
                }
                for call in turn.calls
            ]

        return message

    def _without_specials(self, value: Any) -> Any:
        """A value with the special tokens in its texts broken."""
        if isinstance(value, str):
            return self._escaped(value)
        if isinstance(value, list):
            return [self._without_specials(item) for item in cast(list[Any], value)]

        if isinstance(value, dict):
            return {
                self._without_specials(key): self._without_specials(item)
                for key, item in cast(dict[Any, Any], value).items()
            }

        return value

    def _escaped(self, text: str) -> str:
        """A text in which the breaker stands behind the first character of each special token."""
        return self.template.special_pattern.sub(
            lambda special: special[0][0] + self.breaker + special[0][1:], text
        )


def check_written(
    name: str,
    text: str,
    messages: Sequence[Message],
    tools: Sequence[Message],
    answers: Mapping[int, Span],
) -> None:
    """Refuse a text in which something of the conversation is missing; `answers`: the span of
    each assistant turn, if known.
    """
    # The contents must come in the order of the turns: each is searched after the one before it,
    # and before the next answer. A system prompt may stand anywhere, because some templates write
    # it into the last question.
    start = 0
    for number, message in enumerate(messages):
        if number in answers:
            start, stop = answers[number]
            _check_answer(name, number, message, text[start:stop])
            start = stop
        elif message["role"] != "assistant":
            stop = next(
                (answers[later][0] for later in sorted(answers) if later > number), len(text)
            )
            is_system = number == 0 and message["role"] == "system"
            if is_system:
                content_end = _find(str(message["content"]), text, 0, len(text))
            else:
                content_end = _find(str(message["content"]), text, start, stop)

            if content_end is None:
                _refuse(name, f"turn {number} ({message['role']})")
            if not is_system:
                start = content_end

    # Outside of all answers: a call in an answer also names its tool.
    outside = _without(text, sorted(answers.values()))
    for tool in tools:
        for word in _tool_words(tool):
            if not any(form in outside for form in _forms(word)):
                _refuse(name, f"the tool definitions ({word[:40]!r})")


def _check_answer(name: str, number: int, message: Message, answer: str) -> None:
    if _find(str(message["content"]), answer, 0, len(answer)) is None:
        _refuse(name, f"what the assistant says in turn {number}")
    for call in message.get("tool_calls", ()):
        function = call["function"]
        for value in (function["name"], *_values(function["arguments"])):
            if not any(form in answer for form in _forms(value)):
                _refuse(name, f"the tool call in turn {number} ({function['name']})")


def _refuse(name: str, what: str) -> NoReturn:
    raise DataError(
        f"chat template {name} does not write {what}, so it would be lost. Choose a template that "
        "has a place for it (chatml and qwen write tools and calls), or remove it from the data."
    )


def _find(content: str, text: str, start: int, stop: int) -> int | None:
    """Where a content ends in a stretch of text, as it is or as JSON spells it; None: it is not
    there.
    """
    for form in _forms(content):
        position = text.find(form, start, stop)
        if position >= 0:
            return position + len(form)
    return None


def _forms(value: Any) -> tuple[str, ...]:
    """How a template may write a value: verbatim, as JSON (with or without \\u escapes), or as
    Python does.
    """
    if isinstance(value, str):
        # Templates often trim contents.
        inner = value.strip()
        return tuple(
            dict.fromkeys(
                (
                    inner,
                    json.dumps(inner, ensure_ascii=False)[1:-1],
                    json.dumps(inner)[1:-1],
                    repr(inner)[1:-1],
                )
            )
        )

    return tuple(dict.fromkeys((json.dumps(value), str(value))))


def _values(value: Any) -> Iterator[Any]:
    """The names and values in a call's arguments; null may be left out."""
    if isinstance(value, dict):
        for key, item in cast(dict[str, Any], value).items():
            yield key
            yield from _values(item)
    elif isinstance(value, list):
        for item in cast(list[Any], value):
            yield from _values(item)
    elif value is not None:
        yield value


def _tool_words(tool: Any) -> Iterator[str]:
    """What a model must know of a tool: names and descriptions, of the tool, its parameters and
    their choices.
    """
    if isinstance(tool, list):
        for item in cast(list[Any], tool):
            yield from _tool_words(item)
    if not isinstance(tool, dict):
        return

    for key, value in cast(dict[str, Any], tool).items():
        if key in ("name", "description") and isinstance(value, str):
            yield value
        elif key == "enum" and isinstance(value, list):
            yield from (item for item in cast(list[Any], value) if isinstance(item, str))
        elif key == "properties" and isinstance(value, dict):
            for parameter, item in cast(dict[str, Any], value).items():
                yield parameter
                yield from _tool_words(item)
        else:
            yield from _tool_words(value)


def _without(text: str, spans: Sequence[Span]) -> str:
    """The text without some stretches of it, joined by a character that no text matches across."""
    kept = []
    position = 0
    for start, stop in spans:
        kept.append(text[position:start])
        position = max(position, stop)
    return "\0".join([*kept, text[position:]])
