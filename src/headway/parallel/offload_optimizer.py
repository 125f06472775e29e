"""Optimizer state in host memory: chunks are copied to the device, updated there, and copied back while others are being copied.

    host, pinned   [ chunk 0 | chunk 1 | chunk 2 | ... ]        master weights (where they are not the parameters themselves) and moments
                        |  copy in     ^ copy out               two staging buffers on the device take turns
    device         [ staging A ] [ staging B ]  -> the update rule on each chunk, with gradients from the device

The arithmetic is that of the update rule on the device, so results are the same bits as without this. On a CPU device the same chunks are
copied and copied back, one after another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from headway.optim.base import Guard, Hyper, Optimizer
from headway.optim.state_storage import BLOCK, SCALE

MASTER = "master"
CHUNK = 1 << 23
"""Elements of a chunk; a multiple of every block of the state."""


class LocalTensors(NamedTuple):
    """What an update works on, as lists with an element for each tensor; all flat."""

    params: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    steps: list[Tensor]


class HostStateOptimizer:
    """Runs an update rule on state in host memory."""

    def __init__(self, optimizer: Optimizer, device: torch.device, chunk: int = CHUNK) -> None:
        self.optimizer, self.device, self.chunk = optimizer, device, chunk
        self.inward = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.outward = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._staging: list[dict[str, Tensor]] = [{}, {}]
        self._free: list[torch.Event | None] = [None, None]
        """When a staging buffer has been copied out."""
        self._turn = 0

    def update(
        self, local: LocalTensors, hyper: Hyper, guard: Guard, copies: list[Tensor] | None
    ) -> None:
        """As Optimizer.update. With `copies` the params are in host memory too, and their new values are also written to the copies."""
        if self.inward is not None and self.outward is not None:
            self.inward.wait_stream(
                self.outward
            )  # the last update must be back in host memory before it is read again
        for index, (param, grad, step) in enumerate(
            zip(local.params, local.grads, local.steps, strict=True)
        ):
            state = {role: parts[index] for role, parts in local.state.items()}
            for start in range(0, param.numel(), self.chunk):
                stop, is_last = start + self.chunk, start + self.chunk >= param.numel()
                part = slice(start, None if is_last else stop)
                chunks = {
                    role: [tensor[_in_blocks(part) if role.endswith(SCALE) else part]]
                    for role, tensor in state.items()
                }
                counter = step if is_last else step.clone()
                self._update_chunk(
                    LocalTensors([param[part]], [grad[part]], chunks, [counter]),
                    hyper,
                    guard,
                    None if copies is None else copies[index][part],
                )

    def _update_chunk(
        self, local: LocalTensors, hyper: Hyper, guard: Guard, target: Tensor | None
    ) -> None:
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
        params = local.params if target is None else [staged[MASTER]]
        state, copies = (
            {role: [staged[role]] for role in local.state},
            None if target is None else [target],
        )
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
            _follow(
                None, self.inward, self.device
            )  # the memory may have been something else's until now
        return buffer[: part.numel()]

    def flush(self) -> None:
        """Wait until everything is back in host memory."""
        if self.outward is not None:
            self.outward.synchronize()

    @staticmethod
    def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else torch.cuda.stream(stream)


def _follow(
    first: torch.cuda.Stream | None, then: torch.cuda.Stream | None, device: torch.device
) -> None:
    """One stream waits for another; None is the one that computes."""
    if device.type == "cuda":
        current = torch.cuda.current_stream(device)
        (then or current).wait_stream(first or current)


def _in_blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, None if part.stop is None else part.stop // BLOCK)
