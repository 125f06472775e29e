"""Documents of packed rows, or pieces of prompts, as stretches of one flat run of tokens: what layers
need that carry a state along a document.

    rows [B,T]  ->  tokens [N], N = B * T     segment s is tokens start[s] .. start[s] + length[s] - 1

Such a layer begins every segment anew, so a document computes in a packed row what it computes alone.
Chunks of `size` tokens begin where their segment begins, never across two segments:

    segments   a a a a a b b c c c     size 2
    chunks     aa aa a. bb cc c.       in the order of `SegmentChunks`: the first of every segment, then
                                       the second ...: aa cc bb | aa c. | a.

Numbers are made on the host once per microbatch; all layers share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from headway.kernels.attention import AttentionMask


@dataclass(frozen=True)
class SegmentChunks:
    """All segments cut into chunks, sorted by how many chunks come before them in their segment."""

    size: int
    token: Tensor
    """int64 [chunks, size]: the token at each place of each chunk; N where there is none"""
    place: Tensor
    """int64 [N]: where among the chunks * size places a token is"""
    steps: tuple[slice, ...]
    """The first chunks of all segments, the second ones ..., as ranges of chunks. A longer segment
    comes before a shorter one, so those that continue are the first of a range."""
    row: Tensor
    """int64 [segments]: where in these ranges a segment is"""

    def of_tokens(self, x: Tensor) -> Tensor:
        """x [N,H,...] as [chunks,H,size,...], with 0 at places without a token."""
        padding = [0, 0] * (x.dim() - 1)
        padded = F.pad(x, (*padding, 0, 1))
        return padded[self.token].transpose(1, 2)

    def to_tokens(self, x: Tensor) -> Tensor:
        """[N,H,...] of x [chunks,H,size,...]."""
        return x.transpose(1, 2).flatten(0, 1)[self.place]

    def in_order(self, states: Tensor) -> Tensor:
        """States [segments,...] in the order of `steps`, fp32."""
        return torch.zeros_like(states).index_copy(0, self.row, states.float())


@dataclass(frozen=True)
class Segments:
    """Stretches of a flat run of tokens, which they fill without a gap."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    device: torch.device
    _plans: dict[int, SegmentChunks] = field(default_factory=dict, compare=False, repr=False)
    _offset: list[Tensor] = field(default_factory=list, compare=False, repr=False)

    @staticmethod
    def of_mask(mask: AttentionMask) -> Segments:
        """The documents of all rows; padding counts as one. Made once for a mask."""
        if mask.segments:
            return mask.segments[0]
        rows, length = mask.document.shape
        starts: list[int] = []
        lengths: list[int] = []
        if mask.single_document:
            # Padding behind the only document of a row sees it, as it does in attention, and
            # nothing reads what it computes.
            starts = [row * length for row in range(rows)]
            lengths = [length] * rows
        else:
            for row, bounds in enumerate(mask.on_host()):
                starts += [row * length + first for first in bounds[:-1]]
                lengths += [stop - first for first, stop in pairwise(bounds)]
        segments = Segments(tuple(starts), tuple(lengths), mask.document.device)
        mask.segments.append(segments)
        return segments

    @staticmethod
    def of_lengths(lengths: Sequence[int], device: torch.device) -> Segments:
        """One behind the other."""
        starts = [sum(lengths[:index]) for index in range(len(lengths))]
        return Segments(tuple(starts), tuple(lengths), device)

    @property
    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(self.lengths)

    @property
    def offset(self) -> Tensor:
        """int64 [N]: how many tokens of its segment come before each token."""
        if not self._offset:
            begins = np.repeat(np.array(self.starts), np.array(self.lengths))
            offset = torch.from_numpy(np.arange(self.num_tokens) - begins)
            self._offset.append(offset.to(self.device))
        return self._offset[0]

    def chunks(self, size: int) -> SegmentChunks:
        """The segments cut into chunks of at most `size` tokens."""
        if size not in self._plans:
            self._plans[size] = self._cut(size)
        return self._plans[size]

    def _cut(self, size: int) -> SegmentChunks:
        starts = np.array(self.starts)
        lengths = np.array(self.lengths)
        counts = -(-lengths // size)
        # Longest first; equal ones in their order.
        order = np.argsort(-counts, kind="stable")
        row = np.empty_like(order)
        row[order] = np.arange(len(order))

        steps: list[slice] = []
        token: list[np.ndarray] = []
        begin = 0
        places = np.arange(size)
        for step in range(int(counts.max())):
            longer = order[: int((counts > step).sum())]
            first = starts[longer] + step * size
            left = lengths[longer] - step * size
            inside = places[None] < left[:, None]
            token.append(np.where(inside, first[:, None] + places[None], self.num_tokens))
            steps.append(slice(begin, begin + len(longer)))
            begin += len(longer)

        tokens = np.concatenate(token)
        flat = tokens.reshape(-1)
        # One more entry for all places without a token; it is dropped.
        place = np.empty(self.num_tokens + 1, dtype=np.int64)
        place[flat] = np.arange(len(flat))
        return SegmentChunks(
            size,
            torch.from_numpy(tokens).to(self.device),
            torch.from_numpy(place[:-1].copy()).to(self.device),
            tuple(steps),
            torch.from_numpy(row).to(self.device),
        )


def chunk_decays(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """What decays between the tokens of a chunk, from log_decay [chunks,H,C] of each token: (from token
    j to token i [chunks,H,C,C], 0 for j > i; from before the chunk to each token [chunks,H,C]).
    """
    chunk = log_decay.shape[-1]
    # Summed over the tokens between: the difference of two long sums would round away what a short
    # stretch decays.
    between = log_decay[..., None].expand(*log_decay.shape, chunk).tril(-1).cumsum(-2)
    above = torch.ones(chunk, chunk, dtype=torch.bool, device=log_decay.device).triu(1)
    between = between.masked_fill(above, -torch.inf).exp()
    return between, log_decay.cumsum(-1).exp()
