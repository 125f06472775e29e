"""Prompts come in, continuations go out. A continuation does not depend on the other prompts of its batch.

prompts -> ids, left-aligned in one batch -> forwards over chunks of all prompts -> one token per row and step, from the cache
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch

from headway.errors import ConfigError, DataError
from headway.infer.decode import Decoder
from headway.infer.load import LoadedModel
from headway.infer.prefill import CHUNK_TOKENS, last_hidden
from headway.infer.sampling import Sampling, choose
from headway.runtime.progress import progress
from headway.tokenizer.chat import Turn, answer_end, bos_ids, render_prompt
from headway.tokenizer.load import Tokenizer

log = logging.getLogger("headway")

DECODED_BEFORE = 16
"""Last tokens of the prompt that are decoded with the new ones; decoding a long prompt at each token would cost more than the model."""
MAX_PROMPTS_BYTES = 64 << 20
"""Of a prompts file."""
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


def generate(loaded: LoadedModel, prompts: Sequence[str], options: GenerateOptions) -> list[Generation]:
    """Continue every prompt."""
    tokenizer = _tokenizer(loaded)
    return generate_from_ids(loaded, [(prompt, prompt_ids(tokenizer, prompt, special=options.special)) for prompt in prompts], options)


def answer(loaded: LoadedModel, questions: Sequence[str], template: str, options: GenerateOptions) -> list[Generation]:
    """Answer every question: each becomes a user turn of a chat template, and the template's end of a turn stops generation."""
    tokenizer = _tokenizer(loaded)
    ids = [(question, render_prompt([Turn("user", question)], template, tokenizer)) for question in questions]
    # A model that never learned the template may still end its answer there.
    return generate_from_ids(loaded, ids, replace(options, stop_ids=(*options.stop_ids, *answer_end(template, tokenizer))))


def _tokenizer(loaded: LoadedModel) -> Tokenizer:
    if loaded.tokenizer is None:
        raise ConfigError(f"{loaded.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json there.")
    return loaded.tokenizer


@torch.inference_mode()
def generate_from_ids(loaded: LoadedModel, prompts: Sequence[tuple[str, list[int]]], options: GenerateOptions) -> list[Generation]:
    """Continue every prompt, given with its ids."""
    tokenizer, limit = _tokenizer(loaded), loaded.config.max_seq_len
    seen: Counter[str] = Counter()
    rows: list[_Sequence] = []
    for prompt, ids in prompts:
        if len(ids) >= limit:
            raise ConfigError(f"prompt has {len(ids)} tokens; the model's max_seq_len={limit} leaves no room after it. Shorten the prompt.")
        # The same prompt twice gives two samples: the key counts the repetitions.
        rows.append(_Sequence(tokenizer, loaded.end_ids, options, ids, key=f"{seen[prompt]}:{prompt}", room=limit - len(ids)))
        seen[prompt] += 1
    _report_room(rows, options, limit)
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

    def _text(self) -> str:
        # Decoded after the prompt's end, so that no tokenizer drops the first space as the start of a text.
        end = self.prompt[-DECODED_BEFORE:]
        before = self.tokenizer.decode_bytes(end, skip_special=True)
        whole = self.tokenizer.decode_bytes([*end, *self.new], skip_special=True)
        return whole[len(before) :].decode("utf-8", errors="replace")

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
    logits = model.logits(last_hidden(model, tokens, lengths, cache, options.chunk_tokens)).float()
    decoder = Decoder(model, cache, steps=most)
    while True:
        token = _next(loaded, logits, rows, options)
        for row, one in zip(rows, token.tolist(), strict=True):
            row.add(one)
        if all(row.stopped_by is not None for row in rows):
            return
        logits = decoder.step(token)


def _next(loaded: LoadedModel, logits: torch.Tensor, rows: list[_Sequence], options: GenerateOptions) -> torch.Tensor:
    assert loaded.tokenizer is not None
    # Embedding rows beyond the vocabulary are padding.
    logits[:, loaded.tokenizer.vocab_size :] = -torch.inf
    return choose(logits, options.sampling, [row.draw() for row in rows])
