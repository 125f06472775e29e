"""Memory settings on several ranks: what is saved or moved elsewhere on each does not change what they train together."""

from typing import Any

import pytest
import torch._dynamo  # noqa: F401  checkpointing loads it; here once, before ranks are forked
from support.engines import Setup, make_engine, share_of_step, train_steps
from support.ranks import run_ranks

from headway.objective.base import StepInfo
from headway.parallel.collectives import Group

STRATEGIES = {"zero1": {}, "fsdp": {"strategy": "fsdp"}}


@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_their_state_in_host_memory_train_as_one_process(strategy: str, state_dtype: str) -> None:
    def steps(group: Group, parallel: dict[str, Any], offload: list[str]) -> list[Any]:
        engine = make_engine(group, Setup(parallel, state_dtype=state_dtype, memory={"offload": offload}))
        return train_steps(engine, group, 4, 0, 4)

    expected = steps(Group(), {}, [])
    for seen in run_ranks(lambda group: steps(group, STRATEGIES[strategy], ["optimizer"]), 2):
        for one, other in zip(expected, seen, strict=True):
            assert other == pytest.approx(one, rel=1e-3 if state_dtype == "8bit" else 1e-4)


@pytest.mark.parametrize("memory", [{"recompute": 0.5}, {"recompute": "selective", "offload": ["activations"]}])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_that_recompute_train_as_one_process_that_keeps_everything(strategy: str, memory: dict[str, Any]) -> None:
    def steps(group: Group, parallel: dict[str, Any], memory: dict[str, Any]) -> list[Any]:
        return train_steps(make_engine(group, Setup(parallel, memory=memory)), group, 4, 0, 3)

    plain = run_ranks(lambda group: steps(group, STRATEGIES[strategy], {}), 2)
    assert run_ranks(lambda group: steps(group, STRATEGIES[strategy], memory), 2) == plain
    for one, other in zip(steps(Group(), {}, {}), plain[0], strict=True):
        assert other == pytest.approx(one, rel=1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rehearsal_of_ranks_leaves_nothing_behind(strategy: str) -> None:
    def steps(group: Group, rehearse: bool) -> list[Any]:
        engine = make_engine(group, Setup(STRATEGIES[strategy]))
        if rehearse:
            engine.rehearse(share_of_step(9, 4, group.rank, group.size), StepInfo(0, 1))
        return train_steps(engine, group, 4, 0, 2)

    assert run_ranks(lambda group: steps(group, True), 2) == run_ranks(lambda group: steps(group, False), 2)
