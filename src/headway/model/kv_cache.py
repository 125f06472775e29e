"""Keys and values of the tokens already seen, so that each new token costs one step. The token at position p of a row is in its slot p.

Prompts of different length stand left-aligned. What padding writes behind a short prompt is never read, since a query at position p sees
slots 0..p only, and is overwritten when the row grows.

    slot      0  1  2  3  4  5
    row 0     a  b  c  d  .  .     next token goes to slot 4
    row 1     a  b  -  -  .  .     next token goes to slot 2
"""

import torch

from headway.kernels.attention import dense
from headway.model.config import ModelConfig


class KVCache:
    """Room for `slots` positions of `rows` sequences in every layer."""

    def __init__(self, config: ModelConfig, rows: int, slots: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        shape = (rows, slots, config.kv_heads, config.head_size)
        # Zeros, not whatever was in memory: a slot that no query sees still meets a weight of 0, and 0 times NaN is NaN.
        self._keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self._values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]
        self._row = torch.arange(rows, device=device)[:, None]
        self.slots = slots
        self.used = 0
        """No row holds a token in this slot or behind it."""

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, position: torch.Tensor) -> None:
        """Put k and v [B,T,KV,hd] where their positions [B,T] say."""
        assert self.used + k.shape[1] <= self.slots, "the cache is built for the longest sequence that will come"
        self._keys[layer][self._row, position] = k
        self._values[layer][self._row, position] = v

    def attend(self, layer: int, q: torch.Tensor, position: torch.Tensor, window: int | None) -> torch.Tensor:
        """o [B,T,H,hd]: attention of q to every slot up to its own position, itself included."""
        stop = self.used + q.shape[1]
        distance = position[:, :, None] - torch.arange(stop, device=q.device)
        seen = distance >= 0
        if window is not None:
            seen &= distance < window
        return dense(q, self._keys[layer][:, :stop], self._values[layer][:, :stop], seen)

    def advance(self, tokens: int) -> None:
        """Every layer has written `tokens` more tokens."""
        self.used += tokens
