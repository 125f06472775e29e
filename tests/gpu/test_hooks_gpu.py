"""On a CUDA device: hooks on their own stream, fp16 without waiting, and FSDP's engine on a group of one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.batches import make_batch, make_step

from headway.model.config import ModelConfig
from headway.model.init import initial_value
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.config import ParallelConfig
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo
from headway.tasks.next_token import Config as NextToken

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CONFIG = ModelConfig(
    hidden_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=256,
    vocab_size=1000,
    max_seq_len=128,
)
POWERSGD = {"kind": "powersgd", "rank": 512, "min_compression_rate": 0.0, "start_step": 0}


def spec_of(dtype: torch.dtype, **options: Any) -> EngineSpec:
    return EngineSpec(
        CONFIG,
        NextToken(),
        AdamW(lr=1e-2),
        torch.device("cuda"),
        dtype,
        chunk_tokens=64,
        seed=3,
        **options,
    )


def filled(engine: Any) -> Any:
    engine.fill((name, initial_value(spec, CONFIG, 1)) for name, spec in engine.specs.items())
    return engine


def engine_with(dtype: torch.dtype, **parallel: Any) -> Any:
    config = ParallelConfig.model_validate({"bucket_bytes": 100_000, **parallel})
    return filled(assemble(spec_of(dtype, parallel=config)))


def losses(engine: Any, steps: int = 4) -> list[float]:
    found = []
    for index in range(steps):
        batch = make_batch(
            [[50, 70], [128], [3, 60, 65], [100]], seq_len=128, vocab=1000, seed=index
        )
        found.append(engine.forward_backward(make_step(batch, 2), StepInfo(index, 10)).loss.item())
        engine.update(hypers(AdamW(lr=1e-2), engine.groups, index, 10))
    return found


@pytest.mark.parametrize(
    "hook",
    [POWERSGD, {"kind": "compress", "dtype": "bf16"}, {"kind": "all_reduce"}],
    ids=lambda h: h["kind"],
)
def test_hooks_on_their_own_stream_train_like_none(hook: dict[str, Any]) -> None:
    assert losses(engine_with(torch.bfloat16, hook=hook)) == pytest.approx(
        losses(engine_with(torch.bfloat16)), rel=1e-2
    )


@pytest.mark.parametrize(
    "parallel", [{}, {"hook": {"kind": "compress"}}, {"accumulate_dtype": "compute"}], ids=str
)
def test_an_fp16_step_never_waits_for_the_device(parallel: dict[str, Any]) -> None:
    engine = engine_with(torch.float16, **parallel)
    step = make_step(make_batch([[50, 70], [128]], seq_len=128, vocab=1000), 2)
    for attempt in range(3):
        if attempt == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            engine.forward_backward(step, StepInfo(0, 10))
            engine.update(hypers(AdamW(), engine.groups, 0, 10))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sharded_engine_trains_like_the_flat_one(dtype: torch.dtype, tmp_path: Path) -> None:
    from dataclasses import replace

    import torch.distributed as dist

    from headway.parallel.assemble import group_parameters, meta_model, whole_specs
    from headway.parallel.collectives import RankGroup, RankGroups
    from headway.parallel.fsdp import FsdpEngine
    from headway.parallel.tensor import split_model

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        group = RankGroup(0, 1, dist.group.WORLD)
        ranks = RankGroups(world=group, data=group, reduce=group, shard=group)
        spec = spec_of(dtype, parallel=ParallelConfig(strategy="fsdp"), ranks=ranks)
        model, objective = meta_model(spec), spec.objective.build()
        specs = whole_specs(model, objective)
        engine = FsdpEngine(
            model,
            objective,
            group_parameters(specs, spec),
            spec,
            replace(split_model(model, spec), specs=specs),
        )
        assert losses(filled(engine)) == pytest.approx(
            losses(engine_with(dtype)), rel=1e-5 if dtype == torch.float32 else 1e-2
        )
    finally:
        dist.destroy_process_group()
