"""Which part of the model a rank of a pipeline has.

The settings and a whole model's parameters come in, a `PipelinePart` goes out.

    layers      0 1 2 | 3 4 5 | 6 7 8 | 9 10         balanced by cost: the last has the head too
    stage         0       1       2       3
    rank          0       1       0       1          two stages per rank (interleaved)

The first stage has the embedding, the last final norm, head and the objective's parameters. Head
gates are on every rank, a tied embedding on the ranks of the first and the last stage: their
gradients are summed over these ranks and all of them do the same update. Imports without torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from headway.model.config import ModelConfig
from headway.model.layout import Specs
from headway.parallel.config import ParallelConfig
from headway.parallel.pipeline.program import PipelineShape
from headway.parallel.pipeline_order import stages_on
from headway.parallel.stage_split import layer_costs, split_layers

Ints = tuple[int, ...]


@dataclass(frozen=True)
class PipelinePart:
    """The stages of one rank, and what all ranks know of the whole model."""

    shape: PipelineShape
    rank: int
    """In the pipeline group."""
    layers: tuple[range, ...]
    """The layers of every stage of the model."""
    specs: Specs = field(repr=False)
    """Every parameter of the whole model, in its order."""
    sharers: Mapping[str, Ints]
    """The ranks that hold a parameter, where those are several."""

    @property
    def is_first(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank computes the loss."""
        return self.rank == self.shape.pipeline - 1

    @property
    def own_layers(self) -> set[int]:
        """The numbers of this rank's layers."""
        return {
            layer
            for stage in stages_on(self.rank, self.shape.pipeline, self.shape.virtual_stages)
            for layer in self.layers[stage]
        }

    def is_copy(self, name: str) -> bool:
        """Whether another rank counts a parameter in norms and saves it."""
        return name in self.sharers and self.sharers[name][0] != self.rank


def stage_layers(parallel: ParallelConfig, model: ModelConfig, seq_len: int) -> tuple[range, ...]:
    """The layers of every stage: those of the recipe, or balanced by cost."""
    if parallel.pipeline_split:
        ends = accumulate(parallel.pipeline_split)
        return tuple(
            range(end - size, end) for end, size in zip(ends, parallel.pipeline_split, strict=True)
        )
    costs, first, last = layer_costs(model, seq_len)
    return tuple(split_layers(costs, parallel.pipeline_shape.stages, first=first, last=last))


def pipeline_part(
    parallel: ParallelConfig,
    model: ModelConfig,
    seq_len: int,
    rank: int,
    specs: Specs,
) -> PipelinePart:
    """The part of a rank; `specs` has all parameters of the whole model in forward order."""
    shape = parallel.pipeline_shape
    layers = stage_layers(parallel, model, seq_len)
    everyone = tuple(range(parallel.pipeline))
    sharers: dict[str, Ints] = {}
    for name, spec in specs.items():
        # The gates of all layers are one tensor.
        if "gates" in spec.groups:
            sharers[name] = everyone
        # The embedding of the first stage is the head of the last.
        elif spec.tied_to is not None:
            sharers[name] = (everyone[0], everyone[-1])
    return PipelinePart(shape, rank, layers, specs, sharers)


def with_training(
    part: PipelinePart, training: Collection[str], blocks: Iterable[str]
) -> PipelinePart:
    """The same part, knowing the first stage with anything to train."""
    stage_of = {layer: stage for stage, layers in enumerate(part.layers) for layer in layers}
    prefixes = {f"{prefix}.": stage_of[layer] for layer, prefix in enumerate(blocks)}
    last = part.shape.stages - 1
    trained: list[int] = []
    # What comes before the layers belongs to the first stage, what follows them to the last.
    outside_layers = 0
    for name, spec in part.specs.items():
        stage = next((stage for prefix, stage in prefixes.items() if name.startswith(prefix)), None)
        if stage is None:
            stage = outside_layers
        else:
            outside_layers = last
        if name in training and "objective" not in spec.groups:
            trained.append(stage)
    assert trained, "make_groups refuses a recipe that trains nothing"
    return replace(part, shape=replace(part.shape, first_trained=min(trained)))
