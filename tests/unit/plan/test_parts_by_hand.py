"""Parameters, traffic and time of single parts of a plan, in numbers counted by hand.

The small model: 4 layers of 43,136 parameters (q and o 4096 each, k and v 2048 each, feed-forward 3 * 64 * 160, norms 128), an embedding
of 64,000 and a last norm of 64.
"""

from dataclasses import replace
from typing import Any

import pytest

from headway.model.adapter.config import AdapterConfig, all_specs
from headway.model.config import ModelConfig
from headway.parallel.config import MemoryConfig
from headway.parallel.layouts import Layout
from headway.parallel.pipeline_order import ScheduleName
from headway.plan.compute import (
    _mixture,
    head_seconds,
    layer_seconds,
    stage_seconds,
    update_seconds,
)
from headway.plan.hardware import GPUS
from headway.plan.job import PlanJob, ReferenceModel
from headway.plan.parameters import count_parameters
from headway.plan.result import make_plan
from headway.plan.traffic import (
    AxisTraffic,
    context_traffic,
    data_traffic,
    expert_traffic,
    stages_of_job,
    tensor_traffic,
)

SMALL = ModelConfig(
    hidden_size=64,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=160,
    vocab_size=1000,
    max_seq_len=128,
)
LAYER = 43_136
EMBEDDING = 64_000
NORM = 64
ALL = 4 * LAYER + EMBEDDING + NORM
GPU = replace(GPUS["h200"], bandwidth=1e12, link=100e9, network=10e9, host=10e9)
LINK = 78e9
"""What collectives reach of the link inside a node."""
HOP = 2.5e-6


def job(layout: Layout, model: ModelConfig = SMALL, **changes: Any) -> PlanJob:
    return PlanJob(model, 128, 1, 2, layout, GPU, **changes)


def traffic(plan_of: PlanJob, rank: int = 0) -> AxisTraffic:
    return data_traffic(plan_of, stages_of_job(plan_of), rank)


def test_a_tied_embedding_is_on_the_first_and_the_last_stage() -> None:
    tied = job(Layout(4, pipeline=4))
    assert [tied.parameters_of(rank).total for rank in range(4)] == [
        LAYER + EMBEDDING,
        LAYER,
        LAYER,
        LAYER + NORM + EMBEDDING,
    ]
    assert [tied.memory_job(rank).trained for rank in (0, 3)] == [
        LAYER + EMBEDDING,
        LAYER + NORM + EMBEDDING,
    ]
    apart = job(Layout(4, pipeline=4), SMALL.with_(tie_embeddings=False))
    assert [apart.parameters_of(rank).total for rank in range(4)] == [
        LAYER + EMBEDDING,
        LAYER,
        LAYER,
        LAYER + NORM + EMBEDDING,
    ]
    assert job(Layout(1)).parameters_of(0).total == ALL
    # of four stages on two ranks, the first rank has the first and the third, the second rank the others
    folded = job(Layout(2, pipeline=2, schedule="interleaved", virtual_stages=2))
    assert [folded.parameters_of(rank).total for rank in range(2)] == [
        2 * LAYER + EMBEDDING,
        2 * LAYER + NORM + EMBEDDING,
    ]


def test_gates_are_on_every_pipeline_rank() -> None:
    gated = job(Layout(2, pipeline=2), SMALL.with_(head_gates={}), pipeline_split=(2, 2))
    assert [gated.parameters_of(rank).total for rank in range(2)] == [
        2 * LAYER + EMBEDDING + 8,
        2 * LAYER + NORM + EMBEDDING + 8,
    ]


def test_kv_heads_are_divided_by_as_many_ranks_as_there_are() -> None:
    specs = job(Layout(1)).all_specs
    four = count_parameters(SMALL, specs, set(specs), tensor=4).layers[0].total
    assert four == 2 * 4096 // 4 + 2 * 2048 // 2 + 3 * 64 * 160 // 4 + 128


def test_the_matrices_of_an_adapter_are_divided_with_their_linear() -> None:
    adapter = AdapterConfig(rank=4, targets=("k_proj", "down_proj"))
    counts = count_parameters(
        SMALL, all_specs(SMALL, adapter), set(adapter.shapes(SMALL)), tensor=2
    )
    # k is split by its 32 outputs: A whole, B halved; down by its 160 inputs: A halved, B whole
    assert counts.layers[0].trained == 4 * 64 + 32 * 4 // 2 + 4 * 160 // 2 + 64 * 4


def test_fsdp_gathers_for_forward_and_again_for_backward() -> None:
    layout = Layout(8, strategy="fsdp")
    twice = traffic(job(layout))
    once = traffic(job(layout, reshard=False))
    # two microbatches, bf16 parameters; gradients in fp32 once a step; seven of eight parts go to other ranks
    assert twice.sent_bytes == 2 * 2 * ALL * 2 * 7 / 8 + ALL * 4 * 7 / 8
    assert once.sent_bytes == 2 * 1 * ALL * 2 * 7 / 8 + ALL * 4 * 7 / 8
    # four layers and the rest are five messages around eight ranks
    gather = ALL * 2 * 7 / 8 / LINK + 5 * 7 * HOP
    reduce = ALL * 4 * 7 / 8 / LINK + 5 * 7 * HOP
    assert twice.seconds == pytest.approx(2 * 2 * gather + reduce, rel=1e-9)
    assert once.seconds == pytest.approx(2 * gather + reduce, rel=1e-9)
    assert twice.exposed > once.exposed


def test_shards_in_a_node_sum_their_copies_over_nodes() -> None:
    fsdp = traffic(job(Layout(16, strategy="fsdp", shard=8)))
    gradients = ALL * 4
    assert (
        fsdp.sent_bytes == 2 * 2 * ALL * 2 * 7 / 8 + gradients * 7 / 8 + 2 * (gradients / 8) * 1 / 2
    )
    zero = traffic(job(Layout(16, shard=8)))
    assert zero.sent_bytes == (gradients + ALL * 2) * 7 / 8 + 2 * (gradients / 8) * 1 / 2
    copies = traffic(job(Layout(8, shard=1)))
    assert copies.sent_bytes == 2 * gradients * 7 / 8


def test_recomputed_layers_gather_and_sum_their_activations_again() -> None:
    plain = tensor_traffic(job(Layout(2, tensor=2)), 4)
    again = tensor_traffic(job(Layout(2, tensor=2), memory=MemoryConfig(recompute=1.0)), 4)
    stream = 128 * 64 * 2  # tokens, width, bytes
    assert plain.sent_bytes == 4 * 8 * stream / 2
    assert again.sent_bytes == 4 * 12 * stream / 2


def test_context_ranks_beyond_the_kv_heads_pass_keys_in_a_ring() -> None:
    traffic_of_ring = context_traffic(job(Layout(4, context=4)), 4)
    each = 32 * 2  # tokens of a rank, bytes
    # q, k, v and the result to two ranks, and their gradients
    heads = 2 * each * (2 * 64 + 2 * 32) / 2
    ring = 3 * each * 2 * 32  # keys and values forward; in backward with their gradients
    assert traffic_of_ring.sent_bytes == 4 * (heads + ring)


MIXED = SMALL.with_(
    experts={"num": 8, "per_token": 3, "ffn_size": 96, "first_dense": 1, "shared_ffn_size": 32}
)


def test_experts_of_a_token_decide_the_time_of_a_mixture() -> None:
    seconds, moved = _mixture(job(Layout(1), MIXED))
    peak = GPU.flops * 0.70

    def product(flops: float, *sizes: float) -> float:
        return flops * (1 + 48 * sum(1 / size for size in sizes)) / peak

    # 128 tokens in three slots each, 48 of them with each of eight experts
    gate_up = product(2 * 384 * 192 * 64, 48, 192, 64)
    down = product(2 * 384 * 96 * 64, 48, 64, 96)
    shared = product(3 * 2 * 128 * 32 * 64, 128, 64, 64)
    assert seconds == pytest.approx(gate_up + down + shared, rel=1e-9)
    # a slot's input and result are read and written once each, at 60 % of the bandwidth
    assert moved == pytest.approx(4 * 384 * 64 * 2 / 0.6e12, rel=1e-9)
    split, _ = _mixture(job(Layout(4, expert=4), MIXED))
    # the same slots, in groups four times as large
    assert split == pytest.approx(
        product(2 * 384 * 192 * 64, 192, 192, 64)
        + product(2 * 384 * 96 * 64, 192, 64, 96)
        + shared,
        rel=1e-9,
    )


def test_tokens_go_to_their_experts_and_back_in_both_directions() -> None:
    exchange = expert_traffic(job(Layout(4, expert=4), MIXED), 3)
    assert exchange.sent_bytes == 3 * 4 * (128 * 3 * 64 * 2) * 3 / 4
    again = expert_traffic(job(Layout(4, expert=4), MIXED, memory=MemoryConfig(recompute=1.0)), 3)
    assert again.sent_bytes == 1.5 * exchange.sent_bytes


WIDE = ModelConfig(
    hidden_size=1024, num_layers=4, num_heads=8, ffn_size=4096, vocab_size=32000, max_seq_len=8192
)


def wide(**changes: Any) -> PlanJob:
    layout = changes.pop("layout", Layout(1))
    return PlanJob(WIDE, 8192, 1, 2, layout, GPU, **changes)


def test_a_recomputed_layer_runs_its_forward_twice() -> None:
    plain = layer_seconds(wide(), 0)
    again = layer_seconds(wide(memory=MemoryConfig(recompute=1.0)), 0)
    assert again.forward == plain.forward
    assert again.weights == plain.weights
    assert again.inputs == pytest.approx(plain.inputs + plain.forward, rel=1e-9)


def test_a_frozen_head_and_frozen_layers_compute_no_gradients_of_weights() -> None:
    job_ = wide(training={"model.layers.3.mlp.down_proj.weight"})
    assert head_seconds(job_).weights == 0
    assert head_seconds(wide()).weights > 0
    assert layer_seconds(job_, 0).weights == 0
    assert layer_seconds(job_, 3).weights > 0


def test_a_reference_adds_its_forward_pass() -> None:
    plain = wide()
    reference = ReferenceModel("reference", WIDE, plain.all_specs)
    more = stage_seconds(wide(reference=reference))[0].forward - stage_seconds(plain)[0].forward
    frozen = wide(training=())
    layers = sum(layer_seconds(frozen, layer).forward for layer in range(4))
    embedding = 2 * 8192 * 1024 * 2 / 0.6e12
    assert more == pytest.approx(embedding + layers + head_seconds(frozen).forward, rel=1e-9)


def test_an_update_reads_and_writes_the_shard_of_a_rank() -> None:
    plan_job = job(Layout(8))
    shard = ALL / 8
    # the norm reads gradients; then moments and master both ways, the gradient again, and the bf16 copy
    moved = shard * (4 + 2 * 8 + 2 * 4 + 4 + 2)
    # bf16 gradients are written to fp32 in the first microbatch and added in the second
    collected = ALL * (2 + 4 + 2 + 4 + 4)
    assert update_seconds(plan_job) == pytest.approx((moved + collected) / 0.8e12, rel=1e-9)
    outside = replace(plan_job, memory=MemoryConfig(offload=("optimizer",)))
    assert update_seconds(outside) - update_seconds(plan_job) == pytest.approx(
        shard * 12 / 10e9, rel=1e-9
    )


def test_a_budget_counts_every_gpu() -> None:
    plan = make_plan(wide(layout=Layout(4)))
    budget = plan.budget(1e9, price=2.0)
    seconds = 1e9 / plan.tokens_per_second
    assert budget["days"] == pytest.approx(seconds / 86400)
    assert budget["gpu_hours"] == pytest.approx(4 * seconds / 3600)
    assert budget["cost"] == pytest.approx(2 * 4 * seconds / 3600)


def test_a_long_pipeline_takes_as_long_for_each_microbatch_as_its_slowest_rank() -> None:
    short = make_plan(wide().varied(Layout(2, pipeline=2), 1, 12))
    long = make_plan(wide().varied(Layout(2, pipeline=2), 1, 20))
    slowest = max(stage.total for stage in stages_of_job(short.job))
    assert (long.step_seconds - long.update_seconds) - (
        short.step_seconds - short.update_seconds
    ) == pytest.approx(8 * slowest, rel=1e-6)


def test_the_bubble_of_a_search_is_that_of_equal_stages() -> None:
    cases: list[tuple[ScheduleName, int, float]] = [
        ("1f1b", 1, 1.0),
        ("interleaved", 2, 0.5),
        ("zero_bubble", 1, 0.4),
    ]
    for schedule, virtual, idle in cases:
        job_of_search = wide().varied(
            Layout(2, pipeline=2, schedule=schedule, virtual_stages=virtual), 1, 4
        )
        plan = make_plan(job_of_search, simulated=False)
        stages = stages_of_job(job_of_search)
        slowest = max(
            sum(stages[stage].total for stage in job_of_search.stages_of(rank)) for rank in range(2)
        )
        busy = sum(stage.total for stage in stages)
        # four microbatches, and what the other rank waits for
        assert plan.step_seconds - plan.update_seconds == pytest.approx(
            slowest * (4 + idle), rel=1e-9
        )
        assert plan.bubble == pytest.approx(1 - 4 * busy / (2 * slowest * (4 + idle)), rel=1e-9)
