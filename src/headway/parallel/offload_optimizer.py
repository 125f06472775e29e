"""Optimizer state in host memory.

Chunks are copied to the device, updated there, and copied back while others are being copied.

    host, pinned   [ chunk 0 | chunk 1 | chunk 2 | ... ]     moments, and master weights where they
                        |  copy in     ^ copy out            are not the parameters themselves
    device         [ staging A ] [ staging B ]               take turns; the update rule runs on
                                                             each chunk, with its gradients

The arithmetic is that of the update rule on the device, so results are the same bits as without
this. On a CPU device the same chunks are copied and copied back, one after another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from headway.optim.base import Guard, Hyper, Optimizer
from headway.optim.state_storage import BLOCK, SCALE
from headway.parallel.update_rules import LocalTensors

MASTER = "master"
CHUNK = 1 << 23
"""Elements of a chunk; a multiple of every block of the state."""


class HostStateOptimizer:
    """Runs an update rule on state in host memory."""

    def __init__(self, optimizer: Optimizer, device: torch.device, chunk: int = CHUNK) -> None:
        self.optimizer = optimizer
        self.device = device
        self.chunk = chunk
        self.inward = None
        self.outward = None
        if device.type == "cuda":
            self.inward = torch.cuda.Stream(device)
            self.outward = torch.cuda.Stream(device)
        self._staging: list[dict[str, Tensor]] = [{}, {}]
        self._free: list[torch.Event | None] = [None, None]
        """When a staging buffer has been copied out."""
        self._turn = 0

    def update(
        self, local: LocalTensors, hyper: Hyper, guard: Guard, copies: list[Tensor] | None
    ) -> None:
        """As Optimizer.update.

        With `copies` the params are in host memory too, and their new values are also written to
        the copies.
        """
        # The last update must be back in host memory before it is read again.
        if self.inward is not None and self.outward is not None:
            self.inward.wait_stream(self.outward)
        for index, (param, grad, step) in enumerate(
            zip(local.params, local.grads, local.steps, strict=True)
        ):
            state = {role: parts[index] for role, parts in local.state.items()}
            for start in range(0, param.numel(), self.chunk):
                is_last = start + self.chunk >= param.numel()
                # Open at the end: 8-bit state is padded to whole blocks, which the last chunk has.
                part = slice(start, None if is_last else start + self.chunk)
                chunks: dict[str, list[Tensor]] = {}
                for role, tensor in state.items():
                    role_part = part
                    if role.endswith(SCALE):
                        role_part = _in_blocks(part)
                    chunks[role] = [tensor[role_part]]

                # The rule advances the counter; all chunks of a tensor belong to one update.
                counter = step
                if not is_last:
                    counter = step.clone()
                target = None
                if copies is not None:
                    target = copies[index][part]
                chunk = LocalTensors([param[part]], [grad[part]], chunks, [counter])
                self._update_chunk(chunk, hyper, guard, target)

    def _update_chunk(
        self, local: LocalTensors, hyper: Hyper, guard: Guard, target: Tensor | None
    ) -> None:
        """Copy in, update, copy out; `target` is the part of the model's own parameters to set.

        Without it, the parameters are on the device and are updated where they are.
        """
        host = {role: parts[0] for role, parts in local.state.items()}
        if target is not None:
            host[MASTER] = local.params[0]
        turn = self._turn = 1 - self._turn
        staged = {role: self._staging_buffer(turn, role, part) for role, part in host.items()}
        free = self._free[turn]
        with self._on(self.inward):
            if self.inward is not None and free is not None:
                self.inward.wait_event(free)
            for role, part in host.items():
                staged[role].copy_(part, non_blocking=True)

        _follow(self.inward, None, self.device)
        params = local.params
        copies = None
        if target is not None:
            params = [staged[MASTER]]
            copies = [target]
        state = {role: [staged[role]] for role in local.state}
        self.optimizer.update(params, local.grads, state, local.steps, hyper, guard, copies)

        _follow(None, self.outward, self.device)
        with self._on(self.outward):
            for role, part in host.items():
                part.copy_(staged[role], non_blocking=True)
            if self.outward is not None:
                self._free[turn] = self.outward.record_event()

    def _staging_buffer(self, turn: int, role: str, part: Tensor) -> Tensor:
        """Room on the device for a chunk; it grows to the largest one seen and stays."""
        buffer = self._staging[turn].get(role)
        if buffer is None or buffer.numel() < part.numel():
            self.flush()
            buffer = self._staging[turn][role] = torch.empty(
                part.numel(), dtype=part.dtype, device=self.device
            )
            # The memory may have held something else that queued work still reads.
            _follow(None, self.inward, self.device)
        return buffer[: part.numel()]

    def flush(self) -> None:
        """Wait until everything is back in host memory."""
        if self.outward is not None:
            self.outward.synchronize()

    @staticmethod
    def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        if stream is None:
            return nullcontext()
        return torch.cuda.stream(stream)


def _follow(
    first: torch.cuda.Stream | None, then: torch.cuda.Stream | None, device: torch.device
) -> None:
    """One stream waits for another; None is the one that computes."""
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        (then or current).wait_stream(first or current)


def _in_blocks(part: slice) -> slice:
    """The scales of some elements; chunks begin and end with blocks."""
    if part.stop is None:
        return slice(part.start // BLOCK, None)
    return slice(part.start // BLOCK, part.stop // BLOCK)
