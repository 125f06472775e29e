"""Sequences that come and go in the rows of one cache: each logit of a step beside that of the same sequence computed alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from headway.infer.decode import Decoder
from headway.infer.prefill import chunks
from headway.model.kv_cache import KVCache


@dataclass(eq=False)
class Sequence:
    """A prompt that arrives at a step, and the tokens that are decoded after it."""

    ids: torch.Tensor
    prompt: int
    arrives: int
    row: int = -1
    reading: object = None
    length: int = 0
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each decoded position."""


def serve(
    model,
    cache: KVCache,
    sequences: list[Sequence],
    *,
    chunk: int,
    poison: bool = False,
    **how: bool,
) -> list[int]:
    """Read prompts a chunk at a time between steps of the others; returns the rows in the order in which they were given."""
    decoder, given, waiting, live = (
        Decoder(model, cache, steps=100, **how),
        list[int](),
        list(sequences),
        list[Sequence](),
    )
    at = 0
    while waiting or live:
        while waiting and waiting[0].arrives <= at and cache.num_free:
            one = waiting.pop(0)
            one.row = cache.allocate()
            given.append(one.row)
            batch = cache.select([one.row], [one.prompt])
            one.reading = iter(chunks(model, one.ids[None, : one.prompt], batch, chunk))
            live.append(one)
        for one in live:
            if one.length < one.prompt:
                one.length += next(one.reading).shape[1]
                break
        ready = [one for one in live if one.length >= one.prompt]
        if ready:
            token = torch.zeros(
                len(cache.host_lengths), dtype=torch.int64, device=cache.lengths.device
            )
            for one in ready:
                token[one.row] = one.ids[one.length]
            logits = decoder.step(token, [one.row for one in ready])
            for one in ready:
                one.logits[one.length] = logits[one.row].clone()
                one.length += 1
                if one.length == len(one.ids):
                    if poison:
                        for layer in cache.layers:
                            for view in (
                                view for group in layer.groups for view in layer.views(group)
                            ):
                                view[:, one.row, : one.length] = torch.nan
                    cache.release(one.row)
                    live.remove(one)
        assert cache.lengths.tolist() == cache.host_lengths
        at += 1
    return given


def make_sequences(
    shapes: list[tuple[int, int, int]], vocab: int, device: str = "cpu"
) -> list[Sequence]:
    """(prompt, new tokens, step of arrival) of each."""
    generator = torch.Generator().manual_seed(5)
    return [
        Sequence(
            torch.randint(0, vocab, (prompt + new,), generator=generator).to(device),
            prompt,
            arrives,
        )
        for prompt, new, arrives in shapes
    ]


def largest_gap(sequences: list[Sequence], forward) -> float:
    """Between the logits of steps and those of `forward(ids)`, each sequence alone."""
    gaps = [0.0]
    for one in sequences:
        alone = forward(one.ids)
        assert sorted(one.logits) == list(range(one.prompt, len(one.ids)))
        gaps += [(alone[at] - logits).abs().max().item() for at, logits in one.logits.items()]
    return max(gaps)
