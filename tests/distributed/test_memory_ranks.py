"""Memory settings on several ranks: what is saved or moved elsewhere on each does not change what they train together."""

from typing import Any

import pytest
from support.engines import Setup, make_engine, train_steps
from support.ranks import run_ranks

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
