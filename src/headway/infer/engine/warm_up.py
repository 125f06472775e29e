"""Batches of requests that take every launch path with the sizes of real rounds, so that the first
clients do not wait for anything.

    what a GPU does once                       which batch does it
    a recorded step for each batch size        `EngineDevice.warm_up`; the rows of `sizes` replay it
    matrix products, chosen by token count     `lengths`: one prompt of each size, up to a round
    cuDNN's plan of a regular length           `lengths`: every multiple of REGULAR of a round, and
                                               a prompt of several rounds
    Triton's and the compiler's variants       one token, one piece, many short pieces, some long
                                               ones, with and without a past, 16 of them
    kernels and memory of the sampler          `rules`: each rule in one row and in all rows
    media, adapters, guesses, scores, vectors  a request of each kind

In: what an engine can do; out: batches, the largest first, so that the largest pieces of memory are
taken before the small ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from headway.infer.engine.request import EngineRequest, PromptMedia
from headway.infer.sampling import Sampling
from headway.model.media_shape import MediaShape
from headway.model.paged_layer import REGULAR
from headway.store.media_items import MediaItem

NEW_TOKENS = 3
"""A first token, one after it, and one more, whose step is launched before the token before it is
read. Guesses come on top."""
SHORT = 8
"""Tokens of a prompt that is there for its answer."""
LONG_PIECES = 4
"""Prompts that share a round, each of them long."""
ROUNDS = 2
"""Of the longest prompt: the second one has a past."""
PICTURE = (2, 3)
"""Rows and columns of the picture of a model with its own vision tower: two different numbers, as
they rotate the tokens behind it."""
SAMPLED = (
    Sampling(0.8),
    Sampling(0.8, top_k=50),
    Sampling(0.8, top_k=50, top_p=0.9),
    Sampling(0.8, top_p=0.9, min_p=0.05),
    Sampling(0.8, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1),
    Sampling(repetition_penalty=1.1),
    Sampling(0.8, logit_bias=((1, 1.0),)),
    Sampling(logit_bias=((1, 1.0),)),
)


@dataclass(frozen=True)
class EngineAbilities:
    """What decides the sizes and kinds of an engine's launches."""

    context: int
    """Tokens of the longest request."""
    room: int
    """Tokens that the cache holds."""
    round_tokens: int
    """Prompt tokens of one round."""
    sizes: Sequence[int]
    """Batch sizes of decoding steps; the last one is the most requests that run."""
    vocab: int
    guesses: int = 0
    """Tokens that speculation guesses at a time."""
    scored_tokens: int = 0
    """Prompt tokens whose scores are computed at one time."""
    adapters: Sequence[str] = ()
    media: MediaShape | None = None
    picture_width: int = 0
    """Of what the model's own vision tower gives for a cell of a picture; 0: it has none."""


@dataclass(frozen=True)
class WarmUpBatch:
    """Requests that are submitted together."""

    requests: tuple[EngineRequest, ...]
    masked: bool = False
    """Their tokens are chosen under a mask, as those of a grammar."""


class AnyToken:
    """A constraint that allows everything."""

    is_finished = False

    def fill_mask(self, mask: np.ndarray) -> None:
        """Allow every token."""
        mask.fill(-1)

    def accept(self, token: int) -> None:
        """Remember nothing: the next token is free too."""


def warm_up_batches(can: EngineAbilities) -> list[WarmUpBatch]:
    """All batches of a warm-up, the largest first."""
    new_tokens = NEW_TOKENS + can.guesses
    longest = min(can.context, can.room) - new_tokens
    if longest < 1:
        return []
    rows = can.sizes[-1]
    # Kernels of one row differ from those of many, so most kinds come in both.
    counts = tuple(dict.fromkeys((rows, 1)))

    def request(number: int, length: int, **more: object) -> EngineRequest:
        # Every prompt of a batch has another beginning, so that none finds its pages computed; then
        # it repeats, so that guesses are made.
        tokens = [number % can.vocab, *(1 + step % 2 for step in range(length - 1))]
        return EngineRequest(
            tuple(tokens),
            new_tokens,
            ignore_eos=True,
            key=str(number),
            **more,  # pyright: ignore[reportArgumentType]
        )

    def batch(count: int, length: int, masked: bool = False, **more: object) -> WarmUpBatch:
        # As many as run at once: the others would only wait for their pages.
        fitting = max(1, min(count, can.room // (length + new_tokens)))
        return WarmUpBatch(
            tuple(request(number, length, **more) for number in range(fitting)), masked
        )

    batches = [batch(1, length) for length in prompt_lengths(can.round_tokens, longest)]
    short = min(SHORT, longest)
    # A whole round of many pieces, twice: the second time the pages are shared and rings copied.
    whole = batch(rows, max(1, min(can.round_tokens // rows, longest)))
    batches += [whole, whole]
    # A round of some prompts that are longer than a window: with windows and sinks they take another
    # way than one long prompt and than many short ones.
    pieces = min(LONG_PIECES, rows)
    part = max(1, min(can.round_tokens // pieces, longest))
    batches.append(batch(pieces, part))
    # The end of one prompt and the beginnings of the next in one round.
    several = [min(longest, can.round_tokens + part), *[part] * (pieces - 1)]
    while len(several) > 1 and sum(several) + len(several) * new_tokens > can.room:
        several.pop()
    batches.append(
        WarmUpBatch(tuple(request(number, length) for number, length in enumerate(several)))
    )
    batches += [batch(size, short) for size in reversed(can.sizes)]

    for count in counts:
        batches += [batch(count, short, sampling=rule) for rule in SAMPLED]
        batches += [
            batch(count, short, masked=True, sampling=Sampling(0.8)),
            batch(count, short, logprobs=5),
            batch(count, short, logprobs=5, sampling=Sampling(0.8)),
            batch(count, short, embed=True),
        ]
    # Scores of a prompt are computed in chunks, whose sizes are new ones for the head.
    for length in prompt_lengths(can.scored_tokens, min(longest, can.round_tokens + 1)):
        batches.append(batch(1, length, logprobs=5, prompt_logprobs=True))
    for name in can.adapters:
        batches += [batch(count, short, adapter=name) for count in counts]
    if can.media is not None:
        # Zeros for features: sizes and kinds decide what is launched, values do not.
        for kind in can.media.inputs:
            if kind.tokens + 1 <= longest:
                features = np.zeros((kind.vectors, kind.width), dtype=np.float32)
                media = PromptMedia(
                    (MediaItem(1, kind.modality, "warm-up"),), {"warm-up": features}
                )
                batches += [batch(count, kind.tokens + 1, media=media) for count in counts]
    cells = PICTURE[0] * PICTURE[1]
    if can.picture_width and cells + 1 <= longest:
        features = np.zeros((cells, can.picture_width), dtype=np.float32)
        media = PromptMedia(
            (MediaItem(1, "image", "warm-up"),), {"warm-up": features}, {"warm-up": PICTURE}
        )
        batches += [batch(count, cells + 1, media=media) for count in counts]
    return batches


def prompt_lengths(round_tokens: int, longest: int) -> list[int]:
    """Lengths of single prompts, the longest first."""
    # Whole rounds with a past, a short last piece with a past, and a single token with one.
    lengths = {ROUNDS * round_tokens, ROUNDS * round_tokens + 5, round_tokens + 1}
    # Powers of two and the middles between them: libraries choose their kernels by such ranges.
    size = 1
    while size < round_tokens:
        lengths |= {size, size + size // 2}
        size *= 2
    lengths |= {round_tokens, *range(REGULAR, round_tokens + 1, REGULAR)}
    return sorted({min(length, longest) for length in lengths}, reverse=True)
