"""Memory settings on several ranks: what is saved or moved elsewhere on each does not change what they train together."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.engines import CONFIG, Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks

from headway.objective.base import StepInfo
from headway.parallel.collectives import RankGroup
from headway.train import shortage

STRATEGIES = {"zero1": {}, "fsdp": {"strategy": "fsdp"}}


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_their_state_in_host_memory_train_as_one_process(strategy: str, state_dtype: str) -> None:
    def steps(group: RankGroup, parallel: dict[str, Any], offload: list[str]) -> list[Any]:
        engine = make_engine(group, Setup(parallel, state_dtype=state_dtype, memory={"offload": offload}))
        return train_steps(engine, group, 4, 0, 4)

    expected = steps(RankGroup(), {}, [])
    for seen in run_ranks(lambda group: steps(group, STRATEGIES[strategy], ["optimizer"]), 2):
        for one, other in zip(expected, seen, strict=True):
            assert other == pytest.approx(one, rel=1e-3 if state_dtype == "8bit" else 1e-4)


@pytest.mark.parametrize("memory", [{"recompute": 0.5}, {"recompute": "selective", "offload": ["activations"]}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_recompute_train_as_one_process_that_keeps_everything(strategy: str, memory: dict[str, Any]) -> None:
    def steps(group: RankGroup, parallel: dict[str, Any], memory: dict[str, Any]) -> list[Any]:
        return train_steps(make_engine(group, Setup(parallel, memory=memory)), group, 4, 0, 3)

    plain = run_ranks(lambda group: steps(group, STRATEGIES[strategy], {}), 2)
    assert run_ranks(lambda group: steps(group, STRATEGIES[strategy], memory), 2) == plain
    for one, other in zip(steps(RankGroup(), {}, {}), plain[0], strict=True):
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rehearsal_of_ranks_leaves_nothing_behind(strategy: str) -> None:
    def steps(group: RankGroup, rehearse: bool) -> list[Any]:
        engine = make_engine(group, Setup(STRATEGIES[strategy]))
        if rehearse:
            engine.rehearse(share_of_step(9, 4, group.rank, group.size), StepInfo(0, 1))
        return train_steps(engine, group, 4, 0, 2)

    assert run_ranks(lambda group: steps(group, True), 2) == run_ranks(lambda group: steps(group, False), 2)


TRIED = {
    "zero1": (2, {}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "hsdp": (4, {"strategy": "fsdp", "fsdp": {"size": 2}}),
    "context": (2, {"context": 2}),
    "context-fsdp": (2, {"strategy": "fsdp", "context": 2}),
}


def run_out(engine: Any, *, rows: int, where: str) -> None:
    """Memory runs out on the last rank, in the middle of the model, when a microbatch has that many rows or more."""

    def stop(*_: Any) -> None:
        raise torch.OutOfMemoryError("by the test")

    def before(_module: Any, inputs: Any) -> None:
        if inputs[0].shape[0] >= rows and where == "forward":
            stop()

    def after(_module: Any, _inputs: Any, x: torch.Tensor) -> None:
        if x.shape[0] >= rows and where == "backward" and x.requires_grad:
            x.register_hook(stop)

    if engine.ranks.world.rank == engine.ranks.world.size - 1:
        block = engine.model.model.layers["1"]
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


@pytest.mark.parametrize(
    ("strategy", "rows", "where", "expected"),
    [
        ("zero1", 4, "forward", 2),
        ("zero1", 2, "backward", 1),
        ("fsdp", 8, "backward", 4),
        ("fsdp", 2, "forward", 1),
        ("hsdp", 4, "backward", 2),
        ("context", 4, "backward", 2),
        ("context-fsdp", 8, "forward", 4),
    ],
)
def test_where_one_rank_runs_out_of_memory_all_take_the_next_smaller_microbatch_and_go_on(
    monkeypatch: pytest.MonkeyPatch, strategy: str, rows: int, where: str, expected: int
) -> None:
    world, parallel = TRIED[strategy]
    config = CONFIG.with_(num_heads=8, num_kv_heads=4)
    monkeypatch.setattr(shortage, "begin_peak", lambda device: None)
    monkeypatch.setattr(shortage, "peak_bytes", lambda device: 1)

    def steps(group: RankGroup, search: bool) -> Any:
        engine = make_engine(group, Setup(parallel, config=config))
        data = RankGroup(group.rank // engine.ranks.context.size, engine.ranks.data.size)
        if search:
            run_out(engine, rows=rows, where=where)

        def step_of(size: int) -> Any:
            step = share_of_step(9, 16 // size, data.rank, data.size)
            return replace(step, microbatches=step.microbatches[:2])

        sizes = shortage.choices(min(8, 16 // data.size))
        found = shortage._Search(engine, group, torch.device("cpu")).run(sizes, 1 << 40, step_of) if search else None
        micro = 16 // expected
        return found, train_steps(engine, data, micro, 0, 2)

    disturbed, plain = (run_ranks(lambda group, search=search: steps(group, search), world) for search in (True, False))
    assert [found for found, _ in disturbed] == [expected] * world
    assert [seen for _, seen in disturbed] == [seen for _, seen in plain]
