"""Flat buffers: the parameters of one group are views of one tensor, in backward order.

So are their gradients.

buffer   [ norm.weight | layers.3.mlp.down | pad ][ ... | embed_tokens | pad ]
         '------------- bucket 0 ---------------''--------- bucket 1 ---------'
         parameters start at multiples of ALIGN, buckets are multiples of shards * ALIGN long
shard    of every bucket the s-th of `shards` equal parts: what this rank updates
param    compute dtype, whole: what the model reads
grads    fp32 (or the compute dtype), whole, bucket by bucket: the sum over all microbatches
master   fp32, this rank's shards one after another: what the optimizer changes
         (param itself, where that is fp32 and not sharded)
state    the optimizer's slots for this rank's shards, in the form of its storage
         (it and master may be in host memory)

For an optimizer of whole matrices, a shard holds whole parameters (`lay_out_whole`), and state is
one tensor per parameter and slot.
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
"""Elements: 128 bytes of bf16, and one block of 8-bit state (optim/state_storage.py), so that no
block has parts of two parameters."""
PADDING = 1.1
"""A bucket of whole parameters is closed once equal shards need at most this many times its
elements."""
MOST_PADDING = 4.0
"""Buffers that are larger than this many times their parameters are refused."""
REFUSED_FROM = 1 << 20
"""Elements of the smallest buffer that is refused: the padding of small ones does not matter."""


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
    """How a buffer is divided into buckets, and each bucket into shards, one per rank."""

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
        length = (self.stop - self.start) // sharding.shards
        start = self.start + sharding.shard * length
        return start, start + length

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
    """Lay out parameters one after another, each at an aligned start.

    A bucket is closed before it grows too large.

    Returns buckets and length.
    """
    spans: list[BucketSpan] = []
    open_slots: list[Slot] = []
    begin = 0
    end = 0
    # Counts a parameter as large as on the rank that holds most of it, so that buckets end at the
    # same parameters on all ranks, which exchange them together.
    filled = 0

    def close() -> None:
        """End the open bucket, padded so that it divides into shards of whole ALIGN units."""
        nonlocal begin, end, filled
        filled = 0
        if open_slots:
            end = begin + _round_up(end - begin, sharding.shards * ALIGN)
            spans.append(BucketSpan(len(spans), begin, end, tuple(open_slots)))
            open_slots.clear()
            begin = end

    for name in names:
        size = _round_up(torch.Size(shapes[name]).numel(), ALIGN)
        largest_size = size
        if largest is not None:
            largest_size = _round_up(largest[name], ALIGN)

        if filled + largest_size > sharding.bucket_elements:
            close()
        open_slots.append(Slot(name, shapes[name], end))
        end += size
        filled += largest_size
    close()
    return spans, end


def lay_out_whole(
    names: Sequence[str], shapes: dict[str, Ints], sharding: BufferSharding
) -> tuple[list[BucketSpan], int]:
    """As `lay_out`, with every parameter inside one shard.

    Buckets grow until their parameters divide into shards of about equal size.
    """
    # One shard holds everything whole anyway.
    if sharding.shards == 1:
        return lay_out(names, shapes, sharding)
    sizes = {name: _round_up(torch.Size(shapes[name]).numel(), ALIGN) for name in names}
    buckets: list[list[str]] = []
    open_bucket: list[str] = []
    for name in names:
        open_bucket.append(name)
        is_full = sum(sizes[member] for member in open_bucket) >= sharding.bucket_elements
        if is_full and _padding(open_bucket, sizes, sharding.shards) <= PADDING:
            buckets.append(open_bucket)
            open_bucket = []

    # Parameters left over that do not divide well alone join the bucket before them.
    if open_bucket and buckets and _padding(open_bucket, sizes, sharding.shards) > PADDING:
        buckets[-1] += open_bucket
    elif open_bucket:
        buckets.append(open_bucket)

    spans: list[BucketSpan] = []
    begin = 0
    for bucket in buckets:
        spans.append(_place_whole(len(spans), begin, bucket, shapes, sharding))
        begin = spans[-1].stop

    needed = sum(sizes.values())
    if begin > MOST_PADDING * needed and begin > REFUSED_FROM:
        raise ParallelError(
            f"the optimizer updates whole matrices, and {len(names)} of them do not divide evenly "
            f"among {sharding.shards} ranks: buffers would be {begin / needed:.1f} times as large "
            "as the parameters. Lower parallel.zero1.size, or use parallel.strategy=fsdp."
        )
    return spans, begin


def _padding(names: Sequence[str], sizes: dict[str, int], shards: int) -> float:
    """The elements of equal shards relative to those of the whole parameters in them."""
    total = sum(sizes[name] for name in names)
    largest = max(sizes[name] for name in names)
    # A shard is at least as long as its largest parameter: no need to try an assignment.
    if largest * shards > PADDING * total:
        return largest * shards / total
    _, largest_load = assign([sizes[name] for name in names], shards)
    return largest_load * shards / total


def _place_whole(
    index: int, begin: int, names: Sequence[str], shapes: dict[str, Ints], sharding: BufferSharding
) -> BucketSpan:
    """One bucket of whole parameters: each lies in the shard that `assign` gives it."""
    sizes = [_round_up(torch.Size(shapes[name]).numel(), ALIGN) for name in names]
    owners, shard_length = assign(sizes, sharding.shards)
    ends = [begin + owner * shard_length for owner in range(sharding.shards)]
    slots: list[Slot] = []
    for name, size, owner in zip(names, sizes, owners, strict=True):
        slots.append(Slot(name, shapes[name], ends[owner]))
        ends[owner] += size
    # By position, as `BucketSpan.gaps` expects.
    slots.sort(key=lambda slot: slot.start)
    stop = begin + sharding.shards * shard_length
    return BucketSpan(index, begin, stop, tuple(slots))


def _round_up(value: int, unit: int) -> int:
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
    """Elements of each parameter on the rank that holds most of it; None: the same on all. Decides
    where buckets end."""


@dataclass(frozen=True)
class LocalSlice:
    """The elements of one parameter that this rank updates."""

    first: int
    """The first of them, counted in the parameter."""
    size: int
    packed_start: int
    """Where they begin in `master` and `state`, which hold this rank's shards alone."""


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
    """State of the parameters in this rank's shards, by name, if the optimizer updates whole ones;
    `state` is empty then."""

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
        """Make the tensors of one group, all zero.

        Parameters are laid out last first, the order in which backward finishes them.
        """
        names = tuple(reversed(group.names))
        if spec.whole is None:
            spans, length = lay_out(names, shapes, sharding, spec.largest)
        else:
            spans, length = lay_out_whole(names, shapes, sharding)
        param = torch.zeros(length, dtype=dtype, device=device)

        home = device
        pin = False
        if spec.on_host:
            home = torch.device("cpu")
            pin = device.type == "cuda"
        # One tensor serves as both where the model may compute with the masters themselves.
        master = param
        if dtype != torch.float32 or sharding.shards > 1 or spec.averages:
            master = torch.zeros(
                length // sharding.shards, dtype=torch.float32, device=home, pin_memory=pin
            )

        # Parameters that stay fp32 (gates) have gradients in fp32, whatever the others accumulate
        # in.
        grad_dtype = spec.grad_dtype
        if dtype == torch.float32:
            grad_dtype = torch.float32
        grads = [
            torch.zeros(span.stop - span.start, dtype=grad_dtype, device=device) for span in spans
        ]
        state = {}
        if spec.whole is None:
            state = spec.storage.allocate(spec.slots, master.numel(), home, pin=pin)
        steps = torch.zeros(len(spans), dtype=torch.float32, device=device)
        buffer = cls(group, sharding, spans, param, master, grads, state, steps)
        if spec.whole is not None:
            buffer.whole_state = {
                slot.name: spec.whole.allocate_whole(slot.shape, device)
                for span in spans
                for slot in buffer.local_slots(span)
            }
        return buffer

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
        """One bucket's part of a tensor that holds only this rank's shards, such as `master`.

        It has an element for each of theirs, or for a block of them (scales of 8-bit state).
        """
        unit = self.sharding.shards * (self.master.numel() // parts.numel())
        return parts[span.start // unit : span.stop // unit]

    def local_slice(self, span: BucketSpan, slot: Slot) -> LocalSlice | None:
        """Which elements of a parameter are this rank's."""
        start, stop = span.shard_range(self.sharding)
        first = max(start, slot.start)
        last = min(stop, slot.start + slot.size)
        if first >= last:
            return None
        # Shards of all buckets have the same share of them, so those before this one are together
        # span.start / shards long.
        packed_start = span.start // self.sharding.shards + first - start
        return LocalSlice(first - slot.start, last - first, packed_start)

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
        # Gates stay fp32 and quantised matrices are bytes, so there may be several precisions.
        values: dict[str, Tensor] = {}
        for dtype in dict.fromkeys(map(dtype_of, names)):
            of_dtype = [name for name in names if dtype_of(name) == dtype]
            spans, length = lay_out(of_dtype, shapes, BufferSharding())
            flat = torch.zeros(length, dtype=dtype, device=device)
            values |= {slot.name: slot.view(flat) for span in spans for slot in span.slots}
        return cls({name: values[name] for name in names})


def boxes_of(shape: Ints, first: int, size: int) -> list[tuple[Box, int]]:
    """The elements first .. first + size of a row-major tensor as boxes.

    Each box comes with its start in those elements: a part of a row, whole rows, a part of a row.

        shape (3, 4), first 2, size 7      . . a a     a  offset (0, 2), shape (1, 2), start 0
                                           b b b b     b  offset (1, 0), shape (1, 4), start 2
                                           c . . .     c  offset (2, 0), shape (1, 1), start 6
    """
    if size == 0:
        return []
    if not shape:
        return [(Box((), ()), 0)]
    inner = torch.Size(shape[1:]).numel()
    row, skip = divmod(first, inner)
    boxes: list[tuple[Box, int]] = []
    done = 0  # elements that have a box

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
