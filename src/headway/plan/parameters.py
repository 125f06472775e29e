"""How many parameters a rank has: the specs of all parameters come in, counts by part, layer and
rank go out. Imports no torch.

A tensor rank has its share of what is split and all of what is replicated; KV heads fewer than
ranks are on several ranks. A pipeline rank has the layers of its stages; the first stage the
embedding, the last the final norm and head, and a copy of a tied embedding.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace

from headway.kernels.packed_layout import form_of, plain_name
from headway.model.config import ModelConfig
from headway.model.layout import ParamSpec, Specs, param_specs


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
            *(getattr(self, count.name) + getattr(other, count.name) for count in fields(self))
        )

    @property
    def total(self) -> int:
        """Parameters that train and those that do not."""
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
        """Counts of a pipeline rank with these layers; `first` and `last`: it has those stages."""
        total = sum((self.layers[layer] for layers in ranges for layer in layers), self.other)
        if first:
            total += self.embedding
        if last:
            total += self.final_norm + self.head
            if not first and not self.head.total:  # a tied head needs the embedding here too
                total += self.embedding
        return total


def count_parameters(
    model: ModelConfig, specs: Specs, training: Collection[str], tensor: int = 1, expert: int = 1
) -> ModelCounts:
    """Counts of one tensor and expert rank. `specs` has adapters too, and the bytes of what is
    stored quantised."""
    sizes = {spec.name: spec.size for spec in param_specs(model)}
    layers = [ParamCount() for _ in range(model.num_layers)]
    ends = {
        "embedding": ParamCount(),
        "head": ParamCount(),
        "norm": ParamCount(),
        "other": ParamCount(),
    }
    for name, spec in specs.items():
        if form_of(name) is not None:
            # A quantised parameter: its spec counts bytes, the model's own spec the numbers they
            # stand for.
            size = sizes[plain_name(name)]
            count = ParamCount(0, size, size, spec.size)
        else:
            size = _local_size(spec, model, tensor)
            is_divided_by_expert = expert > 1 and "expert" in spec.groups
            if is_divided_by_expert:
                size //= expert
            if name in training:
                count = ParamCount(size, 0)
            else:
                count = ParamCount(0, size)
            if is_divided_by_expert:
                count = replace(count, experts=count.trained, frozen_experts=count.frozen)
        if isinstance(spec.stage, int):
            layers[spec.stage] += count
        else:
            ends[_end(spec)] += count
    return ModelCounts(tuple(layers), ends["embedding"], ends["head"], ends["norm"], ends["other"])


def _end(spec: ParamSpec) -> str:
    """What a parameter outside of the layers belongs to."""
    # A reward model's score matrix stands where the head would.
    if spec.stage == "last":
        return "norm" if spec.groups.isdisjoint({"embedding", "score"}) else "head"
    return "embedding" if "embedding" in spec.groups else "other"


def _local_size(spec: ParamSpec, model: ModelConfig, tensor: int) -> int:
    """Elements of a parameter on one tensor rank."""
    if spec.split_dim is None:
        return spec.size
    # With more ranks than KV heads, several ranks have copies of one head.
    if spec.of_kv_heads:
        ranks = min(tensor, model.kv_heads)
    else:
        ranks = tensor
    return spec.size // ranks


def parts_of(counts: ModelCounts) -> dict[str, int]:
    """Parameters by part, for people."""
    parts = {
        "embedding": counts.embedding.total,
        "layers": sum(layer.total for layer in counts.layers),
        "final norm": counts.final_norm.total,
        "head": counts.head.total,
        "other": counts.other.total,
    }
    return {name: size for name, size in parts.items() if size}
