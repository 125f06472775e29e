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
    plain = make_plan(job_of())
    packed = make_plan(job_of(f"adapter.base={form}"))
    layers = 6_979_321_856  # elements of the linears of an 8B Llama's layers
    saved = ROUND * layers * (16 - bits) / 8
    assert plain.memory.kinds["weights"] - packed.memory.kinds["weights"] == pytest.approx(
        saved, rel=2e-3
    )
    assert plain.flops.model == packed.flops.model
    model = [as_dict(plan)["model"] for plan in (plain, packed)]
    assert model[0]["parameters"] == model[1]["parameters"]
    assert model[0]["trained"] == model[1]["trained"]
    assert 0.93 * plain.tokens_per_second < packed.tokens_per_second < plain.tokens_per_second


def test_fsdp_spreads_the_bytes_over_ranks() -> None:
    alone = job_of(
        "adapter.base=nf4", "parallel.strategy=fsdp", "batch.rows=8", world=1
    ).memory_job()
    eight = job_of(
        "adapter.base=nf4", "parallel.strategy=fsdp", "batch.rows=8", world=8
    ).memory_job()
    assert (
        alone.packed_bytes
        == eight.packed_bytes
        == pytest.approx(6_979_321_856 * 4.127 / 8, rel=1e-3)
    )
    assert (
        make_plan(
            job_of("adapter.base=nf4", "parallel.strategy=fsdp", "batch.rows=8", world=8)
        ).memory.kinds["weights"]
        < 3.5 * GIB
    )


def test_a_packed_base_fits_an_8b_model_on_smaller_cards() -> None:
    cards = {
        base: as_dict(make_plan(job_of(f"adapter.base={base}")))["memory"]["smallest_card_gb"]
        for base in ("nf4", "int8", "null")
    }
    assert cards == {"nf4": 10, "int8": 16, "null": 20}
    assert smallest_card(1) == 6
    assert smallest_card(1 << 40) is None


def test_a_search_proposes_no_tensor_axis() -> None:
    plans = best_plans(job_of("adapter.base=nf4", "batch.rows=32", world=8))
    assert plans
    assert all(plan.job.layout.tensor == 1 for plan in plans)
