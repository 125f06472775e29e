"""Small engines on any number of ranks, and steps whose rows are the same however many ranks share them."""

import json
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from headway.data.batch import TENSOR_FIELDS, StepBatch, StepStats
from headway.model.adapter.config import AdapterConfig
from headway.model.adapter.lora import with_updates
from headway.model.adapter.packed_base import packed_values
from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.model.layout import param_specs
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.optim.scaler import ScalerConfig
from headway.optim.schedule import Schedule
from headway.parallel.assemble import assemble
from headway.parallel.collectives import RankGroup, form_groups
from headway.parallel.config import MemoryConfig, ParallelConfig
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken
from support.batches import make_batch

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=64,
    max_seq_len=32,
    dropout=0.1,
)
OPTIM = AdamW(lr=1e-2, clip=0.5, schedule=Schedule(warmup=2))
ROWS = 16


@dataclass(frozen=True)
class Setup:
    """An engine in words."""

    parallel: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    micro: int = 4
    """Microbatches of a step over all ranks."""
    freeze: tuple[str, ...] = ("layers.0",)
    train: tuple[str, ...] = ()
    config: ModelConfig = CONFIG
    loss_scale: ScalerConfig = ScalerConfig()
    objective: Any = None
    memory: dict[str, Any] = field(default_factory=dict)
    state_dtype: str = "fp32"
    optim: Any = None
    """Another optimizer's settings; None: AdamW's with `state_dtype`."""
    adapter: AdapterConfig | None = None
    compile_blocks: bool = False
    fp8: Any = None


def make_engine(group: RankGroup, setup: Setup) -> Any:
    """The engine of one rank, with the weights of a seed."""
    parallel = ParallelConfig.model_validate({"bucket_bytes": 8000, **setup.parallel})
    ranks = form_groups(parallel.mesh(group.rank, group.size), group)
    spec = EngineSpec(
        setup.config,
        setup.objective or NextToken(),
        setup.optim or OPTIM.model_copy(update={"state_dtype": setup.state_dtype}),
        dtype=setup.dtype,
        chunk_tokens=16,
        seed=3,
        freeze=setup.freeze,
        train=setup.train,
        compile_blocks=setup.compile_blocks,
        parallel=parallel,
        ranks=ranks,
        loss_scale=setup.loss_scale,
        memory=MemoryConfig.model_validate_json(json.dumps(setup.memory)),
        adapter=setup.adapter,
        fp8=setup.fp8,
    )
    engine = assemble(spec)
    specs = [spec for spec in engine.specs.values() if spec.start != "given"]
    if setup.adapter is not None:
        specs = param_specs(setup.config)  # without what is stored quantised
    values: Any = ((spec.name, initial_value(spec, setup.config, 1)) for spec in specs)
    if setup.adapter is not None:
        layouts = setup.adapter.layouts(setup.config)
        values = packed_values(values, layouts, spec.device)
        values = with_updates(
            values, setup.adapter, setup.adapter.modules(setup.config), 1, {}, layouts=layouts
        )
    engine.fill(values)
    return engine


def share_of_step(index: int, micro: int, rank: int, world: int) -> StepBatch:
    """This rank's microbatches of step `index`: rows have different numbers of targets, some none at all."""
    rows = [[16], [7, 5], [3, 3, 3], [12], [2, 9], [4, 4, 4, 4], [9], [5]] * 2
    batch = make_batch(
        rows,
        seq_len=16,
        vocab=64,
        seed=index,
        targets=[11, 4, 6, 1, 9, 8, 0, 0, 15, 2, 3, 7, 1, 1, 5, 0],
    )
    size = ROWS // micro
    each = micro // world
    mine = [slice(i * size, (i + 1) * size) for i in range(rank * each, (rank + 1) * each)]
    micros = tuple(
        replace(batch, **{name: getattr(batch, name)[part] for name in TENSOR_FIELDS})
        for part in mine
    )
    totals = {"targets": float(batch.loss_weight.sum()), "rows": float(ROWS)}
    return StepBatch(
        micros, totals, StepStats(batch.tokens.numel(), 1, 1, 1, 1, 0), first_microbatch=rank * each
    )


def train_steps(
    engine: Any, group: RankGroup, micro: int, first: int, last: int
) -> list[tuple[float, float, float]]:
    """Train; returns (loss, norm, skipped) of every step."""
    seen = []
    for index in range(first, last):
        result = engine.forward_backward(
            share_of_step(index, micro, group.rank, group.size), StepInfo(index, 20)
        )
        update = engine.update(hypers(engine.spec.optim, engine.groups, index, 20))
        seen.append((float(result.loss), float(update.norm), float(update.skipped)))
    return seen


def torch_powersgd(**options: Any) -> Any:
    """torch's own PowerSGD state over all ranks."""
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return PowerSGDState(process_group=None, **options)
