"""Speculative decoding: some next tokens of each sequence are guessed, and one forward checks all
of them.

    guess     t1 t2 t3         from the sequence itself (n-grams), or by a small model of the same
                               tokenizer
    forward   last t1 t2 t3    as a piece of a prompt: its four hidden states say what follows each
    choose    c1 c2 c3 c4      with the very draws that single steps would use
    accept    while c_i = t_i; the first c_i that differs is the last new token

The result is exact: each chosen token is the one a single step would choose, because it has the
same tokens before it and the same draw. So neither the distribution nor the text of a seed changes;
only rounding of the forward differs. A guess is right with the probability the model gives it. A
small model chooses its guesses with the same draws, which makes the two agree as often as they can.

Keys of guesses that were wrong stay in the cache and are overwritten; rings have room for them
(`spare`).
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
from headway.infer.engine.request import EngineOptions, Speculation
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
        # Weak: what is known of a sequence goes when the engine forgets it.
        self._known: WeakKeyDictionary[EngineSequence, _Grams] = WeakKeyDictionary()

    def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
        """From each row's own tokens."""
        guesses: list[list[int]] = []
        for sequence, count in zip(rows, counts, strict=True):
            grams = self._known.setdefault(sequence, _Grams())
            guesses.append(grams.following(sequence.tokens, count))
        return guesses

    def warm_up(self) -> None:
        """Nothing: tokens are looked up on the host."""


class _Grams:
    """Where each run of tokens of a sequence ended last."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._done = 0

    def following(self, tokens: list[int], count: int) -> list[int]:
        """The `count` tokens that followed the last time the sequence ended like this; [] where it
        never did."""
        # The runs that end at the last token are entered later: they would find themselves.
        for end in range(self._done + 1, len(tokens)):
            for size in GRAMS:
                if size <= end:
                    self._after[tuple(tokens[end - size : end])] = end
        self._done = max(self._done, len(tokens) - 1)

        # The longest match is the best evidence, so it is tried first.
        for size in GRAMS:
            end_before = None
            if size <= len(tokens):
                end_before = self._after.get(tuple(tokens[-size:]))
            if end_before is not None:
                # It ended there before, and these tokens followed. A run that repeats itself is
                # longer than what is known of it: the guesses are read again.
                period = len(tokens) - end_before
                return [tokens[end_before + step % period] for step in range(count)]
        return []


class DraftProposer:
    """Guesses of a small model, which has a cache of its own."""

    def __init__(
        self, draft: LoadedModel, options: EngineOptions, slots: int, context: int, spare: int
    ) -> None:
        self._context = min(context, draft.config.max_seq_len)
        # As many slots as the engine has, so that every row can have a shadow.
        draft_options = replace(options, max_running=slots, prefix_reuse=False, speculation=None)
        self._cache = build_cache(draft, draft_options, self._context, spare)
        self._memory = EngineMemory(self._cache, prefix_reuse=False)
        vocab = draft.config.vocab if draft.tokenizer is None else draft.tokenizer.vocab_size
        self._device = EngineDevice(draft, self._cache, draft_options, vocab)
        self._sampler = Sampler(self._cache.slots, draft.config.vocab, draft.device)
        self._most = options.prefill_tokens
        self._shadows: dict[EngineSequence, EngineSequence] = {}

    def warm_up(self) -> None:
        """Record the small model's steps; the engine's own warm-up runs its prompts."""
        self._device.warm_up()

    @torch.inference_mode()
    def propose(self, rows: Sequence[EngineSequence], counts: Sequence[int]) -> list[list[int]]:
        """The tokens that the small model would choose."""
        # Sequences that have ended or were preempted since the last guesses.
        for sequence in [
            sequence for sequence in self._shadows if sequence.ended or sequence.slot < 0
        ]:
            self._memory.release(self._shadows.pop(sequence))

        guesses: list[list[int]] = [[] for _ in rows]
        work = [
            (row, shadow)
            for row, sequence in enumerate(rows)
            if (shadow := self._shadow(sequence, counts[row])) is not None
        ]
        if not work:
            return guesses
        self._memory.flush()

        # One token of every row at a time; rows leave when they have as many guesses as they asked
        # for.
        logits = self._read([shadow for _, shadow in work])
        step = 0
        while work:
            tokens = self._choose(logits, [(rows[row], shadow) for row, shadow in work], step)
            for (row, _), token in zip(work, tokens, strict=True):
                guesses[row].append(token)
            step += 1
            work = [(row, shadow) for row, shadow in work if counts[row] > step]
            if work:
                slots = [shadow.slot for _, shadow in work]
                logits = self._device.decode(slots, max(shadow.computed for _, shadow in work) + 1)
                for _, shadow in work:
                    shadow.computed += 1
        return guesses

    def _shadow(self, sequence: EngineSequence, count: int) -> EngineSequence | None:
        """The sequence in the small model's cache, with room for `count` guesses; None where it
        cannot follow."""
        # The small model reads text alone, and its context may be shorter.
        if (
            count == 0
            or sequence.request.media is not None
            or len(sequence.tokens) + count > self._context
        ):
            return None
        shadow = self._shadows.get(sequence)
        if shadow is None:
            shadow = EngineSequence(sequence.number, sequence.request, 1, frozenset())
            shadow.target = len(sequence.tokens)
            if not self._memory.admit(shadow, reserve=0):
                return None
            self._shadows[sequence] = shadow
        shadow.tokens = sequence.tokens
        # What follows the tokens that turned out right is of guesses that were wrong. The last
        # token is always read: its logits give the first guess.
        shadow.computed = min(shadow.computed, len(sequence.tokens) - 1)
        if self._memory.grow(shadow, len(sequence.tokens) + count):
            return shadow
        return None

    def _read(self, rows: list[EngineSequence]) -> torch.Tensor:
        """Compute all tokens that the cache does not have; logits [n,V] after the last ones."""
        last: dict[EngineSequence, torch.Tensor] = {}
        while reading := [shadow for shadow in rows if shadow.computed < len(shadow.tokens)]:
            room = self._most
            pieces = list[PrefillPiece]()
            chunk = list[EngineSequence]()
            for shadow in reading:
                count = min(room, len(shadow.tokens) - shadow.computed)
                if count:
                    pieces.append(PrefillPiece(shadow.slot, shadow.computed, count))
                    chunk.append(shadow)
                    room -= count
            hidden = self._device.prefill(
                pieces,
                [
                    shadow.tokens[piece.start : piece.end]
                    for shadow, piece in zip(chunk, pieces, strict=True)
                ],
            )

            end = 0
            for shadow, piece in zip(chunk, pieces, strict=True):
                end += piece.count
                shadow.computed = piece.end
                last[shadow] = hidden[end - 1]
        self._cache.set_length(
            [shadow.slot for shadow in rows], [shadow.computed for shadow in rows]
        )
        return self._device.logits(torch.stack([last[shadow] for shadow in rows]))

    def _choose(
        self, logits: torch.Tensor, work: Sequence[tuple[EngineSequence, EngineSequence]], step: int
    ) -> list[int]:
        """The guess of each (sequence, shadow) after logits [n,V], with the draw that the sequence
        itself will use at this position."""
        choices = [_choice(sequence, step, shadow.slot) for sequence, shadow in work]
        tokens, _ = draw_rows(self._sampler, logits, range(len(choices)), choices)
        tokens = tokens.clamp(min=0)  # a row without a token has any guess
        self._device.last_token[
            torch.tensor([shadow.slot for _, shadow in work], device=tokens.device)
        ] = tokens
        return tokens.tolist()


def _choice(sequence: EngineSequence, step: int, slot: int) -> RowChoice:
    """How the token `step` positions after the next one is chosen."""
    sampling = sequence.request.sampling
    draw = 0.0
    if sampling.temperature != 0:
        draw = sampling.draw(sequence.request.key, len(sequence.tokens) + step)
    return RowChoice(slot, sampling, draw)


class Speculator:
    """Guesses for the rows of a decoding step, and what became of them."""

    def __init__(self, proposer: Proposer, most: int) -> None:
        self.proposer = proposer
        self.most = most
        self.proposed = self.accepted = 0

    def guesses(self, rows: Sequence[EngineSequence], memory: EngineMemory) -> list[list[int]]:
        """The guesses for each row. Rows whose tokens depend on more than logits and a draw have
        none."""
        counts = [self._count(sequence) for sequence in rows]
        if any(counts):
            proposals = self.proposer.propose(rows, counts)
        else:
            proposals = [[] for _ in rows]
        # A row whose guesses find no page continues without them: guesses never preempt anybody.
        for row, sequence in enumerate(rows):
            tokens = sequence.computed + 1 + len(proposals[row])
            if proposals[row] and not memory.grow(sequence, tokens):
                proposals[row] = []
        return proposals

    def _count(self, sequence: EngineSequence) -> int:
        """Tokens to guess for a sequence."""
        request = sequence.request
        if (
            sequence.constraint is not None
            or request.logprobs is not None
            or has_penalties(request.sampling)
        ):
            return 0
        if sequence.guesses < 0:
            sequence.guesses = self.most
        # One less than it may still generate: a check gives a token of its own after the guesses.
        return min(sequence.guesses, sequence.max_generated - sequence.num_generated - 1)

    def checked(self, sequence: EngineSequence, proposed: int, accepted: int) -> None:
        """Guess more where all were right, fewer where half or more were wrong."""
        self.proposed = self.proposed + proposed
        self.accepted = self.accepted + accepted
        sequence.proposed = sequence.proposed + proposed
        sequence.accepted = sequence.accepted + accepted
        # A wrong guess costs a position of the forward, so text that is hard to guess gets fewer.
        if accepted == proposed:
            sequence.guesses = min(self.most, sequence.guesses * 2)
        elif 2 * accepted <= proposed:
            sequence.guesses = max(1, sequence.guesses // 2)


class PendingGuesses:
    """Rows that took part in one check: those with guesses gain one token or more, the others
    one."""

    def __init__(
        self,
        speculator: Speculator,
        device: EngineDevice,
        rows: list[tuple[EngineSequence, list[int]]],
        tokens: torch.Tensor,
    ) -> None:
        self._speculator = speculator
        self._device = device
        self._rows = rows
        self._tokens = tokens
        self.plain: PendingTokens | None = None

    def read(self) -> list[SequenceResult]:
        """Every new token, those of a row in order."""
        chosen: list[int] = self._tokens.tolist()
        results: list[SequenceResult] = []
        ends: list[tuple[int, int, int]] = []
        begin = 0
        for sequence, guesses in self._rows:
            choices = chosen[begin : begin + len(guesses) + 1]
            begin += len(choices)
            right = next(
                (index for index, guess in enumerate(guesses) if choices[index] != guess),
                len(guesses),
            )
            # The first choice that differs is right too: all tokens before it are.
            new = choices[: right + 1]
            self._speculator.checked(sequence, len(guesses), right)
            sequence.computed += len(new)
            sequence.in_flight += len(new)
            results += [chosen_token(sequence, token) for token in new]
            ends.append((sequence.slot, max(new[-1], 0), sequence.computed))
        # The device is set back to what was accepted; keys behind it will be overwritten.
        if ends:
            slots, last, lengths = zip(*ends, strict=True)
            device = self._device.cache.device
            self._device.last_token[torch.tensor(slots, device=device)] = torch.tensor(
                last, device=device
            )
            self._device.cache.set_length(slots, lengths)
        return results + ([] if self.plain is None else self.plain.read())


def check_guesses(
    speculator: Speculator,
    device: EngineDevice,
    sampler: Sampler,
    work: Sequence[GuessedRow],
    adapters: Sequence[int],
) -> PendingGuesses:
    """One forward over the last token and the guesses of every row, each with its adapter."""
    pieces = list[PrefillPiece]()
    tokens = list[list[int]]()
    begins = list[int]()
    end = 0
    for sequence, guesses in work:
        count = 1 + len(guesses)
        pieces.append(PrefillPiece(sequence.slot, sequence.computed, count))
        tokens.append([sequence.tokens[-1], *guesses])
        begins.append(end)
        end += count
    logits = device.logits(device.prefill(pieces, tokens, adapters=adapters))

    # Rows with guesses: a token is chosen at each of their positions, with the draw of that
    # position.
    guessed = list[GuessedRow]()
    positions = list[int]()
    choices = list[RowChoice]()
    for begin, (sequence, guesses) in zip(begins, work, strict=True):
        if not guesses:
            continue
        guessed.append((sequence, guesses))
        for step in range(len(guesses) + 1):
            positions.append(begin + step)
            choices.append(_choice(sequence, step, sequence.slot))
    drawn, _ = draw_rows(sampler, logits, positions, choices)
    # on several ranks, kernels may round differently: the first rank's draws count
    pending = PendingGuesses(speculator, device, guessed, device.agree(drawn))

    # Rows without guesses gain one token, as in a decoding step.
    others = [
        (sequence, begin)
        for begin, (sequence, guesses) in zip(begins, work, strict=True)
        if not guesses
    ]
    if others:
        plain = [sequence for sequence, _ in others]
        for sequence in plain:
            sequence.computed += 1
        device.cache.set_length(
            [sequence.slot for sequence in plain], [sequence.computed for sequence in plain]
        )
        pending.plain = choose_tokens(
            device,
            sampler,
            logits[torch.tensor([begin for _, begin in others], device=logits.device)],
            plain,
        )
    return pending


def _kind_of_state(loaded: LoadedModel) -> str | None:
    """What layers of a model with a state of fixed size are; None for other models."""
    section = loaded.config.state_section
    if section is None:
        return None
    return section[0].replace("_", " ")


def check_speculation(loaded: LoadedModel, speculation: Speculation) -> None:
    """Refuse to guess with a model whose state cannot go back over a wrong guess."""
    kind = _kind_of_state(loaded)
    if kind is not None:
        raise ConfigError(
            f"--speculate is {speculation.draft or 'ngram'} and the model has {kind}, "
            "whose state cannot go back over a wrong guess. Leave --speculate out."
        )


def open_draft(path: str, loaded: LoadedModel) -> LoadedModel:
    """The small model on the device of the large one; refused if its tokenizer differs."""
    draft = load_model(path, device=loaded.device, dtype=loaded.model.head_weight.dtype)
    if draft.config.media is not None:
        raise ConfigError(
            f"--speculate is {path}, which takes pictures and sounds. Give a model of text."
        )
    kind = _kind_of_state(draft)
    if kind is not None:
        raise ConfigError(
            f"--speculate is {path}, which has {kind}: its state cannot go back over a "
            "wrong guess. Give a model without, or ngram."
        )
    same = (
        draft.tokenizer is not None
        and loaded.tokenizer is not None
        and draft.tokenizer.fingerprint == loaded.tokenizer.fingerprint
    )
    if not same:
        raise ConfigError(
            f"--speculate is {path}, whose tokenizer is not that of {loaded.path}; guesses would "
            "be other tokens. Give a model trained with the same tokenizer, or ngram."
        )
    return draft


def split_budget(
    options: EngineOptions, loaded: LoadedModel, draft: LoadedModel, context: int
) -> tuple[EngineOptions, EngineOptions]:
    """The options with the cache budget shared between the two models, by what one sequence takes
    in each."""
    if options.cache_bytes is None:
        return options, options
    slot_bytes: list[int] = []
    for model in (loaded, draft):
        dtype = model.model.head_weight.dtype
        shape = CacheShape(model.config, model.masks, context, options.page_tokens, dtype)
        slot_bytes.append(shape.page_bytes * shape.pages_per_slot + shape.state_bytes)
    draft_bytes = options.cache_bytes * slot_bytes[1] // sum(slot_bytes)
    model_options = replace(options, cache_bytes=options.cache_bytes - draft_bytes)
    return model_options, replace(options, cache_bytes=draft_bytes)
