"""Requests come in, the tokens of all of them go out round by round. What a request becomes does
not depend on the others.

    submit -> waiting -> admitted: a slot and pages -> prompt read in pieces, packed with others'
           -> one token per decoding step -> events

    round     launch a decoding step, launch a prefill piece, read the tokens of the round before
    lag       on a GPU a round is launched before the tokens of the last one are read: the device
              never waits for the host. A sequence that turns out to have ended has then taken part
              in one step too many, whose token is dropped.
    memory    fixed at the start. A request waits until its prompt fits. Where decoding runs out of
              pages, the youngest sequence gives its pages back and is computed again later, with
              the same result.
    failures  what the grammar, the sampling or the media of a request raise ends this request
              alone, with the reason in its last event

The caller calls `step` as long as `busy`. Everything is done there, except that grammars are
compiled in one thread: a large one takes a second, and requests that run do not wait for it.
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
from headway.infer.engine.prefill_batches import (
    check_media,
    packed_media,
    plan_pieces,
    rotary_shifts,
)
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
    SequenceResult,
    choose_tokens,
)
from headway.infer.engine.sampler import Sampler, has_penalties
from headway.infer.engine.sequence import EngineSequence
from headway.infer.engine.speculate import (
    DraftProposer,
    NgramProposer,
    PendingGuesses,
    Speculator,
    check_guesses,
    check_speculation,
    open_draft,
    split_budget,
)
from headway.infer.engine.warm_up import AnyToken, EngineAbilities, WarmUpBatch, warm_up_batches
from headway.infer.load import LoadedModel
from headway.model.adapter.rows import load_adapters

FIRST_TOKENS = 65_536
"""Times to first tokens that are remembered until `stats` is called."""
COMPILE_SECONDS = 0.02
"""A round that has nothing but grammars to wait for ends after this time, so that its caller can
submit and cancel."""
log = logging.getLogger("headway")


class InferenceEngine:
    """Continuous batching over a paged cache: each round computes whatever requests have a slot,
    and a request that ends makes room for the next one at once."""

    def __init__(
        self,
        loaded: LoadedModel,
        options: EngineOptions,
        adapters: Mapping[str, Path] = {},
        constraints: ConstraintFactory | None = None,
    ) -> None:
        if loaded.part is not None:
            loaded.part.check(options, adapters)
        self.loaded = loaded
        self.options = options
        self.context = min(
            loaded.config.max_seq_len, options.max_context or loaded.config.max_seq_len
        )
        # Models pad their vocabulary; what the tokenizer does not know is never chosen.
        self.vocab = loaded.config.vocab
        if loaded.tokenizer is not None:
            self.vocab = loaded.tokenizer.vocab_size

        # A draft model takes its part of the cache budget before the model's own cache is built.
        speculation = options.speculation
        if speculation is not None:
            check_speculation(loaded, speculation)
        draft = None
        if speculation is not None and speculation.draft is not None:
            draft = open_draft(speculation.draft, loaded)

        # Rings are taken back to the end of a page, and over guesses that were wrong.
        spare = 0
        if speculation is not None:
            spare = options.page_tokens + speculation.tokens

        model_options = options
        draft_options = options
        if draft is not None:
            model_options, draft_options = split_budget(options, loaded, draft, self.context)
        self.cache = build_cache(loaded, model_options, self.context, spare)

        adapter_rows = None
        self._adapters: Mapping[str, int] = {}
        """The number of each adapter; 0 is the model without one."""
        if adapters:
            adapter_rows = load_adapters(loaded.model, loaded.config, adapters)
            self._adapters = adapter_rows.number

        self._constraints = constraints
        self._memory = EngineMemory(self.cache, prefix_reuse=options.prefix_reuse)
        self._device = EngineDevice(loaded, self.cache, options, self.vocab, adapter_rows)
        self._sampler = Sampler(self.cache.slots, loaded.config.vocab, loaded.device)

        self._speculator: Speculator | None = None
        if speculation is not None:
            proposer = NgramProposer()
            if draft is not None:
                proposer = DraftProposer(
                    draft, draft_options, self.cache.slots, self.context, spare
                )
            self._speculator = Speculator(proposer, speculation.tokens)

        lag = options.lag
        if lag == "auto":
            lag = loaded.device.type == "cuda"
        # Guesses are made from tokens that were read, so nothing can be launched before.
        self._lag = lag and speculation is None

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
        """Requests that wait for a slot, or for their grammar."""
        return len(self._waiting) + len(self._compiling)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile, record and allocate now; otherwise the first requests wait for it. An engine
        that works is only recorded."""
        self._device.warm_up()
        if self._speculator is not None:
            self._speculator.proposer.warm_up()
        # Made-up requests would take slots and pages from those that run.
        if self._sequences or not self._device.has_first_times:
            return

        picture_width = 0
        if self.loaded.config.vision is not None:
            picture_width = self.loaded.config.hidden_size
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
            picture_width=picture_width,
        )

        previous: WarmUpBatch | None = None
        for batch in warm_up_batches(abilities):
            if batch is not previous:
                # What an earlier batch computed would leave nothing to compute. A batch that comes
                # twice in a row is meant to find its pages.
                self.cache.forget_all()
            try:
                self._run_warm_up(batch)
            except torch.OutOfMemoryError:
                if self.loaded.part is not None:  # the other ranks would wait for this one
                    raise
                self._abandon()
                log.warning(
                    "%d requests of %d tokens at once find no memory beside the cache, and would "
                    "end the engine. Lower --cache-gib or --prefill-tokens.",
                    len(batch.requests),
                    len(batch.requests[0].prompt),
                )
            previous = batch

        # The prefixes of made-up prompts are of no use to anybody.
        self.cache.forget_all()
        self._reset_counters()

    def _run_warm_up(self, batch: WarmUpBatch) -> None:
        # Every rank that shares the layers warms up by itself, so the first one notes nothing for
        # the others.
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
        """Set all counters to zero: what a warm-up did is in none of them."""
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
        """Take a request, or refuse it with the reason; returns its number in events."""
        generates = not request.embed and request.max_new_tokens > 0
        longest_prompt = self.context
        if generates:
            longest_prompt -= 1
        if len(request.prompt) > longest_prompt:
            raise RequestTooLarge(
                f"prompt has {len(request.prompt)} tokens; the model's max_seq_len={self.context} "
                "leaves no room after it. Shorten the prompt."
            )

        # The most positions it can ever take. `_admit` relies on it: whatever is in the queue fits
        # into an empty cache.
        if request.embed:
            longest = len(request.prompt)
        else:
            longest = min(len(request.prompt) + max(1, request.max_new_tokens), self.context)
        if not self._memory.fits(longest):
            raise RequestTooLarge(
                f"the request may have {longest} tokens; the cache of {self.cache.num_bytes} bytes "
                f"has room for {self.cache.pool.num_pages * self.options.page_tokens}. Ask for "
                "fewer tokens, or give the engine more memory."
            )

        # Padding ids of the vocabulary have embeddings, so a prompt may hold them; they are never
        # chosen, so a bias may not name them.
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.loaded.config.vocab:
            raise ConfigError(
                f"prompt has an id outside the model's vocabulary of {self.loaded.config.vocab}."
            )
        if request.adapter is not None and request.adapter not in self._adapters:
            raise ConfigError(
                f"adapter is {request.adapter!r}; loaded are: "
                f"{', '.join(self._adapters) or 'none'}."
            )
        if any(token >= self.vocab for token, _ in request.sampling.logit_bias):
            raise ConfigError(f"logit_bias has an id outside the vocabulary of {self.vocab}.")
        if request.routes and not self.options.routes:
            raise ConfigError("routes is true; this engine stores no routes.")
        if request.media is not None:
            check_media(self.loaded.config, request)

        # Last: a request that can never run is refused for good, not asked to try again.
        if self.num_waiting >= self.options.max_waiting:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting; no more are taken now. Try again later."
            )
        return self._enqueue(request)

    def _enqueue(self, request: EngineRequest) -> int:
        """Queue a request that `submit` has checked, or one of a warm-up."""
        sequence = EngineSequence(
            self._next, request, self.context - len(request.prompt), self.loaded.end_ids
        )
        if request.constraint is not None:
            self._compile(sequence, request.constraint)
        else:
            self._waiting.append(sequence)

        # Only now: a grammar that was refused above leaves neither a number nor a sequence behind.
        self._next += 1
        self._sequences[sequence.number] = sequence
        return sequence.number

    def _compile(self, sequence: EngineSequence, grammar: str) -> None:
        """Compile its grammar to a constraint; it waits for a slot once that is ready."""
        if self._constraints is None:
            raise ConfigError("constraint is set; this engine has no constraint factory.")
        if self.loaded.part is not None:
            # Ranks that share the layers admit requests in the same round, however long each of
            # them compiles.
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
        """Requests whose grammar is ready wait for a slot; those whose grammar cannot be used have
        failed."""
        if not self._compiling:
            return
        # With nothing else to do, wait a little instead of spinning.
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
        sequence = self._sequences.get(request)
        if sequence is None:
            return
        if sequence in self._compiling:
            # A compilation that has begun runs to its end; nobody looks at its result.
            self._compiling.pop(sequence).cancel()
        elif sequence.slot < 0:
            self._waiting.remove(sequence)
        self._end(sequence, "cancelled")

    @torch.inference_mode()
    def step(self) -> list[EngineEvent]:
        """One round. What is ready comes out; nothing while the first tokens are on their way."""
        self._take_compiled()
        self._admit()

        # Decoding first: running requests wait for the step, new ones for a piece of their prompt.
        launched: list[PendingTokens | PendingGuesses | PendingPrefill] = []
        for pending in (self._launch_decode(), self._launch_prefill()):
            if pending is not None:
                launched.append(pending)
        self._steps += bool(launched)

        # With lag, the results of the round before are read while the device works on this one.
        if self._lag and launched:
            to_read = self._pending
            self._pending = launched
        else:
            to_read = [*self._pending, *launched]
            self._pending = []
        for pending in to_read:
            self._read(pending)

        events = self._events
        self._events = []
        return events

    def _admit(self) -> None:
        """Give slots and pages to waiting requests, in their order: nobody overtakes one that does
        not fit yet."""
        while self._waiting:
            # Where nothing runs, nothing will be given back, and what `submit` took fits.
            idle = not self._running and not self._pending
            # A page for each running sequence that may need one: without it, the next step would
            # preempt what was just admitted.
            reserve = sum(map(self._memory.may_grow, self._running))
            if not self._memory.admit(self._waiting[0], reserve):
                assert not idle, "submit refuses what does not fit"
                return

            sequence = self._waiting.popleft()
            self._running.append(sequence)
            # A preempted sequence comes back to its place: the youngest is the next to be
            # preempted.
            self._running.sort(key=lambda other: other.number)
            if not sequence.was_admitted:
                sequence.was_admitted = True
                # Pages that a preempted sequence finds when it comes back are its own work.
                sequence.cached_tokens = sequence.computed
                self._cached_tokens += sequence.cached_tokens
            if has_penalties(sequence.request.sampling):
                try:
                    self._sampler.occurrences.start(
                        sequence.slot,
                        sequence.request.prompt,
                        sequence.tokens[len(sequence.request.prompt) :],
                    )
                except Exception as problem:  # the counts of a large vocabulary may find no memory
                    self._fail(sequence, failure_line(problem))

    def _launch_decode(self) -> PendingTokens | PendingGuesses | None:
        """One more token for every sequence whose prompt is read; None where there is none."""
        rows = [sequence for sequence in self._running if sequence.is_ready]
        short = [
            sequence for sequence in rows if not self._memory.holds(sequence, sequence.computed + 1)
        ]
        for sequence in short:
            self._make_room(sequence)
        if short:  # some may have ended or given their memory back
            rows = [sequence for sequence in self._running if sequence.is_ready]
        if not rows:
            return None

        # Where no row has a guess there is nothing to check: a plain step, which may be recorded.
        if self._speculator is not None:
            guesses = self._speculator.guesses(rows, self._memory)
            if any(guesses):
                self._memory.flush()
                adapters = [
                    self._adapters.get(sequence.request.adapter or "", 0) for sequence in rows
                ]
                return check_guesses(
                    self._speculator,
                    self._device,
                    self._sampler,
                    list(zip(rows, guesses, strict=True)),
                    adapters,
                )

        self._memory.flush()
        logits = self._device.decode(
            [sequence.slot for sequence in rows], max(sequence.computed for sequence in rows) + 1
        )
        # Counted when it is launched: with lag, the next round begins before its token is read.
        for sequence in rows:
            sequence.computed += 1
        return choose_tokens(self._device, self._sampler, logits, rows, chosen=True)

    def _make_room(self, sequence: EngineSequence) -> None:
        """A page for one more token; the youngest sequences are preempted where none is left."""
        while sequence.is_ready and not self._memory.grow(sequence, sequence.computed + 1):
            # Results that are on their way may end sequences, whose pages are then free; and what
            # is preempted may have nothing on its way.
            self._read_pending()
            # The youngest may be this sequence itself: it is then no longer ready, and the loop
            # ends.
            if not sequence.ended and not self._memory.grow(sequence, sequence.computed + 1):
                self._preempt(self._running[-1])

    def _read_pending(self) -> None:
        """Wait for everything that was launched."""
        pending = self._pending
        self._pending = []
        for launched in pending:
            self._read(launched)

    def _preempt(self, sequence: EngineSequence) -> None:
        """Give its memory back; it waits as the first and is computed again. Nothing of it may be
        on its way (`_read_pending`)."""
        self._memory.release(sequence)
        self._running.remove(sequence)
        sequence.restart()
        self._waiting.appendleft(sequence)
        self._preempted += 1

    def _launch_prefill(self) -> PendingPrefill | None:
        """The next tokens of the oldest prompts, packed; None where no prompt is being read."""
        reading = [
            sequence for sequence in self._running if sequence.is_reading and not sequence.ended
        ]
        if not reading:
            return None

        self._memory.flush()
        work = plan_pieces(reading, self.options.prefill_tokens)
        media = packed_media(self.loaded, work)
        tokens = [sequence.tokens[piece.start : piece.end] for sequence, piece in work]
        adapters = [self._adapters.get(sequence.request.adapter or "", 0) for sequence, _ in work]
        if self.loaded.config.vision is not None:
            self._device.shift_rotation([piece.slot for _, piece in work], rotary_shifts(work))
        hidden = self._device.prefill([piece for _, piece in work], tokens, media, adapters)
        self._prompt_tokens += len(hidden)

        for sequence, piece in work:
            sequence.computed = piece.end
            if piece.end in sequence.keep_at:
                # another request has the same beginning up to here, or will have
                self._memory.keep(sequence, piece.end)

        complete = [sequence for sequence, _ in work if not sequence.is_reading]
        if complete:
            # From here on decoding steps count the lengths on the device.
            self.cache.set_length(
                [sequence.slot for sequence in complete],
                [sequence.computed for sequence in complete],
            )
            # Without the last token: a request that shares the prompt computes that one for its
            # first token.
            for sequence in complete:
                self._memory.keep(sequence, sequence.target - 1)
        return PendingPrefill.of(self._device, self._sampler, hidden, work)

    def _read(self, pending: PendingTokens | PendingGuesses | PendingPrefill) -> None:
        """Wait for results and turn them into events; sequences that ended meanwhile take
        nothing."""
        for result in pending.read():
            sequence = result.sequence
            sequence.in_flight -= result.was_chosen
            if sequence.ended:
                continue
            if result.error is not None:
                self._fail(sequence, result.error)
                continue
            reason: StopReason | None = None
            if result.token is not None:
                try:
                    reason = sequence.add(result.token)
                except Exception as problem:  # a constraint that cannot take its own token
                    self._fail(sequence, failure_line(problem))
                    continue
                self._generated += 1
            elif sequence.max_generated == 0:
                # an embedding, or the scores of a prompt alone
                reason = "length"
            self._events.append(self._event(result, reason))
            if reason is not None:
                self._forget(sequence)

    def _event(self, result: SequenceResult, reason: StopReason | None) -> EngineEvent:
        """What a client learns: the first event also says what the prompt had, the last one what
        speculation did."""
        sequence = result.sequence
        cached_tokens = 0
        prompt_logprobs = None
        if not sequence.sent_any:
            sequence.sent_any = True
            self._first.append(time.monotonic() - sequence.submitted)
            cached_tokens = sequence.cached_tokens
            if sequence.request.prompt_logprobs:
                prompt_logprobs = tuple(sequence.prompt_logprobs)
        routes = None
        if reason is not None and sequence.request.routes:
            routes = self.cache.routes_of(sequence.slot, len(sequence.tokens) - 1)
        return EngineEvent(
            sequence.number,
            tokens=() if result.token is None else (result.token,),
            logprobs=None if result.logprobs is None else (result.logprobs,),
            finished=reason,
            embedding=result.embedding,
            cached_tokens=cached_tokens,
            prompt_logprobs=prompt_logprobs,
            proposed_tokens=0 if reason is None else sequence.proposed,
            accepted_tokens=0 if reason is None else sequence.accepted,
            routes=routes,
        )

    def _fail(self, sequence: EngineSequence, error: str) -> None:
        """End a request that cannot be answered, for a reason of its own."""
        log.warning("request %d failed alone: %s", sequence.number, error)
        self._end(sequence, "error", error)

    def _end(self, sequence: EngineSequence, reason: StopReason, error: str | None = None) -> None:
        """Report the last event of a request that gains no token with it, and forget it."""
        self._events.append(EngineEvent(sequence.number, (), finished=reason, error=error))
        self._forget(sequence)

    def _forget(self, sequence: EngineSequence) -> None:
        """Give back all it has. Results that are still on their way are dropped when they are
        read."""
        sequence.ended = True
        self._memory.release(sequence)
        if sequence in self._running:
            self._running.remove(sequence)
        del self._sequences[sequence.number]
        self._finished += 1

    def stats(self) -> EngineStats:
        """Counters since the start, and the memory in use now. Times to first tokens are given out
        once."""
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
