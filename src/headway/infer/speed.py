"""How fast a model reads and generates: what the engine launches for equal requests, timed warm.

prompts -> pieces of a round, as the engine packs them -> first tokens | read |
        -> decoding steps of all rows, recorded on CUDA                | written |
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from headway.infer.engine.device import EngineDevice
from headway.infer.engine.memory import EngineMemory, build_cache
from headway.infer.engine.prefill_batches import plan_pieces
from headway.infer.engine.request import EngineOptions, EngineRequest
from headway.infer.engine.sequence import EngineSequence
from headway.infer.load import LoadedModel

TIMED_RUNS = 3
"""After one that compiles, records and loads what the device needs; their medians count."""


@dataclass(frozen=True)
class GenerationSpeed:
    """How fast a model reads and generates in one batch, measured on random tokens."""

    cache_bytes: int
    """Of the tensors that hold keys and values of the batch."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@torch.inference_mode()
def measure_speed(
    loaded: LoadedModel, length: int, *, chunk_tokens: int, rows: int = 1, steps: int = 16
) -> GenerationSpeed:
    """Read about `length` tokens in each row, `chunk_tokens` at a time; then decode `steps`."""
    prompt = max(1, length - steps)
    # Without reuse of prefixes: each run must compute the whole prompts again.
    options = EngineOptions(
        max_running=rows,
        max_context=prompt + steps,
        prefill_tokens=chunk_tokens,
        prefix_reuse=False,
    )
    cache = build_cache(loaded, options, prompt + steps)
    device = EngineDevice(loaded, cache, options, loaded.config.vocab)
    batch = _admit(EngineMemory(cache, prefix_reuse=False), _requests(loaded, rows, prompt, steps))

    read: list[float] = []
    written: list[float] = []
    for run in range(1 + TIMED_RUNS):
        began = _now(loaded.device)
        _read(device, batch, chunk_tokens)
        between = _now(loaded.device)
        slots = [sequence.slot for sequence in batch]
        for step in range(steps):
            device.decode(slots, prompt + step + 1)
        ended = _now(loaded.device)
        if run > 0:  # the first one compiled, recorded and loaded
            read.append(between - began)
            written.append(ended - between)

    # Of the rows that found memory, which may be fewer than were asked for.
    return GenerationSpeed(
        cache.num_bytes,
        len(batch) * prompt / median(read),
        len(batch) * steps / median(written),
    )


def _requests(loaded: LoadedModel, rows: int, prompt: int, steps: int) -> list[EngineRequest]:
    """Prompts of random ids, the same in every call."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, loaded.config.vocab, (rows, prompt), generator=generator)
    return [EngineRequest(tuple(row), steps) for row in tokens.tolist()]


def _admit(memory: EngineMemory, requests: list[EngineRequest]) -> list[EngineSequence]:
    """The requests that run at once within the free memory, each with room for its whole text."""
    batch: list[EngineSequence] = []
    for number, request in enumerate(requests):
        sequence = EngineSequence(number, request, request.max_new_tokens, frozenset())
        if not memory.admit(sequence, reserve=0):
            break
        if not memory.grow(sequence, len(request.prompt) + request.max_new_tokens):
            memory.release(sequence)
            break
        batch.append(sequence)
    memory.flush()
    return batch


def _read(device: EngineDevice, batch: list[EngineSequence], chunk_tokens: int) -> None:
    """All prompts from their beginnings, and the first token of each."""
    # Keys and values of the run before are overwritten in place.
    for sequence in batch:
        sequence.computed = 0
    last: dict[EngineSequence, torch.Tensor] = {}
    while reading := [sequence for sequence in batch if sequence.is_reading]:
        work = plan_pieces(reading, chunk_tokens)
        pieces = [piece for _, piece in work]
        tokens = [sequence.tokens[piece.start : piece.end] for sequence, piece in work]
        hidden = device.prefill(pieces, tokens)
        end = 0
        for sequence, piece in work:
            end += piece.count
            sequence.computed = piece.end
            last[sequence] = hidden[end - 1]

    # What the engine does after a prompt: the first token and the length go to the device.
    slots = [sequence.slot for sequence in batch]
    first = device.logits(torch.stack([last[sequence] for sequence in batch])).argmax(-1)
    device.last_token[torch.tensor(slots, device=first.device)] = first
    device.cache.set_length(slots, [sequence.computed for sequence in batch])


def _now(device: torch.device) -> float:
    """Seconds of a clock, once the device has done all that was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
