"""Speculative decoding: some next tokens of each sequence are guessed, and one forward checks all of them.

    guess     t1 t2 t3         from the sequence itself (n-grams), or by a small model of the same tokenizer
    forward   last t1 t2 t3    as a piece of a prompt: its four hidden states say what follows each
    choose    c1 c2 c3 c4      with the very draws that single steps would use
    accept    while c_i = t_i; the first c_i that differs is the last new token

The result is exact: each chosen token is the one a single step would choose, because it has the same tokens before it and the same draw.
So neither the distribution nor the text of a seed changes; only rounding of the forward differs. A guess is right with the probability
the model gives it. A small model chooses its guesses with the same draws, which makes the two agree as often as they can.

Keys of guesses that were wrong stay in the cache and are overwritten; rings have room for them (`spare`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from headway.errors import ConfigError
from headway.infer.engine.device import EngineDevice
from headway.infer.engine.memory import EngineMemory, build_cache
from headway.infer.engine.request import EngineOptions
from headway.infer.engine.results import (
    PendingTokens,
    SequenceResult,
    choose_tokens,
    chosen_token,
    draw_rows,
)
from headway.infer.engine.sampler import RowChoice, Sampler, has_penalties
from headway.infer.engine.sequence import EngineSequence
from headway.infer.load import LoadedModel, load_model
from headway.model.paged_cache import CacheShape
from headway.model.paged_layer import PrefillPiece

GuessedRow = tuple[EngineSequence, list[int]]
GRAMS = (4, 3, 2)
"""Lengths of the last tokens that are looked up, the longest first."""


class Proposer(Protocol):
    """Guesses next tokens."""

    def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
        """At most `counts` tokens for each row; fewer or none where it has no guess."""
        ...

    def warm_up(self) -> None:
        """Do what the first guesses would wait for."""
        ...


class NgramProposer:
    """Guesses that what followed the last tokens before follows again."""

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[EngineSequence, _Grams] = WeakKeyDictionary()

    def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
        """From each row's own tokens."""
        found: list[list[int]] = []
        for one, count in zip(rows, counts, strict=True):
            grams = self._known.setdefault(one, _Grams())
            found.append(grams.following(one.tokens, count))
        return found

    def warm_up(self) -> None:
        """Nothing: tokens are looked up on the host."""


class _Grams:
    """Where each run of tokens of a sequence ended last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._done = 0

    def following(self, tokens: list[int], count: int) -> list[int]:
        # The runs that end at the last token are entered later: they would find themselves.
        for end in range(self._done + 1, len(tokens)):
            for size in GRAMS:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._done = max(self._done, len(tokens) - 1)
        for size in GRAMS:
            at = self._after.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if at is not None:
                # A run that repeats itself is longer than what is known of it: the guesses are read again.
                period = len(tokens) - at
                return [tokens[at + step % period] for step in range(count)]
        return []


class DraftProposer:
    """Guesses of a small model, which has a cache of its own."""

    def __init__(
        self, draft: LoadedModel, options: EngineOptions, slots: int, context: int, spare: int
    ) -> None:
        self._context = min(context, draft.config.max_seq_len)
        own = replace(options, max_running=slots, prefix_reuse=False, speculation=None)
        self._cache = build_cache(draft, own, self._context, spare)
        self._memory = EngineMemory(self._cache, prefix_reuse=False)
        vocab = draft.config.vocab if draft.tokenizer is None else draft.tokenizer.vocab_size
        self._device = EngineDevice(draft, self._cache, own, vocab)
        self._sampler = Sampler(self._cache.slots, draft.config.vocab, draft.device)
        self._most = options.prefill_tokens
        self._shadows: dict[EngineSequence, EngineSequence] = {}

    def warm_up(self) -> None:
        """Record the small model's steps; the engine's own warm-up runs its prompts."""
        self._device.warm_up()

    @torch.inference_mode()
    def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
        """The tokens that the small model would choose."""
        for one in [one for one in self._shadows if one.ended or one.slot < 0]:
            self._memory.release(self._shadows.pop(one))
        found: list[list[int]] = [[] for _ in rows]
        work = [
            (place, shadow)
            for place, one in enumerate(rows)
            if (shadow := self._shadow(one, counts[place])) is not None
        ]
        if not work:
            return found
        self._memory.flush()
        logits = self._read([shadow for _, shadow in work])
        step = 0
        while work:
            tokens = self._choose(logits, [(rows[place], shadow) for place, shadow in work], step)
            for (place, _), token in zip(work, tokens, strict=True):
                found[place].append(token)
            step += 1
            work = [(place, shadow) for place, shadow in work if counts[place] > step]
            if work:
                slots = [shadow.slot for _, shadow in work]
                logits = self._device.decode(slots, max(shadow.computed for _, shadow in work) + 1)
                for _, shadow in work:
                    shadow.computed += 1
        return found

    def _shadow(self, one: EngineSequence, count: int) -> EngineSequence | None:
        """The sequence in the small model's cache, with room for `count` guesses; None where it cannot follow."""
        if count == 0 or one.request.media is not None or len(one.tokens) + count > self._context:
            return None
        shadow = self._shadows.get(one)
        if shadow is None:
            shadow = EngineSequence(one.number, one.request, 1, frozenset())
            shadow.target = len(one.tokens)
            if not self._memory.admit(shadow, reserve=0):
                return None
            self._shadows[one] = shadow
        shadow.tokens = one.tokens
        # What follows the tokens that turned out right is of guesses that were wrong.
        shadow.computed = min(shadow.computed, len(one.tokens) - 1)
        return shadow if self._memory.grow(shadow, len(one.tokens) + count) else None

    def _read(self, rows: list[EngineSequence]) -> torch.Tensor:
        """Compute all tokens that the cache does not have; logits [n,V] after the last ones."""
        last: dict[EngineSequence, torch.Tensor] = {}
        while reading := [one for one in rows if one.computed < len(one.tokens)]:
            room, pieces, some = self._most, list[PrefillPiece](), list[EngineSequence]()
            for one in reading:
                count = min(room, len(one.tokens) - one.computed)
                if count:
                    pieces.append(PrefillPiece(one.slot, one.computed, count))
                    some.append(one)
                    room -= count
            hidden = self._device.prefill(
                pieces,
                [
                    one.tokens[piece.start : piece.end]
                    for one, piece in zip(some, pieces, strict=True)
                ],
            )
            end = 0
            for one, piece in zip(some, pieces, strict=True):
                end += piece.count
                one.computed = piece.end
                last[one] = hidden[end - 1]
        self._cache.set_length([one.slot for one in rows], [one.computed for one in rows])
        return self._device.logits(torch.stack([last[one] for one in rows]))

    def _choose(
        self, logits: torch.Tensor, work: Sequence[tuple[EngineSequence, EngineSequence]], step: int
    ) -> list[int]:
        choices = [_choice(one, step, shadow.slot) for one, shadow in work]
        tokens, _ = draw_rows(self._sampler, logits, range(len(choices)), choices)
        tokens = tokens.clamp(min=0)  # a row without a token has any guess
        self._device.last_token[
            torch.tensor([shadow.slot for _, shadow in work], device=tokens.device)
        ] = tokens
        return tokens.tolist()


def _choice(one: EngineSequence, step: int, slot: int) -> RowChoice:
    """How the token `step` positions after the next one is chosen."""
    sampling = one.request.sampling
    draw = (
        0.0 if sampling.temperature == 0 else sampling.draw(one.request.key, len(one.tokens) + step)
    )
    return RowChoice(slot, sampling, draw)


class Speculator:
    """Guesses for the rows of a decoding step, and what became of them."""

    def __init__(self, proposer: Proposer, most: int) -> None:
        self.proposer, self.most = proposer, most
        self.proposed = self.accepted = 0

    def guesses(self, rows: Sequence[EngineSequence], memory: EngineMemory) -> list[list[int]]:
        """Of each row. Rows whose tokens depend on more than logits and a draw have none."""
        counts = [self._count(one) for one in rows]
        found = self.proposer.propose(rows, counts) if any(counts) else [[] for _ in rows]
        return [
            some if not some or memory.grow(one, one.computed + 1 + len(some)) else []
            for one, some in zip(rows, found, strict=True)
        ]

    def _count(self, one: EngineSequence) -> int:
        request = one.request
        if (
            one.constraint is not None
            or request.logprobs is not None
            or has_penalties(request.sampling)
        ):
            return 0
        if one.guesses < 0:
            one.guesses = self.most
        return min(one.guesses, one.most - one.num_generated - 1)

    def checked(self, one: EngineSequence, proposed: int, accepted: int) -> None:
        """Guess more where all were right, fewer where half or more were wrong."""
        self.proposed, self.accepted = self.proposed + proposed, self.accepted + accepted
        one.proposed, one.accepted = one.proposed + proposed, one.accepted + accepted
        if accepted == proposed:
            one.guesses = min(self.most, one.guesses * 2)
        elif 2 * accepted <= proposed:
            one.guesses = max(1, one.guesses // 2)


class PendingGuesses:
    """Rows that took part in one check: those with guesses gain one token or more, the others one."""

    def __init__(
        self,
        speculator: Speculator,
        device: EngineDevice,
        rows: list[tuple[EngineSequence, list[int]]],
        tokens: torch.Tensor,
    ) -> None:
        self._speculator, self._device, self._rows, self._tokens = speculator, device, rows, tokens
        self.plain: PendingTokens | None = None

    def read(self) -> list[SequenceResult]:
        """Every new token, those of a row in order."""
        chosen: list[int] = self._tokens.tolist()
        found: list[SequenceResult] = []
        ends: list[tuple[int, int, int]] = []
        begin = 0
        for one, guesses in self._rows:
            some = chosen[begin : begin + len(guesses) + 1]
            begin += len(some)
            right = next(
                (place for place, guess in enumerate(guesses) if some[place] != guess), len(guesses)
            )
            new = some[: right + 1]
            self._speculator.checked(one, len(guesses), right)
            one.computed += len(new)
            one.in_flight += len(new)
            found += [chosen_token(one, token) for token in new]
            ends.append((one.slot, max(new[-1], 0), one.computed))
        if ends:
            slots, last, lengths = zip(*ends, strict=True)
            device = self._device.cache.device
            self._device.last_token[torch.tensor(slots, device=device)] = torch.tensor(
                last, device=device
            )
            self._device.cache.set_length(slots, lengths)
        return found + ([] if self.plain is None else self.plain.read())


def check_guesses(
    speculator: Speculator,
    device: EngineDevice,
    sampler: Sampler,
    work: Sequence[GuessedRow],
    adapters: Sequence[int],
) -> PendingGuesses:
    """One forward over the last token and the guesses of every row, each with its adapter."""
    pieces, tokens, begins, end = list[PrefillPiece](), list[list[int]](), list[int](), 0
    for one, guesses in work:
        count = 1 + len(guesses)
        pieces.append(PrefillPiece(one.slot, one.computed, count))
        tokens.append([one.tokens[-1], *guesses])
        begins.append(end)
        end += count
    logits = device.logits(device.prefill(pieces, tokens, adapters=adapters))
    guessed = [(one, guesses) for one, guesses in work if guesses]
    places = [
        begin + step
        for begin, (_, guesses) in zip(begins, work, strict=True)
        if guesses
        for step in range(len(guesses) + 1)
    ]
    choices = [
        _choice(one, step, one.slot) for one, guesses in guessed for step in range(len(guesses) + 1)
    ]
    drawn, _ = draw_rows(sampler, logits, places, choices)
    pending = PendingGuesses(speculator, device, guessed, device.agree(drawn))
    others = [
        (one, begin) for begin, (one, guesses) in zip(begins, work, strict=True) if not guesses
    ]
    if others:
        plain = [one for one, _ in others]
        for one in plain:
            one.computed += 1
        device.cache.set_length([one.slot for one in plain], [one.computed for one in plain])
        pending.plain = choose_tokens(
            device,
            sampler,
            logits[torch.tensor([begin for _, begin in others], device=logits.device)],
            plain,
        )
    return pending


def open_draft(path: str, loaded: LoadedModel) -> LoadedModel:
    """The small model on the device of the large one; refused if its tokenizer differs."""
    draft = load_model(path, device=loaded.device, dtype=loaded.model.head_weight.dtype)
    if draft.config.media is not None:
        raise ConfigError(
            f"--speculate is {path}, which takes pictures and sounds. Give a model of text."
        )
    same = (
        draft.tokenizer is not None
        and loaded.tokenizer is not None
        and draft.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    )
    if not same:
        raise ConfigError(f"--speculate is {path}, whose tokenizer is not that of {loaded.path}; guesses would be other tokens. "
                          "Give a model trained with the same tokenizer, or ngram.")  # fmt: skip
    return draft


def split_budget(
    options: EngineOptions, loaded: LoadedModel, draft: LoadedModel, context: int
) -> tuple[EngineOptions, EngineOptions]:
    """The options with the cache budget shared between the two models, by what one sequence takes in each."""
    if options.cache_bytes is None:
        return options, options
    sizes: list[int] = []
    for one in (loaded, draft):
        shape = CacheShape(
            one.config, one.masks, context, options.page_tokens, one.model.head_weight.dtype
        )
        sizes.append(shape.page_bytes * shape.pages_per_slot + shape.ring_bytes)
    own = options.cache_bytes * sizes[1] // sum(sizes)
    return replace(options, cache_bytes=options.cache_bytes - own), replace(
        options, cache_bytes=own
    )
