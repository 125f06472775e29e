"""A stand-in for torch's mps device on machines without one: tensors that say they are there, and refuse what an Apple GPU has not.

Their values lie on the CPU. Refused: float64, pinned memory, numpy without a copy to the CPU, and the fused AdamW operator.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

MPS = torch.device("mps", 0)
MOVES = (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda)


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device that a call asks for."""
    for argument in (kwargs.get("device"), *args):
        if isinstance(argument, torch.device):
            return argument
        if isinstance(argument, str) and argument.split(":")[0] in ("cpu", "mps", "meta", "cuda"):
            return torch.device(argument)
    return None


def _on_cpu(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call for the CPU."""

    def swap(device: Any) -> Any:
        is_mps = (isinstance(device, torch.device) and device.type == "mps") or (
            isinstance(device, str) and device.split(":")[0] == "mps"
        )
        return torch.device("cpu") if is_mps else device

    return tuple(map(swap, args)), {key: swap(value) for key, value in kwargs.items()}


class OnMps(torch.Tensor):
    """A tensor on the stand-in; what is computed from it is there too."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == torch.Tensor.device.__get__:  # pyright: ignore[reportAttributeAccessIssue]
            return MPS
        if func in (torch.Tensor.pin_memory, torch.Tensor.numpy, torch._fused_adamw_):
            raise NotImplementedError(f"{func.__name__} on mps")
        target = torch.device("cpu") if func is torch.Tensor.cpu else _named(args[1:], kwargs)
        if target is not None:
            args, kwargs = _on_cpu(args, kwargs)
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
            return placed(result) if target.type == "mps" else result.as_subclass(torch.Tensor)
        result = super().__torch_function__(func, types, args, kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(tensor, OnMps) and func != torch.Tensor.dtype.__get__:  # pyright: ignore[reportAttributeAccessIssue]
                _check(tensor)
        return result


def _check(tensor: torch.Tensor) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.dtype == torch.float64:
            raise TypeError("the MPS framework does not support float64")


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as one on the stand-in."""
    _check(tensor)
    return tensor.as_subclass(OnMps)


class _Factories(TorchFunctionMode):
    """Calls that name the device: `torch.zeros(3, device="mps")`, `cpu_tensor.to("mps")`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = _named(args, kwargs)
        if (
            func is torch.device
            or target is None
            or target.type != "mps"
            or any(issubclass(kind, OnMps) for kind in types)
        ):
            return func(*args, **kwargs)
        if kwargs.get("pin_memory"):
            raise NotImplementedError("pinned memory for mps")
        args, kwargs = _on_cpu(args, kwargs)
        result = func(*args, **kwargs)
        return placed(result) if isinstance(result, torch.Tensor) else result


@contextmanager
def apple_gpu(monkeypatch: Any) -> Iterator[list[int]]:
    """torch sees an Apple GPU; yields the seeds that its generator gets."""
    seeds: list[int] = []
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.mps, "manual_seed", seeds.append)
    with _Factories():
        yield seeds
