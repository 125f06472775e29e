"""Builds the engine of one rank from an `EngineSpec`.

`assemble` states the order of wrapping; every other file does one of its lines.

    1. the whole model on the meta device, with fp8 layers and adapters     meta_model
    2. what trains, in which optimizer groups                               group_parameters
    3. this rank's pipeline stages                                          keep_stages
    4. its part of every matrix, with exchanges inside the layers           split_model
    5. memory, and the parameters in it                                     FlatEngine, FsdpEngine
    6. kernels, recompute, compile and offload around every block           wrap_blocks
    7. exchanges around attention, where rows are split over ranks          share_rows

Until step 5 nothing has memory, so a model may be larger than a rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from headway.errors import ConfigError, ParallelError
from headway.model.base import Model, build_model, compile_method, model_specs
from headway.model.layout import GATES, ParamSpec
from headway.optim.groups import ParamGroup, make_groups, objective_specs, trainable
from headway.parallel.base import needs_gradient
from headway.parallel.context import share_rows
from headway.parallel.engine import EngineSpec
from headway.parallel.flat.engine import FlatEngine
from headway.parallel.tensor import local_heads, split_model
from headway.tasks.balance import with_balance
from headway.tasks.base import Task

if TYPE_CHECKING:
    from headway.kernels.fp8 import Scaling
    from headway.parallel.fsdp import FsdpEngine
    from headway.parallel.pipeline.stages import PipelinePart


def assemble(spec: EngineSpec) -> FlatEngine | FsdpEngine:
    """Make the engine of this rank; its parameters are zero until `Engine.fill` or `load`."""
    spec.parallel.check(spec.ranks.mesh, str(spec.dtype).removeprefix("torch."))
    model = meta_model(spec)
    objective = with_balance(spec.objective.build(), spec.model)
    specs = whole_specs(model, objective)
    groups = group_parameters(specs, spec)
    part = keep_stages(model, objective, groups, specs, spec)
    local = replace(split_model(model, spec), specs=specs, part=part)

    # Ranks that exchange inside layers must reach the same exchanges in backward, whatever gates
    # each of them has drawn.
    trains_gates = any(GATES in group.names for group in groups)
    if spec.ranks.tensor.size * spec.ranks.expert.size > 1 and trains_gates:
        first_block = next(iter(model.blocks().values()))
        first_block.register_forward_pre_hook(needs_gradient, prepend=True)

    gates = spec.objective.needs.gates
    model.holds_gates = gates is not None and gates.held_at is not None

    # The engine replaces parameters, so it comes before anything that traces or wraps a block.
    engine = _engine_class(spec)(model, objective, groups, spec, local)
    wrap_blocks(model, spec)
    share_rows(model, spec.ranks, local_heads(spec.model, spec.ranks.tensor), spec.attention)
    return engine


def meta_model(spec: EngineSpec) -> Model:
    """The whole model on the meta device: fp8 layers first, then adapters around them."""
    with torch.device("meta"):
        model = build_model(spec.model)
        if spec.fp8 is not None:
            if spec.model.experts is not None:
                raise ConfigError(
                    "precision is 'fp8' and model.experts is given; experts compute in bf16. Use "
                    "precision bf16."
                )
            convert_to_fp8(model, spec.fp8)
        if spec.adapter is not None:
            from headway.model.adapter.lora import adapt, pack_linears

            adapt(model, spec.adapter, spec.adapter.modules(spec.model))
            pack_linears(model, spec.adapter.layouts(spec.model))
            model.is_random = model.is_random or spec.adapter.dropout > 0
    return model


def keep_stages(
    model: Model,
    objective: Task,
    groups: list[ParamGroup],
    specs: dict[str, ParamSpec],
    spec: EngineSpec,
) -> PipelinePart | None:
    """Remove from a model on the meta device what other ranks of the pipeline have.

    Returns None where there is no pipeline.
    """
    pipeline = spec.ranks.pipeline
    if pipeline.size == 1:
        return None
    if spec.compile_blocks and spec.parallel.schedule == "zero_bubble":
        raise ParallelError(
            "kernels.compile is true and parallel.schedule is zero_bubble, which computes "
            "gradients of weights later than those of inputs; a compiled backward computes both "
            "at once. Set kernels.compile=false, or use schedule 1f1b or interleaved."
        )
    from headway.parallel.pipeline.stages import pipeline_part, with_training

    seq_len = spec.seq_len or spec.model.max_seq_len
    part = pipeline_part(spec.parallel, spec.model, seq_len, pipeline.rank, specs)
    part = with_training(part, {name for group in groups for name in group.names}, model.blocks())
    model.keep_layers(part.own_layers, first=part.is_first, last=part.is_last)
    if not part.is_last:
        # The last stage computes the loss, so it has the objective's parameters.
        objective.module = None
    return part


def convert_to_fp8(model: Model, scaling: Scaling) -> None:
    """Let the blocks' matrix products run in fp8.

    The head and everything else keep their precision.
    """
    from headway.kernels.fp8 import MULTIPLE, convert

    unsuitable = [
        f"{name}.{linear}"
        for name, block in model.blocks().items()
        for linear in convert(block, scaling)
    ]
    if unsuitable:
        raise ConfigError(
            f"precision is 'fp8'; matrix products need sizes that are multiples of {MULTIPLE}, and "
            f"{unsuitable[0]} has another. Use bf16."
        )


def group_parameters(specs: dict[str, ParamSpec], spec: EngineSpec) -> list[ParamGroup]:
    """The groups of what trains: parameters of the model and of the objective."""
    training = trainable(specs, spec.freeze, spec.train)
    rules = spec.objective.rules
    gates = spec.objective.needs.gates
    if gates is not None and gates.held_at is not None and spec.optim.AVERAGES_WEIGHTS:
        raise ConfigError(
            f"optim.kind is {spec.optim.kind}, which averages weights, and objective.control is "
            "hold, which sets gates after every update. Use another optimizer, or control "
            "lagrangian."
        )
    if any("gates" in rule.match for rule in rules) and GATES not in training:
        raise ConfigError(
            "freeze contains the head gates, which this objective trains. Use objective "
            "next_token with frozen gates."
        )
    return make_groups(spec.optim, specs, training, rules)


def whole_specs(model: Model, objective: Task) -> dict[str, ParamSpec]:
    """Every parameter of a whole model and an objective, in order."""
    return model_specs(model) | objective_specs(objective.module)


def _engine_class(spec: EngineSpec) -> type[FlatEngine] | type[FsdpEngine]:
    if spec.parallel.strategy == "fsdp" and spec.ranks.shard.size > 1:
        from headway.parallel.fsdp import FsdpEngine

        return FsdpEngine
    # Sharded over one rank, FSDP would keep whole parameters, as the flat engine does.
    return FlatEngine


def wrap_blocks(model: Model, spec: EngineSpec) -> None:
    """Wrap every block, from its inside to its outside: kernels, recompute, compile, offload."""
    offload = None
    if "activations" in spec.memory.offload:
        from headway.parallel.offload_activations import ActivationOffload

        offload = ActivationOffload(spec.device)
    if spec.attention != "auto":
        model.use_attention(spec.attention)
    if spec.exact:
        model.use_exact()

    blocks = list(model.blocks().values())
    compiles = spec.compile_blocks and model.COMPILES
    recomputed = spec.memory.recomputed_blocks(len(blocks))
    for index, block in enumerate(blocks):
        for method in model.BLOCK_METHODS:
            # Recompute first: the compiler sees it as a part of the graph.
            if spec.memory.recompute == "selective":
                from headway.parallel.recompute import recompute_method

                recompute_method(block, method, is_random=model.is_random, compiled=compiles)
            if compiles:
                # Tokens on their way to other ranks' experts have sizes that depend on data: such a
                # half is several graphs.
                whole_graph = spec.ranks.expert.size == 1
                compiled = compile_method(getattr(block, method), fullgraph=whole_graph)
                setattr(block, method, compiled)
        if index in recomputed:
            from headway.parallel.recompute import recompute_whole

            recompute_whole(block, is_random=model.is_random)
        if offload is not None:
            offload.wrap(block, first=index == 0)
