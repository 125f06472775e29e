"""Runs the program of one rank over microbatches: stages are computed, hidden states and gradients go where the program says.

A `StageRun` holds what one step (or one pass without gradients) keeps between its actions. Every stage sees the same microbatches, so only
hidden states travel, and, where blocks draw random numbers, the state of the generator: a stage continues it where the stage before left
it, and draws what one process would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.data.batch import Batch
from headway.model.base import Model, ModelOut
from headway.parallel.collectives import Handle
from headway.parallel.engine import DeviceTimestamp
from headway.parallel.pipeline.links import NAMES, Links
from headway.parallel.pipeline.program import Message, Program
from headway.parallel.pipeline.stages import PipelinePart
from headway.parallel.pipeline.weight_grads import Later, WeightGradQueue
from headway.parallel.pipeline_order import PipelineAction

Key = tuple[int, int]
"""(stage, microbatch)"""


@dataclass(frozen=True)
class ExecutedAction:
    """One action as it ran."""

    action: PipelineAction
    begin: DeviceTimestamp
    end: DeviceTimestamp


@dataclass(frozen=True)
class StageContext:
    """What all runs of one rank share."""

    model: Model
    part: PipelinePart
    links: Links
    device: torch.device
    dtype: torch.dtype
    stream_shape: Callable[[Batch], tuple[int, ...]]
    """Of the hidden states between two stages."""
    queue: WeightGradQueue | None = None


@dataclass(frozen=True)
class StageHooks:
    """What a run calls."""

    gate_seed: Callable[[int], int | None]
    """Of what the model samples in a microbatch."""
    reseed: Callable[[int], None]
    """Set the generator to its state at the beginning of a microbatch."""
    finish: Callable[[int, ModelOut], Tensor | None]
    """The output of a microbatch; returns what is back-propagated."""
    is_random: bool = False
    """Blocks draw random numbers, so the generator's state travels with the hidden states."""
    begin_last: Callable[[], None] = lambda: None
    """Before the backward of a stage's last microbatch."""
    end_last: Callable[[], None] = lambda: None


class StageRun:
    """One pass of a rank over some microbatches."""

    def __init__(
        self,
        context: StageContext,
        hooks: StageHooks,
        microbatches: Sequence[Batch],
        *,
        trains: bool,
    ) -> None:
        self.context, self.hooks, self.microbatches, self.trains = (
            context,
            hooks,
            microbatches,
            trains,
        )
        self.executed: list[ExecutedAction] = []
        self._arriving: dict[tuple[str, int, int], tuple[Tensor, list[Handle], Tensor | None]] = {}
        self._leaving: dict[tuple[str, int, int], tuple[Tensor, Tensor | None]] = {}
        self._kept: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
        """The input of a stage and what its backward begins with."""
        self._later: dict[Key, list[Later]] = {}

    def run(self, program: Program) -> None:
        """Everything, in order."""
        for step in program:
            if isinstance(step, Message):
                self._send(step) if step.is_sent else self._receive(step)
            elif step.kind == "F":
                self._forward(step)
            elif step.kind == "W":
                self._weights(step)
            else:
                self._backward(step)
        self.context.links.drain()

    # ---- messages

    def _send(self, message: Message) -> None:
        tensor, state = self._leaving.pop((message.kind, message.stage, message.microbatch))
        self.context.links.send(tensor, message.peer, NAMES[message.kind])
        if state is not None:
            self.context.links.send(state, message.peer, "the generator's state")

    def _receive(self, message: Message) -> None:
        context, key = self.context, (message.kind, message.stage, message.microbatch)
        tensor = torch.empty(
            context.stream_shape(self.microbatches[message.microbatch]),
            dtype=context.dtype,
            device=context.device,
        )
        handles = [context.links.receive(tensor, message.peer, NAMES[message.kind])]
        state = None
        if message.kind == "F" and self.hooks.is_random:
            state = generator_state(context.device).to(context.device)
            handles.append(context.links.receive(state, message.peer, "the generator's state"))
        self._arriving[key] = (tensor, handles, state)

    def _arrived(self, kind: str, stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        tensor, handles, state = self._arriving.pop((kind, stage, microbatch))
        for handle in handles:
            handle.wait()
        return tensor, state

    # ---- actions

    def _forward(self, action: PipelineAction) -> None:
        context, stage, number = self.context, action.stage, action.microbatch
        stream: Tensor | None = None
        if stage == 0:
            self.hooks.reseed(number)
        else:
            received, state = self._arrived("F", stage, number)
            if state is not None:
                set_generator_state(state, context.device)
            stream = received.requires_grad_(
                self.trains and context.part.shape.sends_gradient(stage)
            )
        begin = DeviceTimestamp.now(context.device)
        out = context.model.forward_stage(
            self.microbatches[number],
            stream,
            context.part.layers[stage],
            self.hooks.gate_seed(number),
        )
        root = self.hooks.finish(number, out) if isinstance(out, ModelOut) else out
        if self.trains:
            self._kept[stage, number] = (stream, root)
        if not isinstance(out, ModelOut):
            state = (
                generator_state(context.device).to(context.device) if self.hooks.is_random else None
            )
            self._leaving["F", stage + 1, number] = (out, state)
        self.executed.append(ExecutedAction(action, begin, DeviceTimestamp.now(context.device)))

    def _backward(self, action: PipelineAction) -> None:
        context, stage, number = self.context, action.stage, action.microbatch
        shape = context.part.shape
        stream, root = self._kept.pop((stage, number))
        if stage < shape.first_trained:
            return
        gradient = self._arrived("B", stage, number)[0] if stage + 1 < shape.stages else None
        begin = DeviceTimestamp.now(context.device)
        with self._reporting(number):
            if action.kind == "I" and context.queue is not None:
                with context.queue.collecting() as later:
                    _back_propagate(root, gradient)
                self._later[stage, number] = later
            else:
                _back_propagate(root, gradient)
        if shape.sends_gradient(stage):
            assert stream is not None
            found = stream.grad if stream.grad is not None else torch.zeros_like(stream)
            self._leaving["B", stage - 1, number] = (found, None)
        self.executed.append(ExecutedAction(action, begin, DeviceTimestamp.now(context.device)))

    def _weights(self, action: PipelineAction) -> None:
        begin = DeviceTimestamp.now(self.context.device)
        with self._reporting(action.microbatch):
            for later in self._later.pop((action.stage, action.microbatch), ()):
                later()
        self.executed.append(
            ExecutedAction(action, begin, DeviceTimestamp.now(self.context.device))
        )

    @contextmanager
    def _reporting(self, number: int) -> Iterator[None]:
        """Gradients inside are complete where this is a stage's last microbatch, which is the last that it back-propagates."""
        if number < len(self.microbatches) - 1:
            yield
            return
        self.hooks.begin_last()
        yield
        self.hooks.end_last()


def _back_propagate(root: Tensor | None, gradient: Tensor | None) -> None:
    if root is not None and root.requires_grad:
        torch.autograd.backward(root, gradient)


def generator_state(device: torch.device) -> Tensor:
    """The state of the generator that blocks draw from, on the host."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Continue from a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
