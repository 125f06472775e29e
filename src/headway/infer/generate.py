"""Prompts come in, continuations go out. A continuation does not depend on the other prompts of its batch.

prompts -> ids -> requests of an engine (engine/) -> tokens -> text
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from headway.errors import ConfigError, DataError, HeadwayError
from headway.infer.engine.engine import InferenceEngine
from headway.infer.engine.ranks import MakeConstraints, build_engine
from headway.infer.engine.request import (
    EngineEvent,
    EngineOptions,
    EngineRequest,
    PromptMedia,
    Speculation,
)
from headway.infer.engine.text import RequestText
from headway.infer.load import LoadedModel
from headway.infer.sampling import Sampling
from headway.infer.stream import Say
from headway.records.chat import Conversation
from headway.runtime.progress import progress
from headway.tokenizer.chat import Turn, answer_end, bos_ids, find_template, render_prompt
from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

DECODED_BEFORE = 16
"""Last tokens of the prompt that are decoded with the new ones; decoding a long prompt at each token would cost more than the model."""
MAX_PROMPTS_BYTES = 64 << 20
"""Of a prompts file."""
CHUNK_TOKENS = 4096
COMPILE_FROM_STEPS = 512
"""A generation of fewer steps would wait longer for the compiler than it gains."""
RECORD_FROM_STEPS = 8
"""Fewer plain steps take less time than recording one."""
OnText = Callable[[int, str], object]
"""Receives the number of a prompt and the next piece of its text."""
StoppedBy = Literal["eos", "stop", "grammar", "length", "context"]


@dataclass(frozen=True)
class AnswerGrammar:
    """What every answer must follow."""

    text: str
    make_constraints: MakeConstraints
    """Of a loaded model: what reads the text."""


@dataclass(frozen=True)
class GenerateOptions:
    """When to stop and how to sample."""

    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    """Generation stops when the text contains one of these; the text ends before it."""
    stop_ids: tuple[int, ...] = ()
    """Generation stops after one of these ids, as after the model's own end ids."""
    special: bool = False
    """Special tokens in a prompt, such as <|im_start|>, are encoded as such; otherwise they are plain text."""
    sampling: Sampling = field(default_factory=Sampling)
    rows: int = 16
    """Prompts that are computed at once."""
    chunk_tokens: int = CHUNK_TOKENS
    """Tokens of prompts that go through the model at once; changes results only by rounding."""

    speculation: Speculation | None = None
    """Guess and check several tokens at a time; the text is the same."""
    grammar: AnswerGrammar | None = None
    """Only tokens that it allows are chosen."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"rows is {self.rows}; it must be 1 or more.")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be 1 or more.")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk-tokens is {self.chunk_tokens}; it must be 1 or more.")
        if "" in self.stop:
            raise ConfigError(
                "stop is an empty text, which every text contains. Give the text at which to stop."
            )


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    text: str
    """The continuation without special tokens, cut before a stop text."""
    token_ids: list[int]
    """Every generated id, the end id included."""
    stopped_by: StoppedBy
    """eos: an end id; stop: a stop text or id; grammar: its text is complete; length: max_new_tokens; context: the model's max_seq_len."""
    prompt_tokens: int


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: one per line, or the key `prompt` of each line of a .jsonl file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PROMPTS_BYTES + 1)  # bounded: a device file may be endless
        if len(data) > MAX_PROMPTS_BYTES:
            raise ConfigError(
                f"prompts-file is {str(path)!r}, which holds more than {MAX_PROMPTS_BYTES >> 20} MiB. Give fewer prompts."
            )
        lines = data.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
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
    """The ids of a prompt, after what the tokenizer puts before a text, such as Llama's begin token."""
    ids = [*bos_ids(tokenizer), *tokenizer.encode(prompt, allowed_special="all" if special else ())]
    if ids:
        return ids
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
    tokenizer = _tokenizer(loaded)
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
    """Answer every question: each becomes a user turn of a chat template, after the system message where one is given."""
    before = () if system is None else (Turn("system", system),)
    asked = [Conversation((*before, Turn("user", question))) for question in questions]
    return answer_conversations(loaded, asked, template, options, on_text)


def answer_conversations(
    loaded: LoadedModel,
    conversations: Sequence[Conversation],
    template: str,
    options: GenerateOptions,
    on_text: OnText | None = None,
) -> list[Generation]:
    """The assistant's next turn of every conversation; the template's end of a turn stops generation."""
    tokenizer = _tokenizer(loaded)
    found = find_template(template, tokenizer)
    # One question alone is named by its text; a longer conversation by all of it.
    names = [
        one.turns[0].content
        if len(one.turns) == 1
        else json.dumps([turn.content for turn in one.turns])
        for one in conversations
    ]
    ids = [
        (name, render_prompt(one.turns, found, tokenizer, one.tools))
        for name, one in zip(names, conversations, strict=True)
    ]
    # A model that never learned the template may still end its answer there.
    options = replace(options, stop_ids=(*options.stop_ids, *answer_end(found, tokenizer)))
    return generate_from_ids(loaded, ids, options, on_text)


def _tokenizer(loaded: LoadedModel) -> Tokenizer:
    if loaded.tokenizer is None:
        raise ConfigError(
            f"{loaded.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there."
        )
    return loaded.tokenizer


def generate_from_ids(
    loaded: LoadedModel,
    prompts: Sequence[tuple[str, list[int]]],
    options: GenerateOptions,
    on_text: OnText | None = None,
    media: Sequence[PromptMedia] | None = None,
) -> list[Generation]:
    """Continue every prompt, given with its ids. With `on_text`, one after the other, each piece of text as soon as it is known.

    `media`: the pictures and sounds of every prompt, for a model that takes them."""
    tokenizer, limit = _tokenizer(loaded), loaded.config.max_seq_len
    seen: Counter[str] = Counter()
    rows: list[_Sequence] = []
    for number, (prompt, ids) in enumerate(prompts):
        if len(ids) >= limit:
            raise ConfigError(
                f"prompt has {len(ids)} tokens; the model's max_seq_len={limit} leaves no room after it. Shorten the prompt."
            )
        # The same prompt twice gives two samples: the key counts the repetitions.
        request = EngineRequest(
            tuple(ids), options.max_new_tokens, options.sampling, f"{seen[prompt]}:{prompt}", frozenset(options.stop_ids),
            media=None if media is None else media[number], constraint=None if options.grammar is None else options.grammar.text,
        )  # fmt: skip
        rows.append(
            _Sequence(
                tokenizer,
                request,
                options.stop,
                None if on_text is None else partial(on_text, number),
            )
        )
        seen[prompt] += 1
    if not rows:
        return []
    _report_room(rows, options, limit)
    make_constraints = None if options.grammar is None else options.grammar.make_constraints
    engine = build_engine(
        loaded, _engine_options(rows, options, loaded), make_constraints=make_constraints
    )
    with progress("generate", total=len(rows), unit="prompts") as advance:
        # Pieces of two texts at a time would be mixed on a screen.
        for some in [rows] if on_text is None else [[row] for row in rows]:
            _run(engine, some, advance)
    return [row.result() for row in rows]


def _report_room(rows: Sequence[_Sequence], options: GenerateOptions, limit: int) -> None:
    """Warn if the model's context ends before max_new_tokens."""
    least = min(limit - len(row.prompt) for row in rows)
    if least < options.max_new_tokens:
        log.warning(
            "max-new-tokens is %d; the model's max_seq_len=%d leaves room for only %d after the longest prompt. Its text ends there.",
            options.max_new_tokens,
            limit,
            least,
        )


def _engine_options(
    rows: Sequence[_Sequence], options: GenerateOptions, loaded: LoadedModel
) -> EngineOptions:
    """An engine that lives for one call is made no larger than that, and compiles only what pays for the wait."""
    on_cuda = loaded.device.type == "cuda"
    return EngineOptions(
        max_running=min(options.rows, len(rows)),
        max_waiting=len(rows),
        prefill_tokens=options.chunk_tokens,
        max_context=min(
            loaded.config.max_seq_len, max(len(row.prompt) for row in rows) + options.max_new_tokens
        ),
        record="auto" if options.max_new_tokens >= RECORD_FROM_STEPS else False,
        compile_blocks=on_cuda and options.max_new_tokens >= COMPILE_FROM_STEPS,
        speculation=options.speculation,
    )


class _Sequence:
    """One sequence while it grows."""

    def __init__(
        self, tokenizer: Tokenizer, request: EngineRequest, stop: tuple[str, ...], say: Say | None
    ) -> None:
        self.tokenizer, self.request, self.stop, self.say = tokenizer, request, stop, say
        self.prompt = list(request.prompt)
        self.new: list[int] = []
        self.stopped_by: StoppedBy | None = None
        self._written = RequestText(tokenizer, self.prompt, stop)
        self._shown = 0

    def add(self, event: EngineEvent) -> bool:
        """Tokens came; True if the text ended before the engine knew, at a stop text."""
        self.new += event.tokens
        needs_text = self.say is not None or bool(self.stop)
        piece = self._written.add(event.tokens) if needs_text else ""
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
            piece = piece if self.stopped_by is None else self.result().text[self._shown :]
            if piece:
                self.say(piece)
                self._shown += len(piece)
        return at_stop and event.finished is None

    def _text(self) -> str:
        # Decoded after the prompt's end, so that no tokenizer drops the first space as the start of a text.
        end = self.prompt[-DECODED_BEFORE:]
        before = self.tokenizer.decode_bytes(end, skip_special=True)
        whole = self.tokenizer.decode_bytes([*end, *self.new], skip_special=True)
        return whole[len(before) :].decode("utf-8", errors="replace")

    def _text_before_stop(self) -> str | None:
        text = self._text()
        places = [at for stop in self.stop if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    def result(self) -> Generation:
        assert self.stopped_by is not None
        cut = self._text_before_stop() if self.stopped_by == "stop" else None
        return Generation(
            self._text() if cut is None else cut, self.new, self.stopped_by, len(self.prompt)
        )


def _run(
    engine: InferenceEngine, rows: Sequence[_Sequence], advance: Callable[[int], object]
) -> None:
    running = {engine.submit(row.request): row for row in rows}
    while engine.busy:
        for event in engine.step():
            row = running.get(event.request)
            if row is not None:
                if row.add(event):
                    engine.cancel(event.request)
                if row.stopped_by is not None:
                    del running[event.request]
                    advance(1)
