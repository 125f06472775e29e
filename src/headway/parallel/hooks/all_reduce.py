"""The plain sum of whole buckets over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.config.section import setting
from headway.parallel.hooks.base import HookConfig

if TYPE_CHECKING:
    import torch

    from headway.parallel.collectives import Handle
    from headway.parallel.flat.bucket import Bucket


class Config(HookConfig):
    """Settings of the plain sum."""

    kind: str = setting("all_reduce", "all_reduce.", on_resume="free")

    def build(self, device: torch.device) -> AllReduce:
        return AllReduce()


class AllReduce:
    """Every rank gets the whole sum."""

    def __call__(self, bucket: Bucket) -> Handle:
        """Start the sum."""
        return bucket.ranks.reduce.all_reduce(bucket.flat)
