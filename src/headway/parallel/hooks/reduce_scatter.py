"""Each rank gets its shard of the sum: half the traffic of an all-reduce.

Replicas then all-reduce their shards.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.section import setting
from headway.errors import ParallelError
from headway.parallel.hooks.base import HookConfig

if TYPE_CHECKING:
    import torch

    from headway.parallel.collectives import Handle
    from headway.parallel.flat.bucket import Bucket
    from headway.parallel.mesh import Mesh


class Config(HookConfig):
    """Settings of the sum in parts."""

    kind: str = setting("reduce_scatter", "reduce_scatter.", on_resume="free")

    def check(self, mesh: Mesh, precision: str) -> None:
        """It needs sharded optimizer state."""
        if mesh.shard == 1 and mesh.world > 1:
            raise ParallelError(
                "parallel.hook.kind is reduce_scatter; it needs parallel.zero1.size above 1. Use "
                "all_reduce, or no hook."
            )

    def build(self, device: torch.device) -> ReduceScatter:
        return ReduceScatter(device)


class ReduceScatter:
    """Every rank gets its part of the sum."""

    def __init__(self, device: torch.device) -> None:
        from headway.parallel.background import Background

        self.background = Background(device)

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the sum: inside the shard group, then across groups."""
        ranks = bucket.ranks
        if ranks.replicate.size == 1:
            return ranks.shard.reduce_scatter(bucket.local_shard, bucket.flat)

        # Two collectives in a row need a thread or a stream to be asynchronous.
        def reduce_twice() -> None:
            ranks.shard.reduce_scatter(bucket.local_shard, bucket.flat).wait()
            ranks.replicate.all_reduce(bucket.local_shard).wait()

        return self.background.run(reduce_twice)
