"""A gradient hook of one's own: sums the two halves of a bucket one after the other."""

from typing import Any

from headway.config.section import setting
from headway.parallel.hooks.base import HookConfig


class Config(HookConfig):
    """Settings of the sum in halves."""

    kind: str = setting("support.my_lab.halves", "This module.")

    def build(self, device: Any) -> Any:
        return in_halves


def in_halves(bucket: Any) -> Any:
    middle = bucket.flat.numel() // 2
    bucket.ranks.reduce.all_reduce(bucket.flat[:middle]).wait()
    return bucket.ranks.reduce.all_reduce(bucket.flat[middle:])
