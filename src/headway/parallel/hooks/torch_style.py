"""Hooks written for torch's DistributedDataParallel.

Such a hook is `hook(state, bucket) -> Future` of the MEAN over ranks.

They find in the bucket what torch's has: index(), buffer(), set_buffer(), gradients(),
parameters(), is_last(). Their result is multiplied by the number of ranks, because a gradient here
is a sum. Their `state` is not saved: a resumed run creates it again. On one rank there is nothing
to exchange and the hook is not called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headway.config.section import setting
from headway.config.user_code import import_user_module
from headway.errors import ConfigError, ParallelError
from headway.parallel.hooks.base import HookConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import Tensor

    from headway.parallel.collectives import Handle
    from headway.parallel.flat.bucket import Bucket
    from headway.parallel.mesh import Mesh


class Config(HookConfig):
    """Settings of a hook in torch's style."""

    kind: str = setting("torch_style", "torch_style.", on_resume="free")
    function: str = setting(
        "torch.distributed.algorithms.ddp_comm_hooks.default_hooks:allreduce_hook",
        "The hook, as module:function.",
    )
    state: str | None = setting(
        None, "Function that creates its state, as module:function; null = no state."
    )
    options: dict[str, int | float | bool | str | None] = setting(
        dict, "Keyword arguments of `state`."
    )

    def check(self, mesh: Mesh, precision: str) -> None:
        """Such a hook exchanges among all ranks of the run."""
        if mesh.world != mesh.expert_reduce:
            raise ParallelError(
                "parallel.hook.kind is torch_style, whose hooks exchange among all ranks; with "
                "parallel.tensor, parallel.pipeline or parallel.expert above 1 only some of them "
                "share gradients. Use another hook."
            )

    def build(self, device: torch.device) -> TorchStyle:
        state = None
        if self.state is not None:
            state = find(self.state, "state")(**self.options)
        return TorchStyle(find(self.function, "function"), state)


def find(path: str, key: str) -> Callable[..., Any]:
    """The function at module:name."""
    module, _, name = path.rpartition(":")
    function = getattr(import_user_module(module, f"parallel.hook.{key}"), name, None)
    if not callable(function):
        raise ConfigError(
            f"parallel.hook.{key} is {path!r}; it must be module:function, and {module} has no "
            f"function {name!r}."
        )
    return function


class TorchStyle:
    """Calls a hook in torch's style."""

    def __init__(self, function: Callable[[Any, Any], Any], state: Any) -> None:
        self.function = function
        self.state = state
        self._previous: Any = None
        """The future of the bucket before."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the exchange."""
        from headway.parallel.collectives import Done, Then

        if bucket.ranks.reduce.size == 1:
            return Done()
        if self._previous is not None:
            # Such a hook may start further exchanges from its callbacks (torch's PowerSGD does).
            # With two buckets exchanged at once, ranks would start them in different orders and
            # wait for each other for ever; so one bucket at a time.
            self._previous.wait()
        future = self._previous = self.function(self.state, TorchBucket(bucket))

        def put_back() -> None:
            # torch accepts a tensor or a list with one.
            mean = future.value()
            if isinstance(mean, list):
                mean = mean[0]
            if mean.data_ptr() != bucket.flat.data_ptr():
                bucket.flat.copy_(mean.view(-1))
            bucket.flat.mul_(bucket.ranks.reduce.size)

        return Then(future, put_back)


class TorchBucket:
    """A bucket with the methods of torch's GradBucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._buffer = bucket.flat

    def index(self) -> int:
        """Which bucket, in the order of backward."""
        return self._bucket.index

    def is_last(self) -> bool:
        """No bucket comes after this one."""
        return self._bucket.is_last

    def buffer(self) -> Tensor:
        """The flat gradients."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Use another tensor of the same size."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the flat gradients, one per parameter."""
        start = self._bucket.span.start
        slots = self._bucket.span.slots
        return [
            self._buffer[slot.start - start : slot.start - start + slot.size].view(slot.shape)
            for slot in slots
        ]

    def parameters(self) -> list[Tensor]:
        """The parameters, in the same order."""
        return list(self._bucket.parameters().values())
