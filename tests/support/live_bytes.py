"""How many bytes of tensors are alive, by looking at every operation's results. Works on the CPU, where torch keeps no such count."""

from typing import Any
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations made under it and that something still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._storages[storage._cdata] = (ref(storage), storage.nbytes())
        return out

    @property
    def now(self) -> int:
        """Bytes alive."""
        return self.without([])

    def without(self, others: list[torch.Tensor]) -> int:
        """Bytes alive that are not part of some tensors that were there before."""
        there = {tensor.untyped_storage()._cdata for tensor in others}
        return sum(
            size
            for key, (weak, size) in self._storages.items()
            if weak() is not None and key not in there
        )
