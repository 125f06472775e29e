"""Sums gradients in 16 bits: half the traffic; each rank's share is rounded before it is added."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from headway.config.section import setting
from headway.parallel.hooks.base import HookConfig

if TYPE_CHECKING:
    import torch

    from headway.parallel.collectives import Handle
    from headway.parallel.flat.bucket import Bucket


class Config(HookConfig):
    """Settings of the sum in 16 bits."""

    kind: str = setting("compress", "compress.", on_resume="free")
    dtype: Literal["bf16", "fp16"] = setting(
        "bf16", "What is sent; fp16 is finer and overflows above 65504."
    )

    def build(self, device: torch.device) -> Compress:
        return Compress(self.dtype, device)


class Compress:
    """Exchanges gradients in another precision than they are accumulated in."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        import torch

        from headway.parallel.background import Background

        self.dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
        self.background = Background(device)

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the sum."""
        from headway.parallel.collectives import Then

        ranks = bucket.ranks
        narrow = bucket.flat.to(self.dtype)

        # One collective is asynchronous by itself; two in a row need a thread or a stream.
        if ranks.shard.size == 1:
            return Then(ranks.reduce.all_reduce(narrow), lambda: bucket.flat.copy_(narrow))
        part = bucket.shard_of(narrow)
        if ranks.replicate.size == 1:
            return Then(
                ranks.shard.reduce_scatter(part, narrow), lambda: bucket.local_shard.copy_(part)
            )

        def reduce_twice() -> None:
            ranks.shard.reduce_scatter(part, narrow).wait()
            ranks.replicate.all_reduce(part).wait()
            bucket.local_shard.copy_(part)

        return self.background.run(reduce_twice)
