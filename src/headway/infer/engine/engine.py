"""Requests come in, the tokens of all of them go out round by round. What a request becomes does not depend on the others.

    submit -> waiting -> admitted: a slot, pages -> prompt read in pieces, packed with others' -> one token per decoding step -> events

    round     launch a decoding step, launch a prefill piece, read the tokens of the round before
    lag       on a GPU a round is launched before the tokens of the last one are read: the device never waits for the host. A sequence
              that turns out to have ended has then taken part in one step too many, whose token is dropped.
    memory    fixed at the start. A request waits until its prompt fits. Where decoding runs out of pages, the youngest sequence gives
              its pages back and is computed again later, with the same result.
    failures  what the grammar, the sampling or the media of a request raise ends this request alone, with the reason in its last event

The caller calls `step` as long as `busy`. Everything is done there, except that grammars are compiled in one thread: a large one takes a
second, and requests that run do not wait for it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from pathlib import Path

import torch

from headway.errors import ConfigError
from headway.infer.engine.device import EngineDevice, bucket_sizes
from headway.infer.engine.memory import EngineMemory, build_cache
from headway.infer.engine.request import (
    ConstraintFactory,
    EngineEvent,
    EngineOptions,
    EngineRequest,
    EngineStats,
    QueueFull,
    RequestTooLarge,
    StopReason,
    TokenConstraint,
    failure_line,
)
from headway.infer.engine.results import (
    LOGPROB_TOKENS,
    PendingPrefill,
    PendingTokens,
    choose_tokens,
)
from headway.infer.engine.rounds import check_media, packed_media, plan_pieces
from headway.infer.engine.sampler import Sampler, has_penalties
from headway.infer.engine.sequence import EngineSequence
from headway.infer.engine.speculate import (
    DraftProposer,
    NgramProposer,
    PendingGuesses,
    Speculator,
    check_guesses,
    open_draft,
    split_budget,
)
from headway.infer.engine.warm_up import AnyToken, EngineAbilities, WarmUpBatch, warm_up_batches
from headway.infer.load import LoadedModel
from headway.model.adapter.rows import load_adapters

FIRST_TOKENS = 65_536
"""Times to first tokens that are remembered until `stats` is called."""
COMPILE_SECONDS = 0.02
"""A round that has nothing but grammars to wait for ends after this time, so that its caller can submit and cancel."""
log = logging.getLogger("headway")


class InferenceEngine:
    """Continuous batching over a paged cache."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        adapters: Mapping[str, Path] = {},
        constraints: ConstraintFactory | None = None,
    ) -> None:
        if loaded.part is not None:
            loaded.part.check(options, adapters)
        self.loaded, self.options = loaded, options
        self.context = min(
            loaded.config.max_seq_len, options.max_context or loaded.config.max_seq_len
        )
        self.vocab = (
            loaded.config.vocab if loaded.tokenizer is None else loaded.tokenizer.vocab_size
        )
        guess = options.speculation
        draft = None if guess is None or guess.draft is None else open_draft(guess.draft, loaded)
        # Rings are taken back to the end of a page, and over guesses that were wrong.
        spare = 0 if guess is None else options.page_tokens + guess.tokens
        own, drafts = (
            (options, options)
            if draft is None
            else split_budget(options, loaded, draft, self.context)
        )
        self.cache = build_cache(loaded, own, self.context, spare)
        rows = load_adapters(loaded.model, loaded.config, adapters) if adapters else None
        self._adapters, self._constraints = {} if rows is None else rows.number, constraints
        self._memory = EngineMemory(self.cache, prefix_reuse=options.prefix_reuse)
        self._device = EngineDevice(loaded, self.cache, options, self.vocab, rows)
        self._sampler = Sampler(self.cache.slots, loaded.config.vocab, loaded.device)
        self._speculator: Speculator | None = None
        if guess is not None:
            proposer = (
                NgramProposer()
                if draft is None
                else DraftProposer(draft, drafts, self.cache.slots, self.context, spare)
            )
            self._speculator = Speculator(proposer, guess.tokens)
        self._lag = loaded.device.type == "cuda" if options.lag == "auto" else options.lag
        self._lag = self._lag and guess is None  # guesses are made from tokens that were read
        self._waiting: deque[EngineSequence] = deque()
        self._compiling: dict[EngineSequence, Future[TokenConstraint]] = {}
        """Requests whose grammar is not ready."""
        self._compiler: ThreadPoolExecutor | None = None
        self._running: list[EngineSequence] = []
        """Oldest first."""
        self._sequences: dict[int, EngineSequence] = {}
        self._pending: list[PendingTokens | PendingGuesses | PendingPrefill] = []
        self._events: list[EngineEvent] = []
        self._reset_counters()

    @property
    def busy(self) -> bool:
        """A request is waiting or running, or has an event."""
        return bool(self._sequences or self._events)

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for one, or for their grammar."""
        return len(self._waiting) + len(self._compiling)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile, record and allocate now; otherwise the first requests wait for it. An engine that works is only recorded."""
        self._device.warm_up()
        if self._speculator is not None:
            self._speculator.proposer.warm_up()
        if self._sequences or not self._device.has_first_times:
            return
        abilities = EngineAbilities(
            context=self.context,
            room=self.cache.pool.num_pages * self.options.page_tokens,
            round_tokens=self.options.prefill_tokens,
            sizes=bucket_sizes(self.cache.slots),
            vocab=self.vocab,
            guesses=0 if self._speculator is None else self._speculator.most,
            scored_tokens=LOGPROB_TOKENS,
            adapters=tuple(self._adapters),
            media=self.loaded.config.media,
        )
        before: WarmUpBatch | None = None
        for batch in warm_up_batches(abilities):
            if batch is not before:
                # What an earlier batch computed would leave nothing to compute.
                self.cache.forget_all()
            try:
                self._run_warm_up(batch)
            except torch.OutOfMemoryError:
                if self.loaded.part is not None:  # the other ranks would wait for this one
                    raise
                self._abandon()
                log.warning(
                    "%d requests of %d tokens at once find no memory beside the cache, and would end the engine. "
                    "Lower --cache-gib or --prefill-tokens.",
                    len(batch.requests),
                    len(batch.requests[0].prompt),
                )
            before = batch
        self.cache.forget_all()
        self._reset_counters()

    def _run_warm_up(self, batch: WarmUpBatch) -> None:
        # Every rank that shares the layers warms up by itself, so the first one notes nothing for the others.
        for request in batch.requests:
            number = self._enqueue(request)
            if batch.masked:
                self._sequences[number].constraint = AnyToken()
        while self.busy:
            for event in InferenceEngine.step(self):
                if event.error is not None:
                    log.warning(
                        "requests like %s will fail: %s", batch.requests[0].sampling, event.error
                    )

    def _abandon(self) -> None:
        """Forget everything that was submitted, in the middle of a round."""
        self._pending.clear()
        self._waiting.clear()
        for sequence in list(self._sequences.values()):
            self._forget(sequence)
        self._events.clear()

    def _reset_counters(self) -> None:
        """As if no request had come."""
        self._next = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated = 0
        self._finished = 0
        self._preempted = 0
        self._steps = 0
        self._first: deque[float] = deque(maxlen=FIRST_TOKENS)
        if self._speculator is not None:
            self._speculator.proposed = 0
            self._speculator.accepted = 0

    def submit(self, request: EngineRequest) -> int:
        """The number of the request in events."""
        longest = (
            len(request.prompt)
            if request.embed
            else min(len(request.prompt) + max(1, request.max_new_tokens), self.context)
        )
        if len(request.prompt) > self.context - (
            0 if request.embed or request.max_new_tokens == 0 else 1
        ):
            raise RequestTooLarge(
                f"prompt has {len(request.prompt)} tokens; the model's max_seq_len={self.context} leaves no room after it. "
                "Shorten the prompt."
            )
        if not self._memory.fits(longest):
            raise RequestTooLarge(
                f"the request may have {longest} tokens; the cache of {self.cache.num_bytes} bytes has room for "
                f"{self.cache.pool.num_pages * self.options.page_tokens}. Ask for fewer tokens, or give the engine more memory."
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.loaded.config.vocab:
            raise ConfigError(
                f"prompt has an id outside the model's vocabulary of {self.loaded.config.vocab}."
            )
        if request.adapter is not None and request.adapter not in self._adapters:
            raise ConfigError(
                f"adapter is {request.adapter!r}; loaded are: {', '.join(self._adapters) or 'none'}."
            )
        if any(token >= self.vocab for token, _ in request.sampling.logit_bias):
            raise ConfigError(f"logit_bias has an id outside the vocabulary of {self.vocab}.")
        if request.media is not None:
            check_media(self.loaded.config.media, request)
        if self.num_waiting >= self.options.max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting; no more are taken now. Try again later."
            )
        return self._enqueue(request)

    def _enqueue(self, request: EngineRequest) -> int:
        """Take a request that was checked."""
        sequence = EngineSequence(
            self._next, request, self.context - len(request.prompt), self.loaded.end_ids
        )
        if request.constraint is not None:
            self._compile(sequence, request.constraint)
        else:
            self._waiting.append(sequence)
        self._next += 1
        self._sequences[sequence.number] = sequence
        return sequence.number

    def _compile(self, sequence: EngineSequence, grammar: str) -> None:
        """Make its constraint; it waits for a slot once that is ready."""
        if self._constraints is None:
            raise ConfigError("constraint is set; this engine has no constraint factory.")
        if self.loaded.part is not None:
            # Ranks that share the layers admit requests in the same round, however long each of them compiles.
            try:
                sequence.constraint = self._constraints(grammar)
            except Exception as problem:
                raise ConfigError(failure_line(problem)) from problem
            self._waiting.append(sequence)
            return
        if self._compiler is None:
            self._compiler = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._compiling[sequence] = self._compiler.submit(self._constraints, grammar)

    def _take_compiled(self) -> None:
        """Requests whose grammar is ready wait for a slot; those whose grammar cannot be used have failed."""
        if not self._compiling:
            return
        if len(self._compiling) == len(self._sequences) and not self._events:
            wait_for(self._compiling.values(), COMPILE_SECONDS, FIRST_COMPLETED)
        for sequence, constraint in list(self._compiling.items()):
            if not constraint.done():
                continue
            del self._compiling[sequence]
            try:
                sequence.constraint = constraint.result()
            except Exception as problem:
                self._fail(sequence, failure_line(problem))
            else:
                self._waiting.append(sequence)

    def cancel(self, request: int) -> None:
        """End a request; its last event says so. One that has ended is left alone."""
        one = self._sequences.get(request)
        if one is None:
            return
        if one in self._compiling:
            self._compiling.pop(one).cancel()
        elif one.slot < 0:
            self._waiting.remove(one)
        self._end(one, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """One round. What is ready comes out; nothing while the first tokens are on their way."""
        self._take_compiled()
        self._admit()
        launched = [
            one for one in (self._launch_decode(), self._launch_prefill()) if one is not None
        ]
        self._steps += bool(launched)
        if self._lag and launched:
            launched, self._pending = self._pending, launched
        else:
            launched, self._pending = [*self._pending, *launched], []
        for pending in launched:
            self._read(pending)
        events, self._events = self._events, []
        return events

    def _admit(self) -> None:
        while self._waiting:
            # Where nothing runs, nothing will be given back, and what `submit` took fits.
            idle = not self._running and not self._pending
            if not self._memory.admit(
                self._waiting[0], reserve=sum(map(self._memory.may_grow, self._running))
            ):
                assert not idle, "submit refuses what does not fit"
                return
            one = self._waiting.popleft()
            self._running.append(one)
            self._running.sort(key=lambda other: other.number)
            if not one.was_admitted:
                one.was_admitted = True
                # Pages that a preempted sequence finds when it comes back are its own work.
                one.cached_tokens = one.computed
                self._cached_tokens += one.cached_tokens
            if has_penalties(one.request.sampling):
                try:
                    self._sampler.occurrences.start(
                        one.slot, one.request.prompt, one.tokens[len(one.request.prompt) :]
                    )
                except Exception as problem:  # the counts of a large vocabulary may find no memory
                    self._fail(one, failure_line(problem))

    def _launch_decode(self) -> PendingTokens | PendingGuesses | None:
        rows = [one for one in self._running if one.is_ready]
        short = [one for one in rows if not self._memory.holds(one, one.computed + 1)]
        for one in short:
            self._make_room(one)
        if short:  # some may have ended or given their memory back
            rows = [one for one in self._running if one.is_ready]
        if not rows:
            return None
        if self._speculator is not None:
            guesses = self._speculator.guesses(rows, self._memory)
            if any(guesses):
                self._memory.flush()
                adapters = [self._adapters.get(one.request.adapter or "", 0) for one in rows]
                return check_guesses(
                    self._speculator,
                    self._device,
                    self._sampler,
                    list(zip(rows, guesses, strict=True)),
                    adapters,
                )
        self._memory.flush()
        logits = self._device.decode(
            [one.slot for one in rows], max(one.computed for one in rows) + 1
        )
        for one in rows:
            one.computed += 1
        return choose_tokens(self._device, self._sampler, logits, rows, chosen=True)

    def _make_room(self, one: EngineSequence) -> None:
        """A page for one more token; the youngest sequences are preempted where none is left."""
        while one.is_ready and not self._memory.grow(one, one.computed + 1):
            self._read_pending()
            if not one.ended and not self._memory.grow(one, one.computed + 1):
                self._preempt(self._running[-1])

    def _read_pending(self) -> None:
        """Wait for everything that was launched."""
        pending, self._pending = self._pending, []
        for some in pending:
            self._read(some)

    def _preempt(self, one: EngineSequence) -> None:
        """Give its memory back; it waits as the first and is computed again. Nothing of it may be on its way (`_read_pending`)."""
        self._memory.release(one)
        self._running.remove(one)
        one.restart()
        self._waiting.appendleft(one)
        self._preempted += 1

    def _launch_prefill(self) -> PendingPrefill | None:
        reading = [one for one in self._running if one.is_reading and not one.ended]
        if not reading:
            return None
        self._memory.flush()
        work = plan_pieces(reading, self.options.prefill_tokens)
        media = packed_media(self.loaded, work)
        tokens = [one.tokens[piece.start : piece.end] for one, piece in work]
        adapters = [self._adapters.get(one.request.adapter or "", 0) for one, _ in work]
        hidden = self._device.prefill([piece for _, piece in work], tokens, media, adapters)
        self._prompt_tokens += len(hidden)
        for one, piece in work:
            one.computed = piece.end
            if piece.end == one.keep_at:
                self._memory.keep(one, piece.end)
        complete = [one for one, _ in work if not one.is_reading]
        if complete:
            self.cache.set_length(
                [one.slot for one in complete], [one.computed for one in complete]
            )
            for one in complete:
                self._memory.keep(one, one.target - 1)
        return PendingPrefill.of(self._device, self._sampler, hidden, work)

    def _read(self, pending: PendingTokens | PendingGuesses | PendingPrefill) -> None:
        for result in pending.read():
            one = result.sequence
            one.in_flight -= result.was_chosen
            if one.ended:
                continue
            if result.error is not None:
                self._fail(one, result.error)
                continue
            reason: StopReason | None = None
            if result.token is not None:
                try:
                    reason = one.add(result.token)
                except Exception as problem:  # a constraint that cannot take its own token
                    self._fail(one, failure_line(problem))
                    continue
                self._generated += 1
            elif one.most == 0:
                reason = "length"
            first = not one.sent_any
            one.sent_any = True
            if first:
                self._first.append(time.monotonic() - one.submitted)
            self._events.append(
                EngineEvent(
                    one.number,
                    () if result.token is None else (result.token,),
                    None if result.logprobs is None else (result.logprobs,),
                    reason,
                    result.embedding,
                    one.cached_tokens if first else 0,
                    tuple(one.prompt_logprobs) if first and one.request.prompt_logprobs else None,
                    proposed_tokens=0 if reason is None else one.proposed,
                    accepted_tokens=0 if reason is None else one.accepted,
                )
            )
            if reason is not None:
                self._forget(one)

    def _fail(self, one: EngineSequence, error: str) -> None:
        """End a request that cannot be answered, for a reason of its own."""
        log.warning("request %d failed alone: %s", one.number, error)
        self._end(one, "error", error)

    def _end(self, one: EngineSequence, reason: StopReason, error: str | None = None) -> None:
        self._events.append(EngineEvent(one.number, (), finished=reason, error=error))
        self._forget(one)

    def _forget(self, one: EngineSequence) -> None:
        one.ended = True
        self._memory.release(one)
        if one in self._running:
            self._running.remove(one)
        del self._sequences[one.number]
        self._finished += 1

    def stats(self) -> EngineStats:
        """Counters, and what is held now."""
        first = tuple(self._first)
        self._first.clear()
        return EngineStats(
            running=len(self._running),
            waiting=self.num_waiting,
            cache_bytes_used=self._memory.bytes_used(),
            cache_bytes_budget=self.cache.num_bytes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated,
            finished=self._finished,
            preempted=self._preempted,
            steps=self._steps,
            first_token_seconds=first,
            proposed_tokens=0 if self._speculator is None else self._speculator.proposed,
            accepted_tokens=0 if self._speculator is None else self._speculator.accepted,
        )
