"""How fast a model reads and writes at a length, and what its cache takes: measured, on random tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from headway.infer.decode import Decoder
from headway.infer.load import LoadedModel
from headway.infer.prefill import CHUNK_TOKENS, last_hidden


@dataclass(frozen=True)
class Speed:
    """Of one batch of rows."""

    length: int
    rows: int
    cache_bytes: int
    """Of the tensors that hold keys and values."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@torch.inference_mode()
def measure_speed(loaded: LoadedModel, length: int, *, rows: int = 1, steps: int = 16, chunk_tokens: int = CHUNK_TOKENS) -> Speed:
    """Read `length` tokens in each row, then write `steps` more; the first few are not timed."""
    model, device, warm_up = loaded.model, loaded.device, 2
    prompt = max(1, length - steps - warm_up)
    cache = loaded.new_cache(rows, prompt + steps + warm_up, [prompt] * rows)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, loaded.config.vocab, (rows, prompt), generator=generator).to(device)
    began = _now(device)
    token = model.logits(last_hidden(model, tokens, [prompt] * rows, cache, chunk_tokens)).argmax(-1)
    read = _now(device) - began
    decoder = Decoder(model, cache, steps=steps)
    began = 0.0
    for step in range(warm_up + steps):
        if step == warm_up:
            began = _now(device)
        token = decoder.step(token).argmax(-1)
    written = _now(device) - began
    return Speed(length, rows, cache.num_bytes, rows * prompt / read, rows * steps / written)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
