"""What a cache holds of one layer that has a state (delta_net.py, mamba2.py, gated_convolution.py): one
for each block, in place of keys and values. `paged_cache.py` keeps track of slots, pages and lengths.

    inputs    [blocks + 1, taps - 1, M]     the last inputs of the convolution, in the cache's type
    memory    fp32 [blocks + 1, H, K, V]    the state of the recurrence; H = 0 without one

Block n is the state of slot n; further blocks are snapshots (`StateBlocks`). The last one is for rows
of a decoding batch that take no part. A sequence that begins ignores what its slot held before.

Unlike rings, a state cannot go back: it stands behind the last token that was read, no other.

Shapes: M channels of the convolution, H value heads, K and V widths of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway.kernels.segments import Segments
from headway.model.cache_blocks import to_device
from headway.model.state_mixer import MixerState, StateMixer

if TYPE_CHECKING:
    from headway.model.config import StateShape
    from headway.model.paged_layer import PrefillPiece


def state_bytes(shape: StateShape, dtype: torch.dtype) -> int:
    """Bytes of the state of one sequence in one layer."""
    return shape.input_size * dtype.itemsize + shape.memory_size * torch.float32.itemsize


class LayerState:
    """The states of one layer."""

    def __init__(
        self,
        shape: StateShape,
        slots: int,
        blocks: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._slots = slots
        self._idle = blocks
        self.inputs = torch.zeros((blocks + 1, *shape.inputs), device=device, dtype=dtype)
        self.memory = torch.zeros((blocks + 1, *shape.memory), device=device)

    @property
    def num_bytes(self) -> int:
        """Bytes of all states."""
        return self.inputs.nbytes + self.memory.nbytes

    def copy_state(self, source: int, target: int) -> None:
        """The state of one block becomes that of another."""
        self.inputs[target] = self.inputs[source]
        self.memory[target] = self.memory[source]

    def step(
        self,
        mixer: StateMixer,
        mixed: torch.Tensor,
        controls: torch.Tensor,
        z: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """o [B,1,H,V] of one new token of each slot; nothing is read on the host."""
        rows = torch.where(slots == self._slots, self._idle, slots)
        past = MixerState(self.inputs[rows], self.memory[rows])
        o, state = mixer.mix_step(mixed[:, 0], controls[:, 0], z[:, 0], past)
        self.inputs[rows] = state.inputs
        self.memory[rows] = state.memory
        return o[:, None]

    def prefill(
        self,
        mixer: StateMixer,
        mixed: torch.Tensor,
        controls: torch.Tensor,
        z: torch.Tensor,
        pieces: Sequence[PrefillPiece],
        segments: Segments,
    ) -> torch.Tensor:
        """o [1,N,H,V] of packed pieces of prompts, each behind what its slot holds."""
        numbers = torch.tensor([[piece.slot, piece.start] for piece in pieces])
        rows, starts = to_device(numbers, mixed.device).unbind(1)
        continues = starts > 0
        # Not a product with 0: what an earlier sequence left might be no number.
        past = MixerState(
            torch.where(continues[:, None, None], self.inputs[rows], 0),
            torch.where(continues[:, None, None, None], self.memory[rows], 0),
        )
        o, state = mixer.mix_segments(mixed[0], controls[0], z[0], segments, past)
        assert state is not None
        self.inputs[rows] = state.inputs
        self.memory[rows] = state.memory
        return o[None]
