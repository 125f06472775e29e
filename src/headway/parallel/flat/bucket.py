"""Buckets of gradients and the reducer: complete buckets are exchanged in a fixed order.

    backward       a parameter's gradient is complete -> hook -> Reducer.take
    Reducer        added to the flat buffer; counted in the last microbatch of a step
    bucket full    exchanged by the hook of the recipe, while backward continues
    finish         the remaining buckets; then every bucket's sum, in order

Ranks must start the same exchanges in the same order, so buckets are numbered once (the order in
which backward is expected to finish them) and bucket k is sent only after bucket k-1. Which
parameters take part, and how often each reports, is learned in the first step; a parameter that is
missing later counts as zero on that rank, one that reports after its bucket was sent is an error
that names it. Nothing is exchanged before the last microbatch of a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from headway.errors import ParallelError
from headway.parallel.collectives import Handle, RankGroups
from headway.parallel.flat.buffer import BucketSpan, TrainBuffer

if TYPE_CHECKING:
    from headway.parallel.hooks.base import Hook


@dataclass
class Bucket:
    """Some gradients that are exchanged together, as a hook sees them."""

    index: int
    is_last: bool
    ranks: RankGroups
    flat: Tensor
    """This rank's gradients (fp32, unless accumulate_dtype says otherwise), padding between them;
    the sum over ranks goes here."""
    local_shard: Tensor
    """The part of `flat` whose sum this rank needs (all of it if the optimizer state is not
    sharded)."""
    span: BucketSpan
    buffer: TrainBuffer = field(repr=False)
    sharers: tuple[int, ...] = ()
    """Ranks of the pipeline that hold the same parameters: their gradients are summed first."""

    def gradients(self) -> dict[str, Tensor]:
        """Views of the gradients by parameter."""
        return {slot.name: self.buffer.gradient(self.span, slot) for slot in self.span.slots}

    def parameters(self) -> dict[str, Tensor]:
        """Views of the compute parameters."""
        return {slot.name: slot.view(self.buffer.param) for slot in self.span.slots}

    def allocate(self) -> None:
        """Allocate memory for the gradients, unless they have it."""
        storage = self.flat.untyped_storage()
        if storage.nbytes() == 0:
            storage.resize_(self.flat.nbytes)
            # Fresh memory holds anything, and norms and sums read the padding too.
            for start, stop in self.span.gaps():
                self.flat[start:stop].zero_()

    def release(self) -> None:
        """Free the memory of the gradients until the next backward."""
        self.flat.untyped_storage().resize_(0)

    def shard_of(self, flat: Tensor) -> Tensor:
        """This rank's shard of another tensor shaped like `flat`."""
        start, stop = self.span.shard_range(self.buffer.sharding)
        return flat[start - self.span.start : stop - self.span.start]


def make_buckets(
    buffers: list[TrainBuffer],
    order: list[str],
    ranks_of: Callable[[str], RankGroups],
    sharers: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> list[Bucket]:
    """All buckets in the order in which backward finishes them.

    `order` has the parameters as forward meets them. Buckets that stages of a pipeline share are
    complete when all of these stages are, so they come last.
    """
    position = {name: index for index, name in enumerate(order)}

    def finished_at(entry: tuple[BucketSpan, TrainBuffer]) -> tuple[bool, int]:
        span, _ = entry
        # Backward meets parameters in reverse: a bucket is complete with its first in forward.
        first_position = min(position[slot.name] for slot in span.slots)
        return span.slots[0].name in sharers, -first_position

    entries = [(span, buffer) for buffer in buffers for span in buffer.spans]
    entries.sort(key=finished_at)
    buckets: list[Bucket] = []
    for index, (span, buffer) in enumerate(entries):
        flat = buffer.grads[span.index]
        start, stop = span.shard_range(buffer.sharding)
        # A buffer has parameters of one kind, so any of them answers for the bucket.
        name = span.slots[0].name
        buckets.append(
            Bucket(
                index,
                index == len(entries) - 1,
                ranks_of(name),
                flat,
                flat[start - span.start : stop - span.start],
                span,
                buffer,
                sharers.get(name, ()),
            )
        )
    return buckets


class Reducer:
    """Takes gradients as they come and exchanges the buckets."""

    def __init__(
        self,
        buckets: list[Bucket],
        hook: Hook | None,
        *,
        overlap: bool,
        share: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self.buckets = buckets
        self.hook = hook
        self.overlap = overlap
        self.share = share
        self._early = sum(not bucket.sharers for bucket in buckets)
        """Buckets that may be sent during backward: those that no other stage shares."""
        self.bucket_of = {slot.name: bucket for bucket in buckets for slot in bucket.span.slots}
        self.expected: dict[str, int] | None = None
        """Reports per parameter in the last microbatch; learned in the first step."""
        self.touched: set[str] = set()
        """Parameters whose gradient has arrived in this step."""
        self._counts: dict[str, int] = {}
        """Reports per parameter in this step's last microbatch."""
        self._missing: list[int] = []
        """Reports that each bucket still waits for."""
        self._handles: list[Handle] = []
        """Of the buckets that were sent, in order: their number is that of the next bucket."""
        self._last = False
        """Whether gradients that arrive now are complete."""
        self._begun = False
        """Whether the last microbatch of any stage has begun in this step."""

    def begin_last(self) -> None:
        """The last microbatch of the step comes next: complete buckets may be sent.

        In a pipeline, the last one of a stage.
        """
        self._last = True
        # A rank with several stages comes here once for each of them; the counts are of all.
        if self._begun:
            return
        self._begun = True
        self._counts = dict.fromkeys(self.bucket_of, 0)
        expected = self.expected or {}
        self._missing = [
            sum(expected.get(slot.name, 0) for slot in bucket.span.slots) for bucket in self.buckets
        ]

    def end_last(self) -> None:
        """Gradients of another stage come next, whose last microbatch this is not."""
        self._last = False

    def take(self, name: str, total: Tensor, parameter: Tensor) -> None:
        """Add one microbatch's gradient to the flat buffer.

        The first of a step overwrites what the last step left.
        """
        self._check(name)
        if parameter.grad is None:
            # Undefined, which means zero: a gate of which no head of this rank is open.
            pass
        elif name in self.touched:
            total.add_(parameter.grad)
        else:
            self.bucket_of[name].allocate()
            total.copy_(parameter.grad)
            self.touched.add(name)
        parameter.grad = None
        if self._last:
            self._report(name)

    def written(self, name: str) -> None:
        """A parameter's gradient was computed in the flat buffer itself, the first of the step."""
        self._check(name)
        self.touched.add(name)
        if self._last:
            self._report(name)

    def _check(self, name: str) -> None:
        """Refuse a gradient whose bucket was sent already: other ranks have added up without it."""
        if len(self._handles) > self.bucket_of[name].index:
            raise ParallelError(
                f"{name} got a gradient after its bucket was exchanged: it was unused in the first "
                "step, or is used more often now. Use parallel.overlap.reduce=false for models "
                "that do not use all parameters in every step."
            )

    def _report(self, name: str) -> None:
        """Count a gradient of the last microbatch, and send the buckets that are complete."""
        self._counts[name] += 1
        # The first step learns how often parameters report and sends everything at its end.
        if self.hook is None or not self.overlap or self.expected is None:
            return
        # A parameter that reports more often than before must not stand in for a missing one.
        if self._counts[name] <= self.expected[name]:
            self._missing[self.bucket_of[name].index] -= 1
        while len(self._handles) < self._early and self._missing[len(self._handles)] == 0:
            self._launch(self.hook)

    def _launch(self, hook: Hook) -> None:
        """Send the next bucket."""
        bucket = self.buckets[len(self._handles)]
        self._clear(bucket)
        self._sum_shared(bucket)
        self._handles.append(hook(bucket))

    def _clear(self, bucket: Bucket) -> None:
        """Clear the gradients of parameters unused in this step.

        The buffer still contains those of the last step.
        """
        bucket.allocate()
        for slot in bucket.span.slots:
            if slot.name not in self.touched:
                bucket.buffer.gradient(bucket.span, slot).zero_()

    def _sum_shared(self, bucket: Bucket) -> None:
        if bucket.sharers:
            self.share(bucket)

    def finish(self) -> Iterator[Bucket]:
        """Send the remaining buckets, then yield each bucket when its sum is complete."""
        if self.hook is None:
            for bucket in self.buckets:
                self._clear(bucket)
                self._sum_shared(bucket)
                yield bucket
        else:
            while len(self._handles) < len(self.buckets):
                self._launch(self.hook)
            for bucket, handle in zip(self.buckets, self._handles, strict=True):
                handle.wait()
                yield bucket

        # The largest count so far: a step that uses fewer parameters must not lower it, or a bucket
        # of a later step would be sent too early.
        before = self.expected or {}
        self.expected = {
            name: max(count, before.get(name, 0)) for name, count in self._counts.items()
        }
        self._handles = []
        self._last = False
        self._begun = False
        self.touched.clear()


class InPlace:
    """Lets one parameter's gradient be computed in the flat buffer itself.

    That is possible once per step, before anything else is added there.
    """

    def __init__(self, reducer: Reducer, name: str, total: Tensor) -> None:
        self.reducer = reducer
        self.name = name
        self.total = total
        self._in_use = False

    def take(self) -> Tensor | None:
        """The gradient's view of the buffer, unless it is in use."""
        if self._in_use or self.name in self.reducer.touched:
            return None
        self._in_use = True
        self.reducer.bucket_of[self.name].allocate()
        return self.total

    def done(self) -> None:
        """The gradient has been written."""
        self._in_use = False
        self.reducer.written(self.name)

    def reset(self) -> None:
        """Forget a pass that was never back-propagated."""
        self._in_use = False


def gradient_hook(reducer: Reducer, name: str, total: Tensor) -> Callable[[Tensor], None]:
    """The hook that hands a parameter's gradient to the reducer; `total` is its view of the buffer.

    It knows the reducer weakly: Python's collector does not see the hooks of tensors, so an engine
    that its own parameters lead back to would stay in memory for ever.
    """
    reference = weakref.ref(reducer)

    @torch.no_grad()
    def take(parameter: Tensor) -> None:
        target = reference()
        assert target is not None, "gradients of an engine that is gone"
        target.take(name, total, parameter)

    return take
