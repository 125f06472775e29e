"""Gathers updated parameters on all ranks of a shard group, bucket by bucket.

The order is that in which forward needs them.

Without overlap, every bucket is gathered right after its update. With overlap, one bucket is
gathered ahead of the one forward uses: each block waits for its buckets and starts the next. After
the last block, or after `flush`, everything has been gathered. The FSDP engine leaves gathering to
torch (`parallel/fsdp.py`).
"""

from __future__ import annotations

from torch import nn

from headway.model.base import Model
from headway.parallel.collectives import Handle
from headway.parallel.flat.bucket import Bucket


class ParameterGather:
    """Brings the parameters of all buckets up to date."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self.buckets = list(reversed(buckets))
        """In the order of forward."""
        self._handles: list[Handle] = []
        """Of the buckets whose gathering has begun, in order."""
        self._waited = len(self.buckets)
        """Buckets that are current: at first all of them."""

    def begin(self) -> None:
        """All buckets are out of date from now on."""
        self.flush()
        self._handles = []
        self._waited = 0

    def start_next(self) -> None:
        """Start gathering the next bucket, if one is left."""
        if len(self._handles) == len(self.buckets):
            return
        bucket = self.buckets[len(self._handles)]
        span = bucket.span
        # `.data`: autograd would take a change of this storage for a change of parameters that
        # forward has used.
        param = bucket.buffer.param.data
        whole = param[span.start : span.stop]
        shard = bucket.buffer.local_shard(span, param)
        self._handles.append(bucket.ranks.shard.all_gather(whole, shard))

    def need(self, position: int) -> None:
        """Wait until every bucket up to a position in forward order is current.

        One more is being gathered.
        """
        while self._waited <= position:
            # Start the next one before waiting, so that it travels while this one is used.
            while len(self._handles) < min(self._waited + 2, len(self.buckets)):
                self.start_next()
            self._handles[self._waited].wait()
            self._waited += 1

    def flush(self) -> None:
        """Wait until all parameters are current."""
        self.need(len(self.buckets) - 1)

    def watch(self, model: Model) -> None:
        """Let the modules of a model wait for their parameters when forward reaches them.

        What follows the blocks waits for everything.
        """
        positions = {
            slot.name: position
            for position, bucket in enumerate(self.buckets)
            for slot in bucket.span.slots
        }
        blocks = model.blocks()

        def wait_before(module: nn.Module, prefix: str, *, recurse: bool) -> None:
            names = [prefix + name for name, _ in module.named_parameters(recurse=recurse)]
            needed = max((positions.get(name, -1) for name in names), default=-1)
            if needed >= 0:
                module.register_forward_pre_hook(lambda _module, _inputs: self.need(needed))

        # One hook per block waits for all that is inside it.
        for path, module in model.named_modules():
            is_inside_block = any(path.startswith(f"{name}.") for name in blocks)
            if not is_inside_block:
                prefix = f"{path}.".removeprefix(".")  # the model itself has an empty path
                wait_before(module, prefix, recurse=path in blocks)

        last_block = list(blocks.values())[-1]
        last_block.register_forward_hook(lambda _module, _inputs, _output: self.flush())
