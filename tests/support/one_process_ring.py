"""A ring whose ranks run one after another in one process: the keys of all ranks lie ready, gradients for them are collected."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.attention import AttentionMask
from headway.parallel.collectives import Done, RankGroup
from headway.parallel.ring import RingCore, ring_order


class EmulatedRing(RankGroup):
    """One rank of such a ring. Keys and values are in 16 bits and their gradients travel in fp32: this tells the two apart."""

    def __init__(self, rank: int, kv: list[Tensor]) -> None:
        super().__init__(rank, len(kv))
        self.kv = kv
        self.gradients = [torch.zeros_like(tensor, dtype=torch.float32) for tensor in kv]
        self.restart()

    def restart(self) -> None:
        """Begin a pass."""
        self.keys_sent = self.gradients_sent = 0

    def shift(self, given: Tensor) -> tuple[Tensor, Done]:
        """The keys of the rank before; gradients go to the rank whose keys they belong to."""
        if given.dtype == torch.float32:
            self.gradients[(self.rank - self.gradients_sent) % self.size] += given
            self.gradients_sent += 1
            return torch.zeros_like(given), Done()
        self.keys_sent += 1
        return self.kv[(self.rank - self.keys_sent) % self.size], Done()


def split_rows(x: Tensor, ranks: int) -> list[Tensor]:
    """The tokens of rows [B,T,...] as the ranks of a ring hold them."""
    order = torch.tensor(ring_order(x.shape[1], ranks), device=x.device)
    return [part.contiguous() for part in x.index_select(1, order).chunk(ranks, dim=1)]


def join_rows(parts: list[Tensor]) -> Tensor:
    """The way back."""
    order = torch.tensor(
        ring_order(sum(part.shape[1] for part in parts), len(parts)), device=parts[0].device
    )
    return torch.cat(parts, dim=1).index_select(1, order.argsort())


def run_ring(
    q: Tensor, k: Tensor, v: Tensor, d_o: Tensor, mask: AttentionMask, ranks: int
) -> tuple[Tensor, list[Tensor]]:
    """(o, [gradients of q, k, v]) of whole rows, computed by the ranks of a ring."""
    parts = [split_rows(x, ranks) for x in (q, k, v, d_o)]
    kv = [torch.stack(pair) for pair in zip(parts[1], parts[2], strict=True)]
    outputs = []
    d_queries = []
    rings = [EmulatedRing(rank, kv) for rank in range(ranks)]
    for ring in rings:
        leaf = parts[0][ring.rank].detach().requires_grad_()
        keys, values = (x.detach().requires_grad_() for x in kv[ring.rank])
        o = RingCore(ring)(leaf, keys, values, mask)
        ring.restart()
        o.backward(parts[3][ring.rank])
        assert leaf.grad is not None
        outputs.append(o.detach())
        d_queries.append(leaf.grad)
    d_kv = [sum(ring.gradients[rank] for ring in rings) for rank in range(ranks)]
    return join_rows(outputs), [
        join_rows(d_queries),
        *(join_rows([gradients[side] for gradients in d_kv]) for side in (0, 1)),
    ]  # pyright: ignore
