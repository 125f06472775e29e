"""A pass of one rank that may break off anywhere, so that memory can be tried: nobody waits for it, and nothing of it is left.

Exchanges stay on the rank (`Ranks.apart`): tensors have the shapes and the memory they have in training, their values mean nothing. FSDP2
exchanges by itself, through the two callables below; what it remembers of a pass that broke off is cleared by `recover`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from headway.parallel.collectives import all_gather_tensors, reduce_scatter_tensors


class ShardComm:
    """What FSDP2 exchanges parameters and gradients with: as it would by itself, or on this rank alone while `apart`."""

    def __init__(self) -> None:
        self.apart = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for an exchange."""
        return torch.empty(*size, dtype=dtype, device=device)


class Gathering(ShardComm):
    """Parameters to all ranks."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False) -> Any:
        """Every rank's part, one after another; this rank's lies in its place already."""
        if not self.apart:
            return all_gather_tensors(output_tensor, input_tensor, group=group, async_op=async_op)
        for part in output_tensor.chunk(group.size()):
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor)
        return None


class Reducing(ShardComm):
    """The sum of gradients, each rank its part."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False) -> Any:
        """This rank's part of the sum."""
        if not self.apart:
            return reduce_scatter_tensors(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        output_tensor.copy_(input_tensor.chunk(group.size())[group.rank()])
        return None


class ShardTrial:
    """Lets the FSDP2 modules of a model be tried apart."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.gathering, self.reducing = Gathering(), Reducing()
        for module in self.modules:
            module.set_custom_all_gather(self.gathering)  # pyright: ignore[reportArgumentType]
            module.set_custom_reduce_scatter(self.reducing)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Nothing that FSDP2 exchanges meanwhile leaves this rank, if gradients are also kept from replicas (`end_at_shards`)."""
        self.gathering.apart = self.reducing.apart = True
        try:
            yield
        finally:
            self.gathering.apart = self.reducing.apart = False

    def end_at_shards(self) -> None:
        """Replicas do not add their gradients, until gradients are synchronized anew."""
        for module in self.modules:
            module.set_requires_all_reduce(False, recurse=False)

    def recover(self) -> None:
        """Make all modules ready for a forward, wherever the last pass ended: parameters cut again, gradients and places forgotten."""
        states: list[Any] = [module._get_fsdp_state() for module in self.modules]
        root = next((state for state in states if state._is_root), None)
        if root is None:  # it did not even begin
            return
        idle = type(root._training_state).IDLE
        exchange, shared = root._comm_ctx, root._state_ctx
        exchange.all_gather_state = None
        exchange.post_forward_order.clear()
        if isinstance(kept := getattr(exchange, "reduce_scatter_states", None), list):  # from torch 2.12 on; one before
            kept.clear()
        else:
            exchange.reduce_scatter_state = None
        getattr(exchange, "_last_post_reduce_events", {}).clear()
        shared.iter_forward_root, shared.post_backward_final_callback_queued = None, False
        for state in states:
            state._training_state = idle
            getattr(state, "_modules_to_run_forward", set()).clear()
            for group in getattr(state, "_fsdp_param_groups", None) or [one for one in (state._fsdp_param_group,) if one is not None]:
                _recover_group(group, idle)


def _recover_group(group: Any, idle: Any) -> None:
    group._all_gather_result = group._post_reduce_event = group._all_reduce_state = None
    group._reshard_after_forward_event = group._partial_reduce_output = None
    group._post_forward_indices.clear()
    group._training_state = idle
    for one in group.fsdp_params:
        one.unsharded_accumulated_grad = None
        if hasattr(one, "_unsharded_param"):
            one._unsharded_param.grad = None
    group._to_sharded()
