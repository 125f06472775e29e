"""Prompts come in, continuations go out. A continuation does not depend on the other prompts of its
batch.

    prompts -> ids -> requests of an engine (engine/) -> tokens -> text
"""

from __future__ import annotations

import json
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from headway.config.regular_file import regular_or_given
from headway.errors import ConfigError, DataError, HeadwayError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.ranks import build_engine
from headway.infer.engine.request import (
    EngineEvent,
    EngineOptions,
    EngineRequest,
    PromptMedia,
)
from headway.infer.engine.text import RequestText
from headway.infer.generate_options import GenerateOptions, Say
from headway.infer.load import LoadedModel
from headway.records.chat import Conversation
from headway.runtime.progress import progress
from headway.tokenizer.chat import Turn, answer_end, bos_ids, find_template, render_prompt
from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

DECODED_BEFORE = 16
"""Last tokens of the prompt that are decoded with the new ones; decoding a long prompt at each
token would cost more than the model."""
MAX_PROMPTS_BYTES = 64 << 20
"""Of a prompts file, which is read as a whole."""
COMPILE_FROM_STEPS = 512
"""A generation of fewer steps would wait longer for the compiler than it gains."""
RECORD_FROM_STEPS = 8
"""Fewer plain steps take less time than recording one."""
LEAST_SHARED = 0.25
"""Share of a prompt that another one must begin with, so that it waits for that one."""
OnText = Callable[[int, str], object]
"""Receives the number of a prompt and the next piece of its text."""
StoppedBy = Literal["eos", "stop", "grammar", "length", "context"]


@dataclass(frozen=True)
class PromptEnd:
    """Where the continuation of one prompt ends."""

    max_new_tokens: int
    stop: tuple[str, ...] = ()
    """It ends before one of these."""


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    text: str
    """The continuation without special tokens, cut before a stop text."""
    token_ids: list[int]
    """Every generated id, the end id included."""
    stopped_by: StoppedBy
    """eos: an end id; stop: a stop text or id; grammar: its text is complete; length:
    max_new_tokens; context: the model's max_seq_len."""
    prompt_tokens: int


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: one per line, or the key `prompt` of each line of a .jsonl file."""
    try:
        with open(path, "rb", opener=regular_or_given) as file:
            data = file.read(MAX_PROMPTS_BYTES + 1)  # bounded: a device file may be endless
        if len(data) > MAX_PROMPTS_BYTES:
            raise ConfigError(
                f"prompts-file is {str(path)!r}, which holds more than {MAX_PROMPTS_BYTES >> 20} "
                "MiB. Give fewer prompts."
            )
        lines = data.decode("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(
            f"prompts-file is {str(path)!r}, which {error.strerror or error}."
        ) from None
    except ValueError as error:
        raise ConfigError(
            f"prompts-file is {str(path)!r}; it cannot be read as text: {error}."
        ) from None
    if path.suffix != ".jsonl":
        return [line for line in lines if line.strip()]
    prompts: list[str] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}.") from None
        if not (isinstance(record, dict) and isinstance(record.get("prompt"), str)):
            raise DataError(
                f'{path}:{number}: a line must be an object with a text under "prompt".'
            )
        prompts.append(record["prompt"])
    return prompts


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, special: bool = False) -> list[int]:
    """The ids of a prompt, after what the tokenizer puts before a text, such as Llama's begin
    token."""
    allowed_special = "all" if special else ()
    # By default <|im_start|> in a prompt is text: a prompt from elsewhere cannot forge a turn.
    ids = [*bos_ids(tokenizer), *tokenizer.encode(prompt, allowed_special=allowed_special)]
    if ids:
        return ids
    # An empty prompt: the model needs one token to continue from.
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise ConfigError(
            "prompt is empty, and the tokenizer has no token that begins a text. Give a prompt."
        )
    return [start]


def generate(
    loaded: LoadedModel,
    prompts: Sequence[str],
    options: GenerateOptions,
    on_text: OnText | None = None,
) -> list[Generation]:
    """Continue every prompt."""
    tokenizer = loaded.require_tokenizer()
    ids = [(prompt, prompt_ids(tokenizer, prompt, special=options.special)) for prompt in prompts]
    return generate_from_ids(loaded, ids, options, on_text)


def answer(
    loaded: LoadedModel,
    questions: Sequence[str],
    template: str,
    options: GenerateOptions,
    *,
    system: str | None = None,
    on_text: OnText | None = None,
) -> list[Generation]:
    """Answer every question: each becomes a user turn of a chat template, after the system message
    where one is given."""
    before = ()
    if system is not None:
        before = (Turn("system", system),)
    asked = [Conversation((*before, Turn("user", question))) for question in questions]
    return answer_conversations(loaded, asked, template, options, on_text)


def answer_conversations(
    loaded: LoadedModel,
    conversations: Sequence[Conversation],
    template: str,
    options: GenerateOptions,
    on_text: OnText | None = None,
) -> list[Generation]:
    """The assistant's next turn of every conversation; the template's end of a turn stops
    generation."""
    tokenizer = loaded.require_tokenizer()
    chat_template = find_template(template, tokenizer)
    prompts: list[tuple[str, list[int]]] = []
    for conversation in conversations:
        ids = render_prompt(conversation.turns, chat_template, tokenizer, conversation.tools)
        prompts.append((conversation_name(conversation.turns), ids))
    # A model that never learned the template may still end its answer there.
    options = replace(options, stop_ids=(*options.stop_ids, *answer_end(chat_template, tokenizer)))
    return generate_from_ids(loaded, prompts, options, on_text)


def conversation_name(turns: Sequence[Turn]) -> str:
    """What names a conversation in the draws of its samples: one question alone its text, a longer
    one all of it."""
    if len(turns) == 1:
        return turns[0].content
    return json.dumps([turn.content for turn in turns])


def generate_from_ids(
    loaded: LoadedModel,
    prompts: Sequence[tuple[str, list[int]]],
    options: GenerateOptions,
    on_text: OnText | None = None,
    media: Sequence[PromptMedia] | None = None,
    ends: Sequence[PromptEnd] | None = None,
) -> list[Generation]:
    """Continue every prompt, given with its ids. With `on_text`, one after the other, each piece of
    text as soon as it is known.

    `media`: the pictures and sounds of every prompt, for a model that takes them. `ends`: of every
    prompt, in place of `max_new_tokens` and `stop` of the options. What prompts begin with together
    is computed once.
    """
    tokenizer = loaded.require_tokenizer()
    limit = loaded.config.max_seq_len
    seen: Counter[str] = Counter()
    rows: list[_Sequence] = []
    for number, (prompt, ids) in enumerate(prompts):
        if len(ids) >= limit:
            raise ConfigError(
                f"prompt has {len(ids)} tokens; the model's max_seq_len={limit} leaves no room "
                "after it. Shorten the prompt."
            )
        end = PromptEnd(options.max_new_tokens, options.stop)
        if ends is not None:
            end = ends[number]
        request = EngineRequest(
            tuple(ids),
            end.max_new_tokens,
            options.sampling,
            # The same prompt twice gives two samples: the key counts the repetitions.
            key=f"{seen[prompt]}:{prompt}",
            stop_ids=frozenset(options.stop_ids),
            media=None if media is None else media[number],
            constraint=None if options.grammar is None else options.grammar.text,
        )
        seen[prompt] += 1
        say = None
        if on_text is not None:
            say = partial(on_text, number)
        rows.append(_Sequence(tokenizer, request, end.stop, say))
    if not rows:
        return []

    _report_room(rows, limit)
    make_constraints = None if options.grammar is None else options.grammar.make_constraints
    engine = build_engine(
        loaded, _engine_options(rows, options, loaded), make_constraints=make_constraints
    )

    with progress("generate", total=len(rows), unit="prompts") as advance:
        batches = [rows]
        if on_text is not None:
            # Pieces of two texts at a time would be mixed on a screen.
            batches = [[row] for row in rows]
        for batch in batches:
            _run(engine, batch, advance)
    return [row.result() for row in rows]


def _report_room(rows: Sequence[_Sequence], limit: int) -> None:
    """Warn if the model's context ends before max_new_tokens."""
    short = [row for row in rows if limit - len(row.prompt) < row.request.max_new_tokens]
    if short:
        longest = max(short, key=lambda row: len(row.prompt))
        log.warning(
            "max-new-tokens is %d; the model's max_seq_len=%d leaves room for only %d after the "
            "longest prompt. Its text ends there.",
            longest.request.max_new_tokens,
            limit,
            limit - len(longest.prompt),
        )


def _engine_options(
    rows: Sequence[_Sequence], options: GenerateOptions, loaded: LoadedModel
) -> EngineOptions:
    """An engine that lives for one call is made no larger than that, and compiles only what pays
    for the wait."""
    on_cuda = loaded.device.type == "cuda"
    longest = max(len(row.prompt) + row.request.max_new_tokens for row in rows)
    most_new = max(row.request.max_new_tokens for row in rows)
    return EngineOptions(
        max_running=min(options.rows, len(rows)),
        max_waiting=len(rows),
        prefill_tokens=options.chunk_tokens,
        max_context=min(loaded.config.max_seq_len, longest),
        record="auto" if most_new >= RECORD_FROM_STEPS else False,
        compile_blocks=on_cuda and most_new >= COMPILE_FROM_STEPS,
        speculation=options.speculation,
    )


class _Sequence:
    """One prompt and its continuation while it grows."""

    def __init__(
        self, tokenizer: Tokenizer, request: EngineRequest, stop: tuple[str, ...], say: Say | None
    ) -> None:
        self.tokenizer = tokenizer
        self.request = request
        self.stop = stop
        self.say = say
        self.prompt = list(request.prompt)
        self.new: list[int] = []
        self.stopped_by: StoppedBy | None = None
        self._written = RequestText(tokenizer, self.prompt, stop)
        self._shown = 0

    def add(self, event: EngineEvent) -> bool:
        """Tokens came; True if the text ended before the engine knew, at a stop text."""
        self.new += event.tokens
        # Text is made token by token only where somebody reads it, or where it may hold a stop
        # text.
        piece = ""
        if self.say is not None or self.stop:
            piece = self._written.add(event.tokens)
        # An end id after a stop text would be a token the text does not have.
        at_stop = self._written.stopped and event.finished != "eos"
        if at_stop:
            self.stopped_by = "stop"
        elif event.finished is not None:
            if event.error is not None:
                raise HeadwayError(
                    f"a text cannot be continued after {len(self.new)} tokens: {event.error}"
                )
            assert event.finished not in ("cancelled", "error")
            self.stopped_by = event.finished
        if self.say is not None:
            # The last piece comes from the whole text, so that all pieces joined are the result.
            if self.stopped_by is not None:
                piece = self.result().text[self._shown :]
            if piece:
                self.say(piece)
                self._shown += len(piece)
        return at_stop and event.finished is None

    def _text(self) -> str:
        """All new tokens as text, stop texts included."""
        # Decoded after the prompt's end, so that no tokenizer drops the first space as the start of
        # a text.
        end = self.prompt[-DECODED_BEFORE:]
        before = self.tokenizer.decode_bytes(end, skip_special=True)
        whole = self.tokenizer.decode_bytes([*end, *self.new], skip_special=True)
        return whole[len(before) :].decode("utf-8", errors="replace")

    def _text_before_stop(self) -> str | None:
        text = self._text()
        # The first stop text in the text counts, whichever of them it is.
        places = [position for stop in self.stop if (position := text.find(stop)) >= 0]
        if places:
            return text[: min(places)]
        return None

    def result(self) -> Generation:
        assert self.stopped_by is not None
        text = None
        if self.stopped_by == "stop":
            text = self._text_before_stop()
        if text is None:
            # a stop id leaves nothing to cut
            text = self._text()
        return Generation(text, self.new, self.stopped_by, len(self.prompt))


@dataclass(frozen=True)
class _Follower:
    """A row that begins like the row before it."""

    row: _Sequence
    shared_pages: int
    """What both begin with."""


def _run(
    engine: InferenceEngine, rows: Sequence[_Sequence], advance: Callable[[int], object]
) -> None:
    running: dict[int, _Sequence] = {}
    waiting: dict[int, deque[_Follower]] = {}
    """By the number of the row whose prompt must be read first."""

    def submit(chain: deque[_Follower]) -> None:
        first = chain.popleft()
        number = engine.submit(first.row.request)
        running[number] = first.row
        # The next one starts at once where it would gain nothing from waiting for this one.
        there = first.shared_pages
        while chain and chain[0].shared_pages <= there:
            follower = chain.popleft()
            number = engine.submit(follower.row.request)
            running[number] = follower.row
            there = follower.shared_pages
        waiting[number] = chain

    for chain in _chains(rows, engine.options.page_tokens):
        submit(chain)
    while engine.busy:
        for event in engine.step():
            row = running.get(event.request)
            if row is None:  # the last event of one that was cancelled
                continue
            # Its prompt has been read, so the next one finds the pages of their beginning.
            chain = waiting.pop(event.request, None)
            if chain:
                submit(chain)
            if row.add(event):
                engine.cancel(event.request)
            if row.stopped_by is not None:
                del running[event.request]
                advance(1)


def _chains(rows: Sequence[_Sequence], page_tokens: int) -> list[deque[_Follower]]:
    """Rows with the same beginning, in an order in which each shares most with the one before it.

    Rows that are read at the same time compute their common beginning once each, because pages are
    shared when their prompt has been read. Reading one after the other costs the ends of rounds that
    other prompts would fill: only what shares enough waits.
    """
    chains: list[deque[_Follower]] = []
    before: _Sequence | None = None
    for row in sorted(rows, key=lambda row: row.request.prompt):
        shared_pages = 0
        # The same ids may stand for different pictures, which share nothing.
        if before is not None and row.request.media is None:
            shared_pages = _common_length(before.request.prompt, row.request.prompt) // page_tokens
        before = row
        if shared_pages * page_tokens >= max(1, LEAST_SHARED * len(row.prompt)):
            chains[-1].append(_Follower(row, shared_pages))
        else:
            chains.append(deque([_Follower(row, 0)]))
    return chains


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Tokens that two prompts begin with."""
    for length, (token, other) in enumerate(zip(first, second, strict=False)):
        if token != other:
            return length
    return min(len(first), len(second))
