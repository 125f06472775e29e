"""The contract of a gradient hook: it starts the exchange of one bucket of gradients.

The gradients of the bucket are complete on this rank.

After `wait` on the handle it returned, `bucket.flat` (or, where the optimizer state is sharded, at
least `bucket.local_shard`) holds the SUM over all ranks (`bucket.ranks.reduce`). Buckets come in
the same order on every rank. A hook that keeps something from step to step is a StatefulHook.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from headway.config.kinds import KindConfig
from headway.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from headway.parallel.box import StateTensor
    from headway.parallel.collectives import Handle, RankGroup
    from headway.parallel.engine import ReadTensor
    from headway.parallel.flat.bucket import Bucket
    from headway.parallel.mesh import Mesh


class Hook(Protocol):
    """Exchanges the gradients of one bucket."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the exchange."""
        ...


@runtime_checkable
class StatefulHook(Protocol):
    """A hook that remembers something between steps, which belongs into checkpoints."""

    def tensors(self, ranks: RankGroup) -> Iterator[StateTensor]:
        """What to save."""
        ...

    def scalars(self, ranks: RankGroup) -> dict[str, Any]:
        """What to save besides tensors, the same on all ranks."""
        ...

    def load(
        self, read: ReadTensor, scalars: dict[str, Any], ranks: RankGroup, device: torch.device
    ) -> None:
        """Restore what `tensors` and `scalars` returned.

        The number of ranks may have changed, and so may the hook.
        """
        ...


class HookConfig(KindConfig):
    """What every hook's settings hold."""

    NEEDS_FP32: ClassVar[bool] = False
    """Whether the gradients it is given must be fp32."""

    def build(self, device: torch.device) -> Hook:
        """Make the hook of this rank."""
        raise ConfigError(f"{type(self).__module__} defines no Config.build; a kind needs one.")

    def check(self, mesh: Mesh, precision: str) -> None:
        """Refuse a layout or precision this hook cannot serve."""
