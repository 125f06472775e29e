"""Prompts come in, continuations go out. A continuation does not depend on the other prompts of its batch.

prompts -> ids, left-aligned in one batch -> forwards over chunks of all prompts -> one token per row and step, from the cache
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

import torch

from headway.errors import ConfigError, DataError
from headway.infer.decode import Decoder
from headway.infer.engine.request import PromptMedia
from headway.infer.load import LoadedModel
from headway.infer.prefill import CHUNK_TOKENS, last_hidden
from headway.infer.sampling import Sampling, choose
from headway.infer.stream import TextStream
from headway.model.projector import MediaTensors
from headway.prepare.parse_chat import Conversation
from headway.runtime.progress import progress
from headway.tokenizer.chat import Turn, answer_end, bos_ids, find_template, render_prompt
from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

DECODED_BEFORE = 16
"""Last tokens of the prompt that are decoded with the new ones; decoding a long prompt at each token would cost more than the model."""
MAX_PROMPTS_BYTES = 64 << 20
"""Of a prompts file."""
OnText = Callable[[int, str], object]
"""Receives the number of a prompt and the next piece of its text."""
StoppedBy = Literal["eos", "stop", "length", "context"]


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
    """Tokens of each prompt that go through the model at once; changes results only by rounding."""

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ConfigError(f"rows is {self.rows}; it must be 1 or more.")
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be 1 or more.")
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk-tokens is {self.chunk_tokens}; it must be 1 or more.")
        if "" in self.stop:
            raise ConfigError("stop is an empty text, which every text contains. Give the text at which to stop.")


@dataclass(frozen=True)
class Generation:
    """The continuation of one prompt."""

    text: str
    """The continuation without special tokens, cut before a stop text."""
    token_ids: list[int]
    """Every generated id, the end id included."""
    stopped_by: StoppedBy
    """eos: an end id; stop: a stop text or id; length: max_new_tokens; context: the model's max_seq_len."""
    prompt_tokens: int


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: one per line, or the key `prompt` of each line of a .jsonl file."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_PROMPTS_BYTES + 1)  # bounded: a device file may be endless
        if len(data) > MAX_PROMPTS_BYTES:
            raise ConfigError(f"prompts-file is {str(path)!r}, which holds more than {MAX_PROMPTS_BYTES >> 20} MiB. Give fewer prompts.")
        lines = data.decode("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"prompts-file is {str(path)!r}; it cannot be read as text: {error}.") from None
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
            raise DataError(f'{path}:{number}: a line must be an object with a text under "prompt".')
        prompts.append(record["prompt"])
    return prompts


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, special: bool = False) -> list[int]:
    """The ids of a prompt, after what the tokenizer puts before a text, such as Llama's begin token."""
    ids = [*bos_ids(tokenizer), *tokenizer.encode(prompt, allowed_special="all" if special else ())]
    if ids:
        return ids
    start = tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id
    if start is None:
        raise ConfigError("prompt is empty, and the tokenizer has no token that begins a text. Give a prompt.")
    return [start]


def generate(loaded: LoadedModel, prompts: Sequence[str], options: GenerateOptions, on_text: OnText | None = None) -> list[Generation]:
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
    names = [one.turns[0].content if len(one.turns) == 1 else json.dumps([turn.content for turn in one.turns]) for one in conversations]
    ids = [(name, render_prompt(one.turns, found, tokenizer, one.tools)) for name, one in zip(names, conversations, strict=True)]
    # A model that never learned the template may still end its answer there.
    options = replace(options, stop_ids=(*options.stop_ids, *answer_end(found, tokenizer)))
    return generate_from_ids(loaded, ids, options, on_text)


def _tokenizer(loaded: LoadedModel) -> Tokenizer:
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there.")
    return loaded.tokenizer


@torch.inference_mode()
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
    for prompt, ids in prompts:
        if len(ids) >= limit:
            raise ConfigError(f"prompt has {len(ids)} tokens; the model's max_seq_len={limit} leaves no room after it. Shorten the prompt.")
        # The same prompt twice gives two samples: the key counts the repetitions.
        rows.append(_Sequence(tokenizer, loaded.end_ids, options, ids, key=f"{seen[prompt]}:{prompt}", room=limit - len(ids)))
        seen[prompt] += 1
    for row, one in zip(rows, media or (), strict=media is not None):
        row.media = one
    _report_room(rows, options, limit)
    if on_text is not None:
        for number, row in enumerate(rows):
            row.stream = TextStream(partial(on_text, number), options.stop)
            _run(loaded, [row], options)
        return [row.result() for row in rows]
    with progress("generate", total=len(rows), unit="prompts") as advance:
        for first in range(0, len(rows), options.rows):
            some = rows[first : first + options.rows]
            _run(loaded, some, options)
            advance(len(some))
    return [row.result() for row in rows]


def _report_room(rows: Sequence[_Sequence], options: GenerateOptions, limit: int) -> None:
    """Warn if the model's context ends before max_new_tokens."""
    least = min((row.room for row in rows), default=options.max_new_tokens)
    if least < options.max_new_tokens:
        log.warning(
            "max-new-tokens is %d; the model's max_seq_len=%d leaves room for only %d after the longest prompt. Its text ends there.",
            options.max_new_tokens,
            limit,
            least,
        )


class _Sequence:
    """One sequence while it grows."""

    def __init__(
        self, tokenizer: Tokenizer, ends: frozenset[int], options: GenerateOptions, prompt: list[int], *, key: str, room: int
    ) -> None:
        self.tokenizer, self.ends, self.options, self.prompt, self.key, self.room = tokenizer, ends, options, prompt, key, room
        self.new: list[int] = []
        self.stopped_by: StoppedBy | None = None
        self.stream: TextStream | None = None
        self.media: PromptMedia | None = None

    def draw(self) -> float:
        return self.options.sampling.draw(self.key, len(self.prompt) + len(self.new))

    def add(self, token: int) -> None:
        if self.stopped_by is not None:
            return
        self.new.append(token)
        if token in self.ends:
            self.stopped_by = "eos"
        elif token in self.options.stop_ids or (self.options.stop and self._text_before_stop() is not None):
            self.stopped_by = "stop"
        elif len(self.new) == self.options.max_new_tokens:
            self.stopped_by = "length"
        elif len(self.new) == self.room:
            self.stopped_by = "context"
        if self.stream is not None:
            self.stream.update(self._bytes()) if self.stopped_by is None else self.stream.finish(self.result().text)

    def _text(self) -> str:
        return self._bytes().decode("utf-8", errors="replace")

    def _bytes(self) -> bytes:
        # Decoded after the prompt's end, so that no tokenizer drops the first space as the start of a text.
        end = self.prompt[-DECODED_BEFORE:]
        before = self.tokenizer.decode_bytes(end, skip_special=True)
        whole = self.tokenizer.decode_bytes([*end, *self.new], skip_special=True)
        return whole[len(before) :]

    def _text_before_stop(self) -> str | None:
        text = self._text()
        places = [at for stop in self.options.stop if (at := text.find(stop)) >= 0]
        return text[: min(places)] if places else None

    def result(self) -> Generation:
        assert self.stopped_by is not None
        cut = self._text_before_stop() if self.stopped_by == "stop" else None
        return Generation(self._text() if cut is None else cut, self.new, self.stopped_by, len(self.prompt))


def _run(loaded: LoadedModel, rows: list[_Sequence], options: GenerateOptions) -> None:
    model, device = loaded.model, loaded.device
    lengths = [len(row.prompt) for row in rows]
    longest = max(lengths)
    tokens = torch.tensor([row.prompt + [0] * (longest - len(row.prompt)) for row in rows], device=device)
    most = max(min(options.max_new_tokens, row.room) for row in rows)
    cache = loaded.new_cache(len(rows), longest + most, lengths)
    media = _media_tensors(loaded, [row.media for row in rows], longest)
    logits = model.logits(last_hidden(model, tokens, lengths, cache, options.chunk_tokens, media)).float()
    decoder = Decoder(model, cache, steps=most)
    while True:
        token = _next(loaded, logits, rows, options)
        for row, one in zip(rows, token.tolist(), strict=True):
            row.add(one)
        if all(row.stopped_by is not None for row in rows):
            return
        logits = decoder.step(token)


def _media_tensors(loaded: LoadedModel, rows: Sequence[PromptMedia | None], longest: int) -> MediaTensors | None:
    """The media of a batch of prompts, as a training batch has them."""
    shape = loaded.config.media
    if shape is None or all(row is None for row in rows):
        return None
    slot = torch.full((len(rows), longest), -1, dtype=torch.int32)
    features: dict[str, torch.Tensor] = {}
    present: dict[str, torch.Tensor] = {}
    begin = 0
    for one in shape.inputs:
        listed = [[item for item in (row.items if row else ()) if item.modality == one.modality] for row in rows]
        most = max(1, *map(len, listed))
        features[one.modality] = torch.zeros(len(rows), most, one.vectors, one.width)
        present[one.modality] = torch.zeros(len(rows), most, dtype=torch.bool)
        for number, (row, items) in enumerate(zip(rows, listed, strict=True)):
            for at, item in enumerate(items):
                slot[number, item.offset : item.offset + one.tokens] = begin + at * one.tokens + torch.arange(one.tokens, dtype=torch.int32)
                found = None if row is None or item.content_hash is None else row.features.get(item.content_hash)
                if found is not None:
                    features[one.modality][number, at] = torch.from_numpy(found)
                    present[one.modality][number, at] = True
        begin += most * one.tokens
    device = loaded.device
    return MediaTensors(slot.to(device), {k: v.to(device) for k, v in features.items()}, {k: v.to(device) for k, v in present.items()})


def _next(loaded: LoadedModel, logits: torch.Tensor, rows: list[_Sequence], options: GenerateOptions) -> torch.Tensor:
    assert loaded.tokenizer is not None
    # Embedding rows beyond the vocabulary are padding.
    logits[:, loaded.tokenizer.vocab_size :] = -torch.inf
    return choose(logits, options.sampling, [row.draw() for row in rows])
