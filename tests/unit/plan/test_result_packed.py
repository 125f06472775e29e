"""Plans of a quantised base count its bytes, name the smallest card, and propose no layout that training refuses."""

import pytest

from headway.config.load import load
from headway.plan.hardware import GPUS, smallest_card
from headway.plan.job import PlanJob
from headway.plan.memory import GIB, ROUND
from headway.plan.result import as_dict, make_plan
from headway.plan.search import best_plans
from headway.train.config import Recipe
from headway.train.planning import PlanTarget, plan_job

SETTINGS = (
    "model.preset=llama-8b",
    "data.seq_len=4096",
    "adapter.rank=16",
    "batch.rows=4",
    "batch.micro_rows=1",
    "memory.recompute=1",
)


def job_of(*more: str, world: int | None = None) -> PlanJob:
    return plan_job(load(Recipe, None, [*SETTINGS, *more]), PlanTarget(GPUS["h200"], world))


@pytest.mark.parametrize(("form", "bits"), [("nf4", 4.127), ("int8", 8.008)])
def test_weights_are_the_bytes_of_the_form(form: str, bits: float) -> None:
    plain, packed = (make_plan(job_of(*more)) for more in ((), (f"adapter.base={form}",)))
    layers = 6_979_321_856  # elements of the linears of an 8B Llama's layers
    saved = ROUND * layers * (16 - bits) / 8
    assert plain.memory.kinds["weights"] - packed.memory.kinds["weights"] == pytest.approx(
        saved, rel=2e-3
    )
    assert plain.flops.model == packed.flops.model
    model = [as_dict(one)["model"] for one in (plain, packed)]
    assert (
        model[0]["parameters"] == model[1]["parameters"]
        and model[0]["trained"] == model[1]["trained"]
    )
    assert 0.93 * plain.tokens_per_second < packed.tokens_per_second < plain.tokens_per_second


def test_fsdp_spreads_the_bytes_over_ranks() -> None:
    one, eight = (
        job_of(
            "adapter.base=nf4", "parallel.strategy=fsdp", "batch.rows=8", world=world
        ).memory_job()
        for world in (1, 8)
    )
    assert (
        one.packed_bytes == eight.packed_bytes == pytest.approx(6_979_321_856 * 4.127 / 8, rel=1e-3)
    )
    assert (
        make_plan(
            job_of("adapter.base=nf4", "parallel.strategy=fsdp", "batch.rows=8", world=8)
        ).memory.kinds["weights"]
        < 3.5 * GIB
    )


def test_the_smallest_card_of_an_8b_model_at_4k() -> None:
    cards = {
        base: as_dict(make_plan(job_of(f"adapter.base={base}")))["memory"]["smallest_card_gb"]
        for base in ("nf4", "int8", "null")
    }
    assert cards == {"nf4": 10, "int8": 16, "null": 20}
    assert smallest_card(1) == 6 and smallest_card(1 << 40) is None


def test_a_search_proposes_no_tensor_axis() -> None:
    found = best_plans(job_of("adapter.base=nf4", "batch.rows=32", world=8))
    assert found and all(plan.job.layout.tensor == 1 for plan in found)
