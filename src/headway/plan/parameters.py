"""How many parameters a rank has: names and shapes of all parameters come in, counts by part, layer and rank go out. Imports no torch.

A tensor rank has its share of what is split and all of what is replicated; KV heads fewer than ranks are on several ranks. A pipeline rank
has the layers of its stages; the first stage the embedding, the last the final norm and head, and a copy of a tied embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod

from headway.kernels.packed_layout import form_of, plain_name
from headway.model.config import ModelConfig
from headway.model.layout import EMBEDDING, EXPERTS, HEAD, SCORE, ParamSpec, param_specs

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ParamCount:
    """Parameters that train and those that do not."""

    trained: int = 0
    frozen: int = 0
    packed: int = 0
    """Of those that do not train: stored quantised."""
    packed_bytes: int = 0
    experts: int = 0
    """Of those that train: of experts that ranks share."""
    frozen_experts: int = 0

    def __add__(self, other: ParamCount) -> ParamCount:
        return ParamCount(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    @property
    def total(self) -> int:
        """Both together."""
        return self.trained + self.frozen


@dataclass(frozen=True)
class ModelCounts:
    """Counts of one tensor rank: of each layer, and what is before and after the layers."""

    layers: tuple[ParamCount, ...]
    embedding: ParamCount
    head: ParamCount
    """Nothing if it is the embedding."""
    final_norm: ParamCount
    other: ParamCount
    """Head gates and whatever else has no layer; on every rank."""

    def on_stages(self, ranges: Sequence[range], *, first: bool, last: bool) -> ParamCount:
        """Of a pipeline rank with these layers."""
        total = sum((self.layers[layer] for one in ranges for layer in one), self.other)
        if first:
            total += self.embedding
        if last:
            total += self.final_norm + self.head
            if not first and not self.head.total:  # a tied head needs the embedding here too
                total += self.embedding
        return total


def count_parameters(
    model: ModelConfig, shapes: Shapes, training: Collection[str], tensor: int = 1, expert: int = 1
) -> ModelCounts:
    """Counts of one tensor and expert rank. `shapes` has adapters too, and the bytes of what is stored quantised."""
    specs = {spec.name: spec for spec in param_specs(model)}
    layers = [ParamCount() for _ in range(model.num_layers)]
    ends = {
        "embedding": ParamCount(),
        "head": ParamCount(),
        "norm": ParamCount(),
        "other": ParamCount(),
    }
    for name, shape in shapes.items():
        if form_of(name) is not None:
            size = specs[plain_name(name)].size
            one = ParamCount(0, size, size, prod(shape))
        else:
            size = _local_size(name, shape, specs, model, tensor)
            is_shared = expert > 1 and EXPERTS in name
            size //= expert if is_shared else 1
            one = ParamCount(size, 0) if name in training else ParamCount(0, size)
            if is_shared:
                one = replace(one, experts=one.trained, frozen_experts=one.frozen)
        parts = name.split(".")
        if parts[:2] == ["model", "layers"]:
            layers[int(parts[2])] += one
        else:
            at = (
                "embedding"
                if name == EMBEDDING
                else "head"
                if name == SCORE or name.startswith(HEAD.removesuffix("weight"))
                else "other"
            )
            ends["norm" if name.startswith("model.norm") else at] += one
    return ModelCounts(tuple(layers), ends["embedding"], ends["head"], ends["norm"], ends["other"])


def _local_size(
    name: str,
    shape: tuple[int, ...],
    specs: Mapping[str, ParamSpec],
    model: ModelConfig,
    tensor: int,
) -> int:
    size = prod(shape)
    if tensor == 1:
        return size
    path, _, part = name.partition(".lora_")
    base = specs.get(f"{path}.weight" if part else name)
    if base is None or base.split == "replicated":
        return size
    if part:
        # A of a row-split and B of a column-split matrix are split with it; the other one is whole on every rank.
        is_split = part.startswith("A") == (base.split == "row")
        if not is_split:
            return size
    is_kv = any(f".{leaf}." in name for leaf in ("k_proj", "v_proj"))
    return size // (min(tensor, model.kv_heads) if is_kv else tensor)


def parts_of(counts: ModelCounts) -> dict[str, int]:
    """Parameters by part, for people."""
    found = {
        "embedding": counts.embedding.total,
        "layers": sum(layer.total for layer in counts.layers),
        "final norm": counts.final_norm.total,
        "head": counts.head.total,
        "other": counts.other.total,
    }
    return {name: size for name, size in found.items() if size}
