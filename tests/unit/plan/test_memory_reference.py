"""Plans count the frozen second model that an objective keeps in memory: its bytes, its forward pass and the time of it."""

from pathlib import Path

import pytest

from headway.config.load import load
from headway.model.base import build_frozen_model
from headway.model.flops import token_flops
from headway.plan.hardware import GPUS
from headway.plan.job import PlanJob
from headway.plan.memory import ROUND
from headway.plan.result import Plan, as_dict, make_plan
from headway.train.config import Recipe
from headway.train.planning import PlanTarget, plan_job

PAIRS = (
    "model.preset=llama-1b",
    "data.train=[{path: x, kind: preference}]",
    "data.seq_len=1024",
    "batch.rows=8",
    "batch.micro_rows=2",
)
KIND = "reference model"


def job_of(*settings: str, world: int = 1) -> PlanJob:
    return plan_job(load(Recipe, None, [*PAIRS, *settings]), PlanTarget(GPUS["h200"], world))


def plan_of(*settings: str, world: int = 1) -> Plan:
    return make_plan(job_of(*settings, world=world))


@pytest.fixture(scope="module")
def without_reference() -> Plan:
    return plan_of("objective.kind=dpo", "objective.reference_free=true")


@pytest.fixture(scope="module")
def with_reference() -> Plan:
    return plan_of("objective.kind=dpo", "seed=0")


def test_a_reference_whose_scores_are_cached_costs_nothing(without_reference: Plan) -> None:
    cached = plan_of("objective.kind=dpo", "objective.reference_logps=cached")
    assert cached.memory == without_reference.memory
    assert cached.step_seconds == without_reference.step_seconds


def test_a_reference_in_memory_adds_a_frozen_copy(
    with_reference: Plan, without_reference: Plan
) -> None:
    parameters = as_dict(with_reference)["model"]["parameters"]
    kinds = dict(with_reference.memory.kinds)
    assert kinds.pop(KIND) == pytest.approx(2 * parameters, rel=0.02)
    assert kinds == without_reference.memory.kinds
    assert KIND not in without_reference.memory.kinds
    reference = as_dict(with_reference)["model"]["reference"]
    assert reference == {"role": "reference", "parameters": parameters}


def test_a_reference_in_memory_adds_a_forward_pass_to_every_step(
    with_reference: Plan, without_reference: Plan
) -> None:
    forward = token_flops(with_reference.job.model, 1024, training=()).causal
    assert forward == pytest.approx(without_reference.flops.model.causal / 3, rel=0.01)
    assert with_reference.flops.reference == forward
    assert with_reference.flops.hardware == without_reference.flops.hardware + forward
    assert with_reference.flops.model == without_reference.flops.model
    assert 1.2 < with_reference.step_seconds / without_reference.step_seconds < 1.4


def test_the_copy_is_divided_by_the_tensor_axis_alone_and_quantised_as_the_base_is() -> None:
    whole = job_of("objective.kind=dpo", "parallel.tensor=1", world=1).memory_job().reference_bytes
    data = job_of("objective.kind=dpo", "parallel.tensor=1", world=4).memory_job().reference_bytes
    tensor = job_of("objective.kind=dpo", "parallel.tensor=4", world=4).memory_job().reference_bytes
    assert data == whole
    assert whole / 4 <= tensor < whole / 3.9
    lora = (
        job_of("objective.kind=dpo", "adapter.rank=8", "adapter.base=null")
        .memory_job()
        .reference_bytes
    )
    packed = (
        job_of("objective.kind=dpo", "adapter.rank=8", "adapter.base=nf4")
        .memory_job()
        .reference_bytes
    )
    assert lora == whole  # an adapter's base is a model of its own here
    assert packed < 0.6 * whole  # embedding and head stay floats


def test_a_teacher_is_the_model_that_the_recipe_names(tmp_path: Path) -> None:
    """Its estimate is the bytes of the model that a run would load."""
    import torch
    from support.runs import tiny_settings

    from headway.export.huggingface import export_huggingface
    from headway.model.layout import param_specs

    shape = load(Recipe, None, [*tiny_settings(tmp_path, "teacher"), "model.hidden_size=64"]).model
    export_huggingface(
        shape,
        ((spec.name, torch.zeros(spec.shape)) for spec in param_specs(shape)),
        tmp_path / "teacher",
        tokenizer=None,
    )
    settings = (
        "objective.kind=distill",
        f"objective.teacher={tmp_path}/teacher",
        "data.tokenizer_unchecked=true",
    )
    job = plan_job(
        load(Recipe, None, [*tiny_settings(tmp_path, "run"), *settings]), PlanTarget(GPUS["h200"])
    )
    assert job.reference is not None
    assert job.reference.role == "teacher"
    config = job.reference.model
    frozen = build_frozen_model(config, [], torch.device("cpu"), torch.bfloat16)
    assert job.memory_job().reference_bytes == sum(
        p.numel() * p.element_size() for p in frozen.parameters()
    )
    plan = make_plan(job)
    hidden = 2 * 64 * job.tokens
    assert plan.memory.kinds[KIND] == int((job.memory_job().reference_bytes + hidden) * ROUND)
    stored = load(Recipe, None, [*tiny_settings(tmp_path, "run"), settings[0], "objective.cache=x"])
    assert plan_job(stored, PlanTarget(GPUS["h200"])).reference is None
