"""Lock-step decoding without an engine: all rows take each step, over two plain tensors per layer.

It knows no pages, slots or requests, so it shows what the engine's bookkeeping costs. Attention
reads the filled stretches of the tensors under a mask. On CUDA a step is recorded once for each
number of stretches.

Shapes: B rows, KV key and value heads, S positions, hd head width, V vocabulary.
"""

from __future__ import annotations

import torch

from headway.kernels.attention import ScoreRule, dense
from headway.model.base import Expander, Model, compile_method

STRETCH = 256
"""A recorded step reads a multiple of this many positions."""
WARM_UP = 2


class LockStepCache:
    """Keys and values of rows that all have the same length."""

    def __init__(self, model: Model, rows: int, capacity: int) -> None:
        config = model.config
        self.capacity = capacity
        self.stop = capacity
        """Attention reads the positions before this one."""
        self._rule = ScoreRule(config.attention_softcap)
        shape = (config.num_layers, rows, config.cached_heads, capacity, config.cached_size)
        device = model.head_weight.device
        # Zeros: a position that no query sees still meets a weight of 0, and 0 times NaN is NaN.
        self.keys = torch.zeros(shape, dtype=model.head_weight.dtype, device=device)
        self.values = torch.zeros_like(self.keys)
        self._rows = torch.arange(rows, device=device)
        self._index = torch.arange(capacity, device=device)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        position: torch.Tensor,
        sinks: torch.Tensor | None = None,
        expand: Expander | None = None,
    ) -> torch.Tensor:
        """o [B,1,H,hd] of q [B,1,H,hd] at positions [B,1]; k and v [B,1,KV,hd] are stored."""
        assert sinks is None and expand is None, "made for models without either"
        keys = self.keys[layer]
        values = self.values[layer]
        keys[self._rows, :, position[:, 0]] = k[:, 0]
        values[self._rows, :, position[:, 0]] = v[:, 0]
        seen = self._index[None, None, : self.stop] <= position[:, :, None]
        return dense(
            q,
            keys[:, :, : self.stop].transpose(1, 2),
            values[:, :, : self.stop].transpose(1, 2),
            seen,
            self._rule,
        )


class LockStepDecoder:
    """Greedy steps of all rows at once, which begin as if each row had `start` tokens."""

    @torch.inference_mode()
    def __init__(
        self, model: Model, rows: int, start: int, capacity: int, *, compile_blocks: bool
    ) -> None:
        device = model.head_weight.device
        if device.type == "cuda":
            model.fuse_projections()
        self.model = model
        self.cache = LockStepCache(model, rows, capacity)
        self._forward = model.cached_forward(compile_method if compile_blocks else None)
        self._length = start
        self._position = torch.full((rows,), start, dtype=torch.int64, device=device)
        self.token = torch.zeros(rows, dtype=torch.int64, device=device)
        """[B]: the newest token of each row."""
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        if device.type == "cuda":
            for stop in range(self._stop(start), self._stop(capacity - 1) + 1, STRETCH):
                self._record(min(stop, capacity))

    def _stop(self, length: int) -> int:
        """The end of the last stretch that a step at this length reads."""
        return (length // STRETCH + 1) * STRETCH

    @torch.inference_mode()
    def step(self) -> None:
        """One more token in each row."""
        assert self._length < self.cache.capacity
        stop = min(self._stop(self._length), self.cache.capacity)
        if self._graphs:
            self._graphs[stop].replay()
        else:
            self._launch(stop)
        self._position += 1
        self._length += 1

    def _launch(self, stop: int) -> None:
        self.cache.stop = stop
        hidden = self._forward(self.token[:, None], self._position[:, None], self.cache)
        self.token.copy_(self.model.logits(hidden[:, 0]).float().argmax(-1))

    def _record(self, stop: int) -> None:
        """What it writes while it is recorded, the first step writes again."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._launch(stop)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch(stop)
        self._graphs[stop] = graph
        self.token.zero_()
