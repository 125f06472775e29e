"""Buckets of gradients and the reducer: parameters report their gradients, and complete buckets are exchanged in a fixed order.

Ranks must start the same exchanges in the same order, so buckets are numbered once (the order in which backward is expected to finish them)
and bucket k is sent only after bucket k-1. Which parameters take part, and how often each reports, is learned in the first step; a
parameter that is missing later counts as zero on that rank, one that reports after its bucket was sent is an error that names it.
Nothing is exchanged before the last microbatch of a step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor

from headway.errors import ParallelError
from headway.parallel.collectives import Handle, RankGroups
from headway.parallel.flat.buffer import BucketSpan, TrainBuffer
from headway.parallel.hooks.base import Hook


@dataclass
class Bucket:
    """Some gradients that are exchanged together, as a hook sees them."""

    index: int
    is_last: bool
    ranks: RankGroups
    flat: Tensor
    """This rank's gradients (fp32, unless accumulate_dtype says otherwise), padding between them; the sum over ranks goes here."""
    local_shard: Tensor
    """The part of `flat` whose sum this rank needs (all of it if the optimizer state is not sharded)."""
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
            for start, stop in self.span.gaps():  # padding counts in norms and sums
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
    """All buckets in the order in which backward finishes them; `order` has the parameters as forward meets them.

    Those that stages of a pipeline share are complete when all of them are, so they come last.
    """
    position = {name: index for index, name in enumerate(order)}
    found = [
        (min(position[slot.name] for slot in span.slots), span, buffer)
        for buffer in buffers
        for span in buffer.spans
    ]
    found.sort(key=lambda entry: (entry[1].slots[0].name in sharers, -entry[0]))
    buckets: list[Bucket] = []
    for index, (_, span, buffer) in enumerate(found):
        flat = buffer.grads[span.index]
        start, stop = span.shard_range(buffer.sharding)
        shard = flat[start - span.start : stop - span.start]
        first = span.slots[0].name
        shared, ranks = sharers.get(first, ()), ranks_of(first)
        buckets.append(
            Bucket(index, index == len(found) - 1, ranks, flat, shard, span, buffer, shared)
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
        self.buckets, self.hook, self.overlap, self.share = buckets, hook, overlap, share
        self._early = sum(not bucket.sharers for bucket in buckets)
        """Buckets that may be sent during backward."""
        self.bucket_of = {slot.name: bucket for bucket in buckets for slot in bucket.span.slots}
        self.expected: dict[str, int] | None = None
        """Reports per parameter in the last microbatch; learned in the first step."""
        self.touched: set[str] = set()
        """Parameters whose gradient has arrived in this step."""
        self._counts: dict[str, int] = {}
        self._missing: list[int] = []
        self._handles: list[Handle] = []
        self._last = self._begun = False

    def begin_last(self) -> None:
        """The last microbatch of the step comes next: complete buckets may be sent. In a pipeline, the last one of a stage."""
        self._last = True
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
        """Add one microbatch's gradient to the flat buffer; the first of a step overwrites what the last step left."""
        self._check(name)
        if parameter.grad is None:
            pass  # undefined, which means zero: a gate of which no head of this rank is open
        elif name in self.touched:
            total.add_(parameter.grad)
        else:
            self.bucket_of[name].allocate()
            total.copy_(parameter.grad)
            self.touched.add(name)
        parameter.grad = None
        if self._last:
            self._report(name)

    def taken(self, name: str) -> None:
        """A parameter's gradient has been computed where it belongs, as the first of the step."""
        self._check(name)
        self.touched.add(name)
        if self._last:
            self._report(name)

    def _check(self, name: str) -> None:
        if len(self._handles) > self.bucket_of[name].index:
            raise ParallelError(
                f"{name} got a gradient after its bucket was exchanged: it was unused in the first step, or is used more often now. "
                "Use parallel.overlap.reduce=false for models that do not use all parameters in every step."
            )

    def _report(self, name: str) -> None:
        self._counts[name] += 1
        if self.hook is None or not self.overlap or self.expected is None:
            return
        if self._counts[name] <= self.expected[name]:
            self._missing[self.bucket_of[name].index] -= 1
        while len(self._handles) < self._early and self._missing[len(self._handles)] == 0:
            self._launch(self.hook)

    def _launch(self, hook: Hook) -> None:
        bucket = self.buckets[len(self._handles)]
        self._clear(bucket)
        self._sum_shared(bucket)
        self._handles.append(hook(bucket))

    def _clear(self, bucket: Bucket) -> None:
        """Clear the gradients of parameters unused in this step; the buffer still contains those of the last step."""
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
        before = self.expected or {}
        self.expected = {
            name: max(count, before.get(name, 0)) for name, count in self._counts.items()
        }
        self._handles, self._last, self._begun = [], False, False
        self.touched.clear()


class InPlace:
    """Lets one parameter's gradient be computed in the flat buffer itself: once per step, before anything else is added there."""

    def __init__(self, reducer: Reducer, name: str, total: Tensor) -> None:
        self.reducer, self.name, self.total = reducer, name, total
        self._given = False

    def take(self) -> Tensor | None:
        """The gradient's view of the buffer, unless it is in use."""
        if self._given or self.name in self.reducer.touched:
            return None
        self._given = True
        self.reducer.bucket_of[self.name].allocate()
        return self.total

    def done(self) -> None:
        """The gradient has been written."""
        self._given = False
        self.reducer.taken(self.name)

    def reset(self) -> None:
        """Forget a pass that was never back-propagated."""
        self._given = False


def taking(reducer: Reducer, name: str, total: Tensor) -> Callable[[Tensor], None]:
    """The hook of a parameter. It knows the reducer weakly: Python's collector does not see the hooks of tensors, so an engine that its own
    parameters lead back to would stay in memory for ever."""
    known = weakref.ref(reducer)

    @torch.no_grad()
    def take(parameter: Tensor) -> None:
        found = known()
        assert found is not None, "gradients of an engine that is gone"
        found.take(name, total, parameter)

    return take
