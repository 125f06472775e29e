"""One token per row and step from a filled cache. On CUDA the whole step is recorded once as a graph and replayed.

    token [B], position [B] -> embed -> blocks, each reading and writing its part of the cache -> norm -> logits [B,V]

On a GPU a small model's step is bound by launches, not by arithmetic: a recorded graph has none, and compiled halves of the blocks
have few kernels. Compiling takes seconds, so a decoder that will take few steps does without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import torch

from headway.model.base import Model, compile_method
from headway.model.kv_cache import KVCache

COMPILE_FROM_STEPS = 512
"""A decoder that takes fewer steps would wait longer for the compiler than it gains."""
RECORD_FROM_STEPS = 8
"""As many plain steps take less time than recording one."""
WARM_UP = 2


class Decoder:
    """Steps of one batch of rows over one cache."""

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
        self._record = on_cuda and steps >= RECORD_FROM_STEPS if record == "auto" else record
        compiled = on_cuda and steps >= COMPILE_FROM_STEPS if compile_blocks == "auto" else compile_blocks
        if on_cuda:
            model.fuse_projections()
        options = {"coordinate_descent_tuning": True} if search_kernels else None
        self._decode = model.decoder(cache, partial(compile_method, options=options) if compiled else None)
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
