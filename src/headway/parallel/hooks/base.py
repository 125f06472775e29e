"""The contract of a gradient hook: it takes a bucket whose gradients are complete on this rank and starts their exchange.

After `wait` on the handle it returned, `bucket.flat` (or, where the optimizer state is cut, at least `bucket.own`) holds the SUM over all
data ranks. Buckets come in the same order on every rank. A hook with memory from step to step says so in `state`, which is checkpointed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from headway.parallel.bucket import Bucket
    from headway.parallel.collectives import Handle
    from headway.parallel.mesh import Mesh


class Hook(Protocol):
    """Exchanges the gradients of one bucket."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the exchange."""
        ...


class StatefulHook(Protocol):
    """A hook that remembers something between steps."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the exchange."""
        ...

    def tensors(self, ranks: int) -> dict[tuple[str, str], torch.Tensor]:
        """(parameter, role) -> this rank's tensor; ranks' tensors differ and each saves its own."""
        ...

    def load(self, found: dict[tuple[str, str], torch.Tensor], scalars: dict[str, Any]) -> None:
        """Take back what `tensors` and `scalars` gave."""
        ...

    def scalars(self) -> dict[str, Any]:
        """What is to be saved beside the tensors, the same on all ranks."""
        ...


class HookConfig(KindConfig):
    """What every hook's settings hold."""

    KEEPS_STATE: ClassVar[bool] = False

    def build(self, device: torch.device) -> Hook:
        """Make the hook of this rank."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; a kind needs one.")

    def check(self, mesh: Mesh, precision: str) -> None:
        """Refuse a layout or precision this hook cannot serve."""
