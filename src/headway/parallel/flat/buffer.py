"""Flat buffers: the parameters of one group are views of one tensor, in backward order; so are their gradients.

buffer   [ norm.weight | layers.3.mlp.down | pad ][ ... | embed_tokens | pad ]      starts aligned to ALIGN elements
         '------------- bucket 0 ---------------''--------- bucket 1 ---------'     lengths a multiple of shards * ALIGN
shard    of every bucket the s-th of `shards` equal parts: what this rank updates
param    compute dtype, whole: what the model reads
grads    fp32 (or the compute dtype), whole, bucket by bucket: where the gradients of all microbatches are added up
master   fp32, this rank's shards one after another: what the optimizer changes (param itself where that is fp32 and not sharded)
state    the optimizer's slots for this rank's shards, in the form of its storage; it and master may be in host memory

For an optimizer of whole matrices, a shard holds whole parameters (`lay_out_whole`), and state is one tensor per parameter and slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from headway.errors import ParallelError
from headway.optim.groups import ParamGroup
from headway.optim.state_storage import StateStorage
from headway.parallel.box import Box, Ints
from headway.parallel.update_rules import UpdateRule, WholeState, assign

ALIGN = 64
PADDING = 1.1
"""A bucket of whole parameters is closed once equal shards need at most this many times its elements."""
MOST_PADDING = 4.0


@dataclass(frozen=True)
class Slot:
    """The position of one parameter in its buffer."""

    name: str
    shape: Ints
    start: int

    @property
    def size(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def view(self, flat: Tensor, begin: int = 0) -> Tensor:
        """This parameter's part of a flat tensor that begins at `begin`."""
        return flat[self.start - begin : self.start - begin + self.size].view(self.shape)


@dataclass(frozen=True)
class BufferSharding:
    """How a buffer is divided: into buckets of about this many elements, each split into shards, one per rank."""

    bucket_elements: int = 1 << 23
    shards: int = 1
    shard: int = 0


@dataclass(frozen=True)
class BucketSpan:
    """The elements of one bucket in its buffer, and its parameters."""

    index: int
    start: int
    stop: int
    slots: tuple[Slot, ...]

    def shard_range(self, sharding: BufferSharding) -> tuple[int, int]:
        """Which elements of the buffer are this rank's shard."""
        each = (self.stop - self.start) // sharding.shards
        return self.start + sharding.shard * each, self.start + (sharding.shard + 1) * each

    def gaps(self) -> list[tuple[int, int]]:
        """Elements between and after the parameters, counted from the bucket's start."""
        ends = [self.start, *(slot.start + slot.size for slot in self.slots)]
        starts = [*(slot.start for slot in self.slots), self.stop]
        return [
            (end - self.start, start - self.start)
            for end, start in zip(ends, starts, strict=True)
            if end < start
        ]


def lay_out(
    names: Sequence[str],
    shapes: dict[str, Ints],
    sharding: BufferSharding,
    largest: dict[str, int] | None = None,
) -> tuple[list[BucketSpan], int]:
    """Lay out parameters one after another, each start aligned; close a bucket before it grows too large. Returns buckets and length."""
    spans: list[BucketSpan] = []
    open_slots: list[Slot] = []
    begin = end = filled = 0

    def close() -> None:
        nonlocal begin, end, filled
        filled = 0
        if open_slots:
            end = begin + _up(end - begin, sharding.shards * ALIGN)
            spans.append(BucketSpan(len(spans), begin, end, tuple(open_slots)))
            open_slots.clear()
            begin = end

    for name in names:
        size = _up(torch.Size(shapes[name]).numel(), ALIGN)
        most = size if largest is None else _up(largest[name], ALIGN)
        if filled + most > sharding.bucket_elements:
            close()
        open_slots.append(Slot(name, shapes[name], end))
        end += size
        filled += most
    close()
    return spans, end


def lay_out_whole(
    names: Sequence[str], shapes: dict[str, Ints], sharding: BufferSharding
) -> tuple[list[BucketSpan], int]:
    """As `lay_out`, with every parameter inside one shard. Buckets grow until their parameters divide into shards of about equal size."""
    if sharding.shards == 1:
        return lay_out(names, shapes, sharding)
    sizes = {name: _up(torch.Size(shapes[name]).numel(), ALIGN) for name in names}
    buckets: list[list[str]] = [[]]
    for name in names:
        buckets[-1].append(name)
        if (
            sum(sizes[one] for one in buckets[-1]) >= sharding.bucket_elements
            and _padding(buckets[-1], sizes, sharding.shards) <= PADDING
        ):
            buckets.append([])
    rest = buckets.pop()
    if rest and buckets and _padding(rest, sizes, sharding.shards) > PADDING:
        buckets[-1] += rest
    elif rest:
        buckets.append(rest)
    spans: list[BucketSpan] = []
    begin = 0
    for bucket in buckets:
        spans.append(_place_whole(len(spans), begin, bucket, shapes, sharding))
        begin = spans[-1].stop
    needed = sum(sizes.values())
    if begin > MOST_PADDING * needed and begin > 1 << 20:
        raise ParallelError(
            f"the optimizer updates whole matrices, and {len(names)} of them do not divide evenly among {sharding.shards} ranks: buffers "
            f"would be {begin / needed:.1f} times as large as the parameters. Lower parallel.zero1.size, or use parallel.strategy=fsdp."
        )
    return spans, begin


def _padding(names: Sequence[str], sizes: dict[str, int], shards: int) -> float:
    """How many times their own elements parameters take when each lies in one of `shards` equal shards."""
    total = sum(sizes[name] for name in names)
    if (
        max(sizes[name] for name in names) * shards > PADDING * total
    ):  # what no assignment can balance
        return max(sizes[name] for name in names) * shards / total
    return assign([sizes[name] for name in names], shards)[1] * shards / total


def _place_whole(
    index: int, begin: int, names: Sequence[str], shapes: dict[str, Ints], sharding: BufferSharding
) -> BucketSpan:
    sizes = [_up(torch.Size(shapes[name]).numel(), ALIGN) for name in names]
    owners, each = assign(sizes, sharding.shards)
    ends = [begin + owner * each for owner in range(sharding.shards)]
    slots: list[Slot] = []
    for name, size, owner in zip(names, sizes, owners, strict=True):
        slots.append(Slot(name, shapes[name], ends[owner]))
        ends[owner] += size
    return BucketSpan(
        index,
        begin,
        begin + sharding.shards * each,
        tuple(sorted(slots, key=lambda slot: slot.start)),
    )


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


@dataclass(frozen=True)
class BufferSpec:
    """What a buffer holds besides parameters."""

    slots: Sequence[str] = ()
    storage: StateStorage = StateStorage()
    grad_dtype: torch.dtype = torch.float32
    on_host: bool = False
    """Master weights and state are in host memory."""
    whole: UpdateRule | None = None
    """The rule, if it updates whole parameters."""
    averages: bool = False
    """Masters are averages of what trains, so they are never the compute parameters themselves."""
    largest: dict[str, int] | None = None
    """Elements of each parameter on the rank that holds most of it; None: the same on all. Decides where buckets end."""


@dataclass(frozen=True)
class LocalSlice:
    """The elements of one parameter that this rank owns: `size` of them from `first` on, lying at `at` in master and state."""

    first: int
    size: int
    at: int


@dataclass
class TrainBuffer:
    """The trainable parameters of one group."""

    group: ParamGroup
    sharding: BufferSharding
    spans: list[BucketSpan]
    param: Tensor
    master: Tensor
    grads: list[Tensor]
    """One per bucket, each with a separate storage, so that it can be freed between steps."""
    state: dict[str, Tensor]
    steps: Tensor
    """fp32, one per bucket: updates that were really done."""
    whole_state: dict[str, WholeState] | None = None
    """State of the parameters in this rank's shards, by name, if the optimizer updates whole ones; `state` is empty then."""

    @classmethod
    def allocate(
        cls,
        group: ParamGroup,
        shapes: dict[str, Ints],
        dtype: torch.dtype,
        device: torch.device,
        sharding: BufferSharding,
        spec: BufferSpec,
    ) -> TrainBuffer:
        """Make the tensors of one group, all zero. Parameters are laid out last first, the order in which backward finishes them."""
        names = tuple(reversed(group.names))
        spans, length = (
            lay_out(names, shapes, sharding, spec.largest)
            if spec.whole is None
            else lay_out_whole(names, shapes, sharding)
        )
        param = torch.zeros(length, dtype=dtype, device=device)
        home, pin = (
            (torch.device("cpu"), device.type == "cuda") if spec.on_host else (device, False)
        )
        shares = dtype == torch.float32 and sharding.shards == 1 and not spec.averages
        master = (
            param
            if shares
            else torch.zeros(
                length // sharding.shards, dtype=torch.float32, device=home, pin_memory=pin
            )
        )
        grad_dtype = spec.grad_dtype if dtype != torch.float32 else dtype
        grads = [
            torch.zeros(span.stop - span.start, dtype=grad_dtype, device=device) for span in spans
        ]
        state = (
            {}
            if spec.whole is not None
            else spec.storage.allocate(spec.slots, master.numel(), home, pin=pin)
        )
        made = cls(
            group,
            sharding,
            spans,
            param,
            master,
            grads,
            state,
            torch.zeros(len(spans), dtype=torch.float32, device=device),
        )
        if spec.whole is not None:
            made.whole_state = {
                slot.name: spec.whole.allocate_whole(slot.shape, device)
                for span in spans
                for slot in made.local_slots(span)
            }
        return made

    def local_slots(self, span: BucketSpan) -> list[Slot]:
        """The parameters of a bucket that have elements in this rank's shard."""
        return [slot for slot in span.slots if self.local_slice(span, slot) is not None]

    @property
    def slots(self) -> list[Slot]:
        """Every parameter's slot, in the order of the buffer."""
        return [slot for span in self.spans for slot in span.slots]

    def gradient(self, span: BucketSpan, slot: Slot) -> Tensor:
        """Where the gradient of a parameter is added up."""
        return slot.view(self.grads[span.index], span.start)

    @property
    def gradients(self) -> dict[str, Tensor]:
        """Views of all gradients by parameter."""
        return {slot.name: self.gradient(span, slot) for span in self.spans for slot in span.slots}

    def local_shard(self, span: BucketSpan, whole: Tensor) -> Tensor:
        """This rank's part of one bucket in a tensor as long as the buffer."""
        start, stop = span.shard_range(self.sharding)
        return whole[start:stop]

    def packed(self, span: BucketSpan, parts: Tensor) -> Tensor:
        """One bucket's part in a tensor that holds only this rank's parts, one element for each of them or for a block of them."""
        unit = self.sharding.shards * (self.master.numel() // parts.numel())
        return parts[span.start // unit : span.stop // unit]

    def local_slice(self, span: BucketSpan, slot: Slot) -> LocalSlice | None:
        """Which elements of a parameter are this rank's."""
        start, stop = span.shard_range(self.sharding)
        first, last = max(start, slot.start), min(stop, slot.start + slot.size)
        return (
            LocalSlice(
                first - slot.start, last - first, span.start // self.sharding.shards + first - start
            )
            if first < last
            else None
        )

    def refresh(self, span: BucketSpan) -> None:
        """Derive this rank's part of the compute parameters from its master weights."""
        if self.param is not self.master:
            self.local_shard(span, self.param).copy_(self.packed(span, self.master))


@dataclass
class FrozenBuffer:
    """Parameters that do not train: no master, no gradient, no state."""

    values: dict[str, Tensor] = field(repr=False)
    """Views of one tensor per precision, in the order of the model."""

    @classmethod
    def allocate(
        cls,
        names: Sequence[str],
        shapes: dict[str, Ints],
        dtype_of: Callable[[str], torch.dtype],
        device: torch.device,
    ) -> FrozenBuffer:
        """Make the tensors, all zero."""
        values: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(map(dtype_of, names)):
            spans, length = lay_out(
                [name for name in names if dtype_of(name) == dtype], shapes, BufferSharding()
            )
            flat = torch.zeros(length, dtype=dtype, device=device)
            values |= {slot.name: slot.view(flat) for span in spans for slot in span.slots}
        return cls({name: values[name] for name in names})


def boxes_of(shape: Ints, first: int, size: int) -> list[tuple[Box, int]]:
    """The elements first .. first + size of a row-major tensor as boxes, each with its start in those elements."""
    if size == 0:
        return []
    if not shape:
        return [(Box((), ()), 0)]
    inner = torch.Size(shape[1:]).numel()
    row, skip = divmod(first, inner)
    boxes: list[tuple[Box, int]] = []
    done = 0

    def add_part_of_row(skipped: int, length: int) -> None:
        for box, start in boxes_of(shape[1:], skipped, length):
            boxes.append((Box((row, *box.offset), (1, *box.shape)), done + start))

    if skip:
        head = min(inner - skip, size)
        add_part_of_row(skip, head)
        done = head
        row += 1
    rows = (size - done) // inner
    if rows:
        boxes.append((Box((row, *(0 for _ in shape[1:])), (rows, *shape[1:])), done))
        done += rows * inner
        row += rows
    if done < size:
        add_part_of_row(0, size - done)
    return boxes
