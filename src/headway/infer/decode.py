"""One token per row and step from a filled cache. On CUDA the whole step is recorded once as a graph and replayed.

    token [B] -> embed -> blocks, each reading and writing its layer of the cache -> norm -> logits [B,V]

On a GPU a small model's step is bound by launches, not by arithmetic: a recorded graph has none, and compiled halves of the blocks
have few kernels. Compiling takes seconds, so a decoder that will take few steps does without it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from headway.infer.load import LoadedModel
from headway.infer.prefill import CHUNK_TOKENS, last_hidden
from headway.model.base import Model, compile_method
from headway.model.kv_cache import KVCache

COMPILE_FROM_STEPS = 512
"""A decoder that takes fewer steps would wait longer for the compiler than it gains."""
RECORD_FROM_STEPS = 8
"""Fewer plain steps take less time than recording one."""
WARM_UP = 2


class Decoder:
    """Decoding steps over the rows of one cache."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        *,
        steps: int,
        compile_blocks: bool | Literal["auto"] = "auto",
        record: bool | Literal["auto"] = "auto",
        search_kernels: bool = False,
    ) -> None:
        """`search_kernels` lets the compiler look for the best kernels, which one row of a small model gains from; it takes a minute."""
        on_cuda = model.head_weight.is_cuda
        self.model, self.cache = model, cache
        # Outside bf16 a mixture of experts reads on the host how many tokens each expert has; a recorded step cannot.
        can_record = on_cuda and (
            model.config.experts is None or model.head_weight.dtype == torch.bfloat16
        )
        self._record = can_record and steps >= RECORD_FROM_STEPS if record == "auto" else record
        compiled = (
            on_cuda and steps >= COMPILE_FROM_STEPS if compile_blocks == "auto" else compile_blocks
        )
        if on_cuda:
            model.fuse_projections()
        options = {"coordinate_descent_tuning": True} if search_kernels else None
        self._decode = model.decoder(
            cache, partial(compile_method, options=options) if compiled else None
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._token = self._logits = torch.empty(0)

    @torch.inference_mode()
    def step(self, token: torch.Tensor, rows: Sequence[int] | None = None) -> torch.Tensor:
        """Logits, fp32 [B,V], after one more token [B] in each row of the cache. The next step overwrites them.

        `rows` take part, None = all. The others are neither read nor written; their token and logits mean nothing.
        """
        self.cache.set_active(rows)
        if not self._record:
            logits = self._forward(token)
        else:
            if self._graph is None:
                self._capture(token)
            assert self._graph is not None
            self._token.copy_(token)
            self._graph.replay()
            logits = self._logits
        self.cache.advance(1)
        return logits

    def _capture(self, token: torch.Tensor) -> None:
        self._token = token.clone()
        # The same step several times writes the same values to the same positions, so trying it changes nothing.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                self._forward(self._token)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._logits = self._forward(self._token)

    def _forward(self, token: torch.Tensor) -> torch.Tensor:
        return self._decode(token, self.cache.next_position())


@dataclass(frozen=True)
class GenerationSpeed:
    """How fast a model reads and generates in one batch, measured on random tokens."""

    length: int
    rows: int
    cache_bytes: int
    """Of the tensors that hold keys and values."""
    prefill_tokens_per_second: float
    decode_tokens_per_second: float


@torch.inference_mode()
def measure_speed(
    loaded: LoadedModel,
    length: int,
    *,
    rows: int = 1,
    steps: int = 16,
    chunk_tokens: int = CHUNK_TOKENS,
) -> GenerationSpeed:
    """Read about `length` tokens in each row, then decode `steps` more; the first two steps are not timed."""
    model, device = loaded.model, loaded.device
    prompt = max(1, length - steps - WARM_UP)
    cache = loaded.new_cache(rows, prompt + steps + WARM_UP, [prompt] * rows)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, loaded.config.vocab, (rows, prompt), generator=generator).to(device)
    began = _now(device)
    token = model.logits(last_hidden(model, tokens, [prompt] * rows, cache, chunk_tokens)).argmax(
        -1
    )
    read = _now(device) - began
    decoder = Decoder(model, cache, steps=steps)
    began = 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            began = _now(device)
        token = decoder.step(token).argmax(-1)
    written = _now(device) - began
    return GenerationSpeed(
        length, rows, cache.num_bytes, rows * prompt / read, rows * steps / written
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
