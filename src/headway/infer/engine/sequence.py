"""One request while the engine works on it. Numbers of the host; what is on the device belongs to
`EngineDevice` and the cache."""

from __future__ import annotations

import hashlib
import time
from functools import cached_property
from typing import TYPE_CHECKING

from headway.infer.engine.request import (
    EngineRequest,
    PromptMedia,
    StopReason,
    TokenConstraint,
    TokenLogprobs,
)
from headway.infer.engine.sampler import RowChoice
from headway.model.page_pool import extend_names

if TYPE_CHECKING:
    import numpy as np
    import torch


class EngineSequence:
    """The tokens of a request, its place in the cache, and what is on its way."""

    def __init__(
        self, number: int, request: EngineRequest, room: int, ends: frozenset[int]
    ) -> None:
        self.number = number
        self.request = request
        self.tokens = list(request.prompt)
        """The prompt and every token that was read from the device."""
        self._prompt_length = len(request.prompt)
        self.max_generated = 0
        """Tokens that are generated at most."""
        if not request.embed:
            self.max_generated = min(request.max_new_tokens, room)
        # A grammar says where the text ends; an end id that it allows is such a place.
        self._ends = ends
        if request.ignore_eos and request.constraint is None:
            self._ends = frozenset()
        self.constraint: TokenConstraint | None = None
        sampling = request.sampling
        self.is_plain = (
            sampling.temperature == 0
            and not sampling.changes_scores
            and request.logprobs is None
            and request.constraint is None
        )
        """Its next token is the likeliest one, and nothing else is asked."""
        self.slot = -1
        self.computed = 0
        """Tokens whose keys and values are stored, by all that was launched."""
        self.target = len(self.tokens)
        """Tokens that are read before the next one is chosen: the prompt, and what was generated
        before a preemption."""
        self.in_flight = 0
        """Tokens that were launched and not read."""
        self.keep_at: tuple[int, ...] = ()
        """Where snapshots of its state are wanted while the prompt is read, in order."""
        self.cached_tokens = 0
        """Tokens of the prompt that the prefix cache had when the request was first admitted."""
        self.was_admitted = False
        self.ended = False
        self.submitted = time.monotonic()
        self.sent_any = False
        self.hidden_sum: torch.Tensor | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]
        self.guesses = -1
        """Tokens that speculation guesses next; -1: not known yet."""
        self.proposed = 0
        """Guesses so far."""
        self.accepted = 0
        """Guesses that were right."""
        self._names: list[bytes] = []

    def restart(self) -> None:
        """Its memory was given back, and everything launched was read: all tokens will be computed
        again.

        What was summed up or collected of the prompt belongs to pieces that will come again.
        """
        assert self.slot < 0 and self.in_flight == 0
        self.target = len(self.tokens)
        self.hidden_sum = None
        self.prompt_logprobs = [None]

    @property
    def num_generated(self) -> int:
        """New tokens that were read from the device; those in flight are not among them."""
        return len(self.tokens) - self._prompt_length

    @property
    def is_reading(self) -> bool:
        """Its prompt, and what a preemption took back, is not computed yet."""
        return self.computed < self.target

    @property
    def is_ready(self) -> bool:
        """A decoding step may include it."""
        if self.ended or self.computed < self.target:
            return False
        # A grammar's next mask depends on the token that is still on its way.
        if self.constraint is not None and self.in_flight > 0:
            return False
        return len(self.tokens) - self._prompt_length + self.in_flight < self.max_generated

    @cached_property
    def root(self) -> bytes:
        """What decides its keys and values besides its tokens."""
        # The same ids under another adapter, or with another picture, have other keys and values.
        parts = [self.request.adapter or ""]
        if self.request.media is not None:
            parts.append(_media_name(self.request.media))
        return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).digest()

    def page_names(self, page_tokens: int, length: int) -> list[bytes]:
        """The names of the whole pages of its first `length` tokens."""
        pages = length // page_tokens
        extend_names(self._names, self.tokens, page_tokens, pages, self.root)
        return self._names[:pages]

    def choice(self, mask: np.ndarray | None) -> RowChoice:
        """How its next token is chosen."""
        sampling = self.request.sampling
        draw = 0.0
        if sampling.temperature != 0:
            # By position: neither the batch nor lag nor speculation changes the draw of a token.
            draw = sampling.draw(self.request.key, len(self.tokens) + self.in_flight)
        return RowChoice(self.slot, sampling, draw, mask)

    def add(self, token: int) -> StopReason | None:
        """A token was read; why it is the last one, if it is."""
        self.tokens.append(token)
        # An end id ends the text; it is not part of what the grammar describes.
        if self.constraint is not None and token not in self._ends:
            self.constraint.accept(token)
        if token in self._ends:
            return "eos"
        if token in self.request.stop_ids:
            return "stop"
        if self.constraint is not None and self.constraint.is_finished:
            return "grammar"
        if len(self.tokens) - self._prompt_length < self.max_generated:
            return None
        if self.max_generated == self.request.max_new_tokens:
            return "length"
        return "context"


def _media_name(media: PromptMedia) -> str:
    """Everything about media that decides keys and values: kinds, places, contents, and whether
    features are there."""
    return repr(
        [
            (item.modality, item.offset, item.content_hash, item.content_hash in media.features)
            for item in media.items
        ]
    )
