"""Values on their way: base weights come in and go out with their updates, or both come in and a model without updates goes out.

Streams of (name, tensor), in any order; a linear is held back until its update is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from headway.model.adapter.config import PARTS, AdapterConfig
from headway.runtime.seed import derive

Values = Iterable[tuple[str, Tensor]]
A, B, MAGNITUDE = PARTS


def with_updates(
    base: Values, config: AdapterConfig, modules: Iterable[str], seed: int, given: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The base weights and beside each adapted one its update: the given tensors, or one that changes nothing yet."""
    adapted = set(modules)
    for name, value in base:
        yield name, value
        path = name.removesuffix(".weight")
        if name.endswith(".weight") and path in adapted:
            for part in config.parts:
                here = f"{path}.{part}"
                yield here, given[here] if here in given else _first(here, part, value, config, seed)


def _first(name: str, part: str, weight: Tensor, config: AdapterConfig, seed: int) -> Tensor:
    """A is drawn from (seed, name) as PEFT draws it, B is zero, the magnitude is the length of the rows."""
    outputs, inputs = weight.shape
    if part == A:
        generator = torch.Generator(device="cpu").manual_seed(derive(seed, "init", name))
        bound = inputs**-0.5
        return torch.empty(config.rank, inputs, device="cpu").uniform_(-bound, bound, generator=generator)
    if part == B:
        return torch.zeros(outputs, config.rank, device="cpu")
    return torch.linalg.vector_norm(weight.float(), dim=1)


def merged_weight(weight: Tensor, parts: Mapping[str, Tensor], config: AdapterConfig) -> Tensor:
    """The one matrix that does what a linear and its update do, in fp32."""
    whole = weight.float() + config.scale * (parts[B].float().to(weight.device) @ parts[A].float().to(weight.device))
    if config.kind == "lora":
        return whole
    return whole * (parts[MAGNITUDE].float().to(weight.device) / torch.linalg.vector_norm(whole, dim=1))[:, None]


def merged(values: Values, config: AdapterConfig, modules: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """The weights of the model without updates: each adapted linear as soon as all of it is there, everything else as it comes."""
    needed = {path: {"weight", *config.parts} for path in modules}
    held: dict[str, dict[str, Tensor]] = {path: {} for path in needed}
    for name, value in values:
        path, part = split_name(name)
        if path not in needed or part not in needed[path]:
            yield name, value
            continue
        held[path][part] = value
        if len(held[path]) == len(needed[path]):
            parts = held.pop(path)
            yield f"{path}.weight", merged_weight(parts["weight"], parts, config)
    assert not held, f"{next(iter(held))} came without its update"


def split_name(name: str) -> tuple[str, str]:
    """(path of the linear, what of it): `...q_proj`, `lora_A.weight`."""
    for part in PARTS:
        if name.endswith("." + part):
            return name[: -len(part) - 1], part
    path, _, leaf = name.rpartition(".")
    return path, leaf
