"""Memory settings on several ranks: what is saved or moved elsewhere on each does not change what they train together."""

from typing import Any

import pytest
import torch
from support.engines import CONFIG, OPTIM, Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks, start_processes

from headway.parallel import memory_probe
from headway.parallel.collectives import RankGroup
from headway.parallel.config import ParallelConfig
from headway.parallel.engine import EngineSpec
from headway.tasks.next_token import Config as NextToken

pytestmark = pytest.mark.slow

STRATEGIES = {"zero1": {}, "fsdp": {"strategy": "fsdp"}}


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_their_state_in_host_memory_train_as_one_process(
    strategy: str, state_dtype: str
) -> None:
    def steps(group: RankGroup, parallel: dict[str, Any], offload: list[str]) -> list[Any]:
        engine = make_engine(
            group, Setup(parallel, state_dtype=state_dtype, memory={"offload": offload})
        )
        return train_steps(engine, group, 4, 0, 4)

    expected = steps(RankGroup(), {}, [])
    for seen in run_ranks(lambda group: steps(group, STRATEGIES[strategy], ["optimizer"]), 2):
        for loss, other in zip(expected, seen, strict=True):
            assert other == pytest.approx(loss, rel=1e-3 if state_dtype == "8bit" else 1e-4)


@pytest.mark.parametrize(
    "memory", [{"recompute": 0.5}, {"recompute": "selective", "offload": ["activations"]}]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_recompute_train_as_one_process_that_keeps_everything(
    strategy: str, memory: dict[str, Any]
) -> None:
    def steps(group: RankGroup, parallel: dict[str, Any], memory: dict[str, Any]) -> list[Any]:
        return train_steps(make_engine(group, Setup(parallel, memory=memory)), group, 4, 0, 3)

    plain = run_ranks(lambda group: steps(group, STRATEGIES[strategy], {}), 2)
    assert run_ranks(lambda group: steps(group, STRATEGIES[strategy], memory), 2) == plain
    for loss, other in zip(steps(RankGroup(), {}, {}), plain[0], strict=True):
        assert other == pytest.approx(loss, rel=1e-4)


TRIED = {
    "zero1": (2, {}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "hsdp": (4, {"strategy": "fsdp", "fsdp": {"size": 2}}),
    "context": (2, {"context": 2}),
    "context-fsdp": (2, {"strategy": "fsdp", "context": 2}),
}


def run_out(engine: Any, *, rows: int, where: str) -> None:
    """Memory runs out in the middle of the model when a microbatch has that many rows or more."""

    def stop(*_: Any) -> None:
        raise torch.OutOfMemoryError("by the test")

    def before(_module: Any, inputs: Any) -> None:
        if inputs[0].shape[0] >= rows and where == "forward":
            stop()

    def after(_module: Any, _inputs: Any, x: torch.Tensor) -> None:
        if x.shape[0] >= rows and where == "backward" and x.requires_grad:
            x.register_hook(stop)

    block = engine.model.model.layers["1"]
    block.register_forward_pre_hook(before)
    block.register_forward_hook(after)


@pytest.mark.parametrize(
    ("strategy", "rows", "where", "expected"),
    [
        ("zero1", 4, "forward", 2),
        ("fsdp", 2, "forward", 1),
        ("context", 4, "backward", 2),
        pytest.param("zero1", 2, "backward", 1, marks=pytest.mark.drill),
        pytest.param("fsdp", 8, "backward", 4, marks=pytest.mark.drill),
        pytest.param("hsdp", 4, "backward", 2, marks=pytest.mark.drill),
        pytest.param("context-fsdp", 8, "forward", 4, marks=pytest.mark.drill),
    ],
)
def test_a_probe_without_peers_finds_the_largest_microbatch_that_fits_one_rank(
    monkeypatch: pytest.MonkeyPatch, strategy: str, rows: int, where: str, expected: int
) -> None:
    """Every rank of a layout, alone, with a fake process group in place of the others."""
    world, parallel = TRIED[strategy]
    config = CONFIG.with_(num_heads=8, num_kv_heads=4)
    monkeypatch.setattr(memory_probe, "begin_peak", lambda device: None)
    monkeypatch.setattr(memory_probe, "peak_bytes", lambda device: 1)
    assembled = memory_probe.assemble

    def runs_out(spec: EngineSpec) -> Any:
        engine = assembled(spec)
        run_out(engine, rows=rows, where=where)
        return engine

    monkeypatch.setattr(memory_probe, "assemble", runs_out)

    def probe(rank: int) -> int:
        config_of = ParallelConfig.model_validate({"bucket_bytes": 8000, **parallel})
        ranks = memory_probe.fake_ranks(config_of.mesh(rank, world))
        spec = EngineSpec(
            config,
            NextToken(),
            OPTIM,
            chunk_tokens=16,
            seed=3,
            freeze=("layers.0",),
            parallel=config_of,
            ranks=ranks,
        )
        job = memory_probe.make_probe(spec, share_of_step(9, 16, 0, 1), [1, 2, 4, 8], 1 << 40)
        trials = memory_probe.Trials(spec, job.step)
        return memory_probe.largest_fitting(job.sizes, job.limit_bytes, trials.peak_bytes)

    def as_rank(rank: int) -> Any:
        return lambda: probe(rank)

    assert [start_processes(as_rank(rank), 1)[0] for rank in (0, world - 1)] == [expected] * 2
