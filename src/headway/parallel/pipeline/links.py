"""Messages between the ranks of a pipeline, in the order of the program.

Hidden states travel one way, their gradients the other.

A message is begun and not waited for; the receiver waits where it needs the tensor. A sender keeps
the last few tensors alive and waits for older ones, which is safe at any time: the receiver has
begun them before it can wait for anything newer.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from headway.parallel.collectives import Handle, RankGroup

AHEAD = 4
"""Messages on their way at one time."""
NAMES = {"F": "hidden states", "B": "gradients"}


class Links:
    """The connections of one rank to the others of its pipeline."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self._sent: deque[tuple[Handle, Tensor]] = deque()

    def send(self, tensor: Tensor, to: int, content: str) -> None:
        """Begin to send a tensor; it is kept until it has left. `content` names it in reports."""
        message = tensor.detach().contiguous()
        self._sent.append((self.group.send(message, to, content), message))
        while len(self._sent) > AHEAD:
            self._sent.popleft()[0].wait()

    def receive(self, tensor: Tensor, source: int, content: str) -> Handle:
        """Begin to receive into a tensor."""
        return self.group.receive(tensor, source, content)

    def drain(self) -> None:
        """Wait until everything has left."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def sum_over(self, flat: Tensor, sharers: tuple[int, ...]) -> None:
        """Sum a tensor over the ranks that share it: all of them, or two.

        The sum is the same, bit for bit, on each.
        """
        if len(sharers) == self.group.size:
            self.group.all_reduce(flat).wait()
            return
        assert len(sharers) == 2 and self.group.rank in sharers
        peer = sharers[0]
        if peer == self.group.rank:
            peer = sharers[1]
        other = torch.empty_like(flat)
        # One begins by sending, the other by receiving: a transport that blocks until both ranks
        # are there must not have two senders.
        if self.group.rank < peer:
            self.send(flat, peer, "shared gradients")
        received = self.receive(other, peer, "shared gradients")
        if self.group.rank > peer:
            self.send(flat, peer, "shared gradients")
        received.wait()
        self.drain()
        flat.add_(other)
