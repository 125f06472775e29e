"""The one place where a model is put together for a run: which parameters train, flat buffers under them, kernels in their seams.

Order: build on the meta device -> fp8 layers -> adapters -> choose what trains and its groups -> engine allocates buffers and re-registers
parameters as views -> attention core -> what halves recompute -> compile the halves of every block -> whole blocks recomputed
-> activations offloaded -> exchanges around the attention cores where rows lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from headway.errors import ConfigError
from headway.kernels.compiled import compile_half
from headway.kernels.fp8 import MULTIPLE, Scaling, convert
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.linear import adapt
from headway.model.config import ModelConfig
from headway.model.layout import GATES
from headway.model.transformer import Block, Transformer
from headway.objective.base import Objective, ParameterRule
from headway.optim.base import OptimConfig
from headway.optim.groups import OBJECTIVE, Group, make_groups, trainable
from headway.optim.scaler import Scaler, ScalerConfig
from headway.parallel.collectives import Ranks, alone
from headway.parallel.config import ParallelConfig
from headway.parallel.context import share_rows
from headway.parallel.hooks.all_reduce import AllReduce
from headway.parallel.hooks.base import Hook
from headway.parallel.hooks.compress import Compress
from headway.parallel.hooks.reduce_scatter import ReduceScatter
from headway.parallel.memory import MemoryConfig
from headway.parallel.mesh import Mesh
from headway.parallel.offload import ActivationOffload
from headway.parallel.passes import Settings
from headway.parallel.recompute import recompute_in_halves, recompute_whole
from headway.parallel.zero1 import Exchanged, FlatEngine

if TYPE_CHECKING:
    from headway.parallel.fsdp import ShardedEngine

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def assemble(
    config: ModelConfig,
    objective: Objective,
    optim: OptimConfig,
    settings: Settings,
    *,
    freeze: Sequence[str] = (),
    train: Sequence[str] = (),
    attention: str = "auto",
    compile_blocks: bool = False,
    parallel: ParallelConfig = ParallelConfig(),
    ranks: Ranks | None = None,
    loss_scale: ScalerConfig = ScalerConfig(),
    fp8: Scaling | None = None,
    memory: MemoryConfig = MemoryConfig(),
    adapter: AdapterConfig | None = None,
    rules: Sequence[ParameterRule] = (),
) -> FlatEngine | ShardedEngine:
    """Make the engine of this rank, its parameters still zero."""
    ranks = ranks or alone()
    parallel.check(ranks.mesh, str(settings.dtype).removeprefix("torch."))
    with torch.device("meta"):
        model = Transformer(config)
    if fp8 is not None:
        narrow(model, fp8)
    if adapter is not None:
        with torch.device("meta"):
            adapt(model, adapter, adapter.modules(config))
    groups = group_parameters(model, objective, optim, freeze, train, rules)
    scaler = Scaler(loss_scale, settings.device) if settings.dtype == torch.float16 else None
    on_host = "optimizer" in memory.offload
    engine: FlatEngine | ShardedEngine
    if parallel.strategy == "fsdp" and ranks.shard.size > 1:
        from headway.parallel.fsdp import ShardedEngine, Sharding

        cut = Sharding.of(parallel, ranks, state_on_host=on_host)
        engine = ShardedEngine(model, objective, groups, optim.build(), settings, cut, scaler)
    else:  # cut over one rank, fsdp is what the flat engine does anyway
        hook = choose_hook(parallel, ranks.mesh, settings)
        exchanged = Exchanged(ranks, parallel.bucket_bytes, hook, parallel.overlap, kept_in(parallel, settings), on_host)
        engine = FlatEngine(model, objective, groups, optim.build(), settings, exchanged, scaler)
    dress(model, attention, compile_blocks, memory, settings.device)
    share_rows(model, ranks.context)
    return engine


def dress(
    model: Transformer, attention: str, compile_blocks: bool, memory: MemoryConfig = MemoryConfig(), device: torch.device | None = None
) -> None:
    """Kernels in the seams of every block, compiled halves, recompute and offload, from the inside of a block to its outside."""
    away = ActivationOffload(device) if device is not None and "activations" in memory.offload else None
    again = memory.recomputed_blocks(len(model.model.layers))
    for index, block in enumerate(model.model.layers.values()):
        assert isinstance(block, Block)
        if attention != "auto":
            block.use_attention(attention)
        recompute_in_halves(block, memory, compiled=compile_blocks)
        if compile_blocks:
            block.before, block.after = compile_half(block.before), compile_half(block.after)
        if index in again:
            recompute_whole(block)
        if away is not None:
            away.wrap(block, first=index == 0)


def narrow(model: Transformer, scaling: Scaling) -> None:
    """Let the blocks' matrix products run in fp8; the head and everything else keep their precision."""
    if left := convert(model.model.layers, scaling):
        raise ConfigError(f"precision is 'fp8'; its products need sizes that are multiples of {MULTIPLE}, unlike {left[0]}. Use bf16.")


def kept_in(parallel: ParallelConfig, settings: Settings) -> torch.dtype:
    """The precision in which gradients are added up."""
    return torch.float32 if parallel.accumulate_dtype == "fp32" else settings.dtype


def choose_hook(parallel: ParallelConfig, mesh: Mesh, settings: Settings) -> Hook | None:
    """The hook of a recipe; without one, the plain sum that fits the layout. None: nothing to exchange."""
    if parallel.hook is not None:
        return parallel.hook.build(settings.device)
    if mesh.reduce == 1:
        return None
    if DTYPES[parallel.reduce_dtype] != kept_in(parallel, settings):
        return Compress(parallel.reduce_dtype, settings.device)
    return ReduceScatter(settings.device) if mesh.shard > 1 else AllReduce()


def group_parameters(
    model: Transformer,
    objective: Objective,
    optim: OptimConfig,
    freeze: Sequence[str],
    train: Sequence[str],
    rules: Sequence[ParameterRule] = (),
) -> list[Group]:
    """The groups of what trains: the model's parameters and the objective's own."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if objective.module is not None:
        shapes |= {OBJECTIVE + name: tuple(parameter.shape) for name, parameter in objective.module.named_parameters()}
    training = trainable(shapes, freeze, train)
    if any("gates" in rule.match for rule in rules) and GATES not in training:
        raise ConfigError("freeze holds the gates, and the objective is there to train them. Use objective next_token with frozen gates.")
    return make_groups(optim, shapes, training, rules)
