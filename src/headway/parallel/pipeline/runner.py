"""Runs the program of one rank over microbatches.

Stages are computed; hidden states and gradients are sent where the program says.

A `StageRun` holds what one step (or one pass without gradients) keeps between its actions. Every
stage sees the same microbatches, so only hidden states travel, and, where blocks draw random
numbers, the state of the generator: a stage continues it where the stage before left it, and draws
what one process would.
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
    """The shape of the hidden states between two stages."""
    queue: WeightGradQueue | None = None


@dataclass(frozen=True)
class StageHooks:
    """What a run calls."""

    gate_seed: Callable[[int], int | None]
    """The seed of the gates that the model samples in a microbatch; None: it samples none."""
    reseed: Callable[[int], None]
    """Set the generator to its state at the beginning of a microbatch."""
    finish: Callable[[int, ModelOut], Tensor | None]
    """The output of a microbatch; returns what is back-propagated."""
    is_random: bool = False
    """Blocks draw random numbers, so the generator's state travels with the hidden states."""
    begin_last: Callable[[], None] = lambda: None
    """Called before the backward of a stage's last microbatch."""
    end_last: Callable[[], None] = lambda: None
    """Called after it."""


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
        self.context = context
        self.hooks = hooks
        self.microbatches = microbatches
        self.trains = trains
        self.executed: list[ExecutedAction] = []
        self._arriving: dict[tuple[str, int, int], tuple[Tensor, list[Handle], Tensor | None]] = {}
        """By (kind, stage, microbatch): tensors that are being received, with generator states."""
        self._leaving: dict[tuple[str, int, int], tuple[Tensor, Tensor | None]] = {}
        """What was computed and not yet sent."""
        self._forwards: dict[Key, tuple[Tensor | None, Tensor | None]] = {}
        """The input of a stage and the tensor from which its backward begins."""
        self._later: dict[Key, list[Later]] = {}
        """Gradients of weights that a W has to compute."""

    def run(self, program: Program) -> None:
        """Run the actions and messages of a program, in order."""
        for entry in program:
            if isinstance(entry, Message) and entry.is_sent:
                self._send(entry)
            elif isinstance(entry, Message):
                self._receive(entry)
            elif entry.kind == "F":
                self._forward(entry)
            elif entry.kind == "W":
                self._compute_weight_grads(entry)
            else:
                self._backward(entry)
        self.context.links.drain()

    # ---- messages

    def _send(self, message: Message) -> None:
        # Popped: `Links` keeps the tensor alive until it has left, and no longer.
        tensor, state = self._leaving.pop((message.kind, message.stage, message.microbatch))
        self.context.links.send(tensor, message.peer, NAMES[message.kind])
        if state is not None:
            self.context.links.send(state, message.peer, "the generator's state")

    def _receive(self, message: Message) -> None:
        context = self.context
        key = (message.kind, message.stage, message.microbatch)
        tensor = torch.empty(
            context.stream_shape(self.microbatches[message.microbatch]),
            dtype=context.dtype,
            device=context.device,
        )
        handles = [context.links.receive(tensor, message.peer, NAMES[message.kind])]
        state = None
        # Only its shape and dtype matter here: it will be overwritten.
        if message.kind == "F" and self.hooks.is_random:
            state = generator_state(context.device).to(context.device)
            handles.append(context.links.receive(state, message.peer, "the generator's state"))
        self._arriving[key] = (tensor, handles, state)

    def _arrived(self, kind: str, stage: int, microbatch: int) -> tuple[Tensor, Tensor | None]:
        """Wait for a tensor that is being received, and the generator's state that came with it."""
        tensor, handles, state = self._arriving.pop((kind, stage, microbatch))
        for handle in handles:
            handle.wait()
        return tensor, state

    # ---- actions

    def _forward(self, action: PipelineAction) -> None:
        context = self.context
        stage = action.stage
        number = action.microbatch
        stream: Tensor | None = None
        if stage == 0:
            self.hooks.reseed(number)
        else:
            received, state = self._arrived("F", stage, number)
            if state is not None:
                set_generator_state(state, context.device)
            # Below the first stage with anything to train, nobody wants a gradient.
            needs_gradient = self.trains and context.part.shape.sends_gradient(stage)
            stream = received.requires_grad_(needs_gradient)

        begin = DeviceTimestamp.now(context.device)
        out = context.model.forward_stage(
            self.microbatches[number],
            stream,
            context.part.layers[stage],
            self.hooks.gate_seed(number),
        )
        if isinstance(out, ModelOut):
            # The last stage: backward begins at the loss.
            root = self.hooks.finish(number, out)
        else:
            root = out
            state = None
            if self.hooks.is_random:
                state = generator_state(context.device).to(context.device)
            self._leaving["F", stage + 1, number] = (out, state)
        if self.trains:
            self._forwards[stage, number] = (stream, root)
        self.executed.append(ExecutedAction(action, begin, DeviceTimestamp.now(context.device)))

    def _backward(self, action: PipelineAction) -> None:
        context = self.context
        stage = action.stage
        number = action.microbatch
        shape = context.part.shape
        stream, root = self._forwards.pop((stage, number))
        if stage < shape.first_trained:
            return

        gradient = None
        if stage + 1 < shape.stages:
            gradient = self._arrived("B", stage, number)[0]
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
            # Where the loss does not depend on this input, the stage before still waits for zeros.
            stream_grad = stream.grad
            if stream_grad is None:
                stream_grad = torch.zeros_like(stream)
            self._leaving["B", stage - 1, number] = (stream_grad, None)
        self.executed.append(ExecutedAction(action, begin, DeviceTimestamp.now(context.device)))

    def _compute_weight_grads(self, action: PipelineAction) -> None:
        begin = DeviceTimestamp.now(self.context.device)
        with self._reporting(action.microbatch):
            for later in self._later.pop((action.stage, action.microbatch), ()):
                later()
        self.executed.append(
            ExecutedAction(action, begin, DeviceTimestamp.now(self.context.device))
        )

    @contextmanager
    def _reporting(self, number: int) -> Iterator[None]:
        """Tell the reducer that gradients inside are complete, if they are.

        They are with a stage's last microbatch, which every schedule back-propagates last.
        """
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
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def set_generator_state(state: Tensor, device: torch.device) -> None:
    """Continue from a state."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state.cpu(), device)
    else:
        torch.set_rng_state(state)
