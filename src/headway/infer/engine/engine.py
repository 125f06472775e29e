"""Requests come in, the tokens of all of them go out step by step. What a request becomes does not depend on the others."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path

import torch

from headway.errors import ConfigError
from headway.infer.decode import Decoder
from headway.infer.engine.request import (
    ConstraintFactory,
    EngineEvent,
    EngineOptions,
    EngineRequest,
    EngineStats,
    QueueFull,
    RequestTooLarge,
)
from headway.infer.load import LoadedModel
from headway.infer.prefill import last_hidden
from headway.infer.sampling import choose


class _Row:
    def __init__(self, number: int, request: EngineRequest, room: int) -> None:
        self.number, self.request, self.room = number, request, room
        self.new: list[int] = []
        self.row = -1
        self.submitted = time.monotonic()


class InferenceEngine:
    """Continuous batching over the rows of one cache. No threads: the caller calls `step` as long as `busy`."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        adapters: Mapping[str, Path] = {},
        constraints: ConstraintFactory | None = None,
    ) -> None:
        self.loaded, self.options = loaded, options
        self._context = min(loaded.config.max_seq_len, options.max_context or loaded.config.max_seq_len)
        self._cache = loaded.new_cache(options.max_running, self._context)
        self._decoder = Decoder(loaded.model, self._cache, steps=1 << 30, compile_blocks=False, record=False)
        self._waiting: deque[_Row] = deque()
        self._running: dict[int, _Row] = {}
        self._logits: dict[int, torch.Tensor] = {}
        self._next = 0
        self._cancelled: list[int] = []
        self._counts = {"prompt": 0, "generated": 0, "finished": 0, "steps": 0}
        self._first: list[float] = []

    @property
    def busy(self) -> bool:
        """A request is waiting or running."""
        return bool(self._waiting or self._running or self._cancelled)

    def submit(self, request: EngineRequest) -> int:
        """The number of the request in events."""
        if len(request.prompt) >= self._context:
            raise RequestTooLarge(f"prompt has {len(request.prompt)} tokens; the context of {self._context} leaves no room after it.")
        if max(request.prompt) >= self.loaded.config.vocab or min(request.prompt) < 0:
            raise ConfigError(f"prompt has an id outside the model's vocabulary of {self.loaded.config.vocab}.")
        if len(self._waiting) >= self.options.max_waiting:
            raise QueueFull(f"{len(self._waiting)} requests are waiting; no more are taken now. Try again later.")
        number, self._next = self._next, self._next + 1
        self._waiting.append(_Row(number, request, self._context - len(request.prompt)))
        return number

    def cancel(self, request: int) -> None:
        """End a request; its last event says so. One that has ended is left alone."""
        self._cancelled.append(request)

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """One round: admit, read prompts, one token for each running request."""
        events = self._take_cancelled()
        self._counts["steps"] += 1
        if self._running:
            rows = sorted(self._running.values(), key=lambda one: one.row)
            token = torch.zeros(self.options.max_running, dtype=torch.int64, device=self.loaded.device)
            for one in rows:
                token[one.row] = one.new[-1]
            logits = self._decoder.step(token, [one.row for one in rows])
            events += [self._add(one, logits[one.row]) for one in rows]
        while self._waiting and self._cache.num_free:
            one = self._waiting.popleft()
            one.row = self._cache.allocate()
            prompt = list(one.request.prompt)
            tokens = torch.tensor([prompt], device=self.loaded.device)
            cache = self._cache.select([one.row], [len(prompt)])
            hidden = last_hidden(self.loaded.model, tokens, [len(prompt)], cache, self.options.prefill_tokens)
            self._counts["prompt"] += len(prompt)
            self._running[one.number] = one
            self._first.append(time.monotonic() - one.submitted)
            events.append(self._add(one, self.loaded.model.logits(hidden)[0].float()))
        return events

    def _take_cancelled(self) -> list[EngineEvent]:
        events: list[EngineEvent] = []
        for number in self._cancelled:
            if number in self._running:
                self._end(self._running[number])
                events.append(EngineEvent(number, (), finished="cancelled"))
            elif any(one.number == number for one in self._waiting):
                self._waiting = deque(one for one in self._waiting if one.number != number)
                events.append(EngineEvent(number, (), finished="cancelled"))
        self._cancelled = []
        return events

    def _add(self, one: _Row, logits: torch.Tensor) -> EngineEvent:
        request, tokenizer = one.request, self.loaded.tokenizer
        logits = logits.clone()
        if tokenizer is not None:
            logits[tokenizer.vocab_size :] = -torch.inf
        draw = request.sampling.draw(request.key, len(request.prompt) + len(one.new))
        token = int(choose(logits[None], request.sampling, [draw])[0])
        one.new.append(token)
        self._counts["generated"] += 1
        reason = None
        if not request.ignore_eos and token in self.loaded.end_ids:
            reason = "eos"
        elif token in request.stop_ids:
            reason = "stop"
        elif len(one.new) == request.max_new_tokens:
            reason = "length"
        elif len(one.new) == one.room:
            reason = "context"
        if reason is not None:
            self._end(one)
        return EngineEvent(one.number, (token,), finished=reason)

    def _end(self, one: _Row) -> None:
        del self._running[one.number]
        self._cache.release(one.row)
        self._counts["finished"] += 1

    def stats(self) -> EngineStats:
        """Counters and what is held now."""
        first, self._first = tuple(self._first), []
        counts = self._counts
        return EngineStats(
            len(self._running), len(self._waiting), self._cache.num_bytes, self._cache.num_bytes, counts["prompt"], 0,
            counts["generated"], counts["finished"], 0, counts["steps"], first,
        )  # fmt: skip
