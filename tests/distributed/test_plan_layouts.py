"""What `headway plan` says about a layout against the engine on that layout: parameters and activations of every rank."""

from typing import Any

import pytest
from support.batches import make_batch
from support.engines import Setup, make_engine
from support.live_bytes import LiveBytes
from support.ranks import run_ranks

from headway.kernels.attention import mask_of
from headway.model.config import ModelConfig
from headway.parallel.collectives import RankGroup
from headway.parallel.config import MemoryConfig
from headway.parallel.layouts import Layout
from headway.plan.job import PlanJob
from headway.plan.memory import moments
from headway.plan.rates import Software

WIDE = ModelConfig(
    hidden_size=128,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    ffn_size=512,
    vocab_size=96,
    max_seq_len=256,
)


def job_of(layout: Layout, memory: dict[str, Any], accumulate: int = 1) -> PlanJob:
    """The plan of two rows of 256 tokens in fp32, eager."""
    settings = MemoryConfig.model_validate(memory)
    return PlanJob(
        WIDE,
        256,
        2,
        accumulate,
        layout,
        precision="fp32",
        memory=settings,
        software=Software(fusion="eager"),
    )


def after_forward(
    group: RankGroup, parallel: dict[str, Any], memory: dict[str, Any]
) -> tuple[int, int]:
    """Parameters of this rank, and bytes that live between forward and backward."""
    engine = make_engine(group, Setup(config=WIDE, freeze=(), parallel=parallel, memory=memory))
    batch = make_batch([[256], [256]], seq_len=256, vocab=96)
    mask = mask_of(batch)
    with LiveBytes() as live:
        hidden = engine.model(batch.tokens, batch.position, mask)
    assert hidden.requires_grad
    return sum(slot.size for buffer in engine.buffers for slot in buffer.slots), live.without(
        [buffer.param for buffer in engine.buffers]
    )


CASES: dict[str, tuple[Layout, dict[str, Any], dict[str, Any]]] = {
    "tensor 2": (Layout(2, tensor=2), {"tensor": 2}, {}),
    "tensor 2, whole stream": (
        Layout(2, tensor=2, sequence=False),
        {"tensor": 2, "sequence": False},
        {},
    ),
    "tensor 2, recomputed": (Layout(2, tensor=2), {"tensor": 2}, {"recompute": 1.0}),
}


def test_parameters_and_activations_of_ranks_are_the_planned_ones() -> None:
    def measure(group: RankGroup) -> dict[str, tuple[int, int]]:
        return {
            name: after_forward(group, parallel, memory)
            for name, (_, parallel, memory) in CASES.items()
        }

    for seen in run_ranks(measure, 2):
        for name, (layout, _, memory) in CASES.items():
            job = job_of(layout, memory)
            parameters, kept = seen[name]
            assert parameters == job.parameters_of(0).trained, name
            assert kept == pytest.approx(
                moments(job.memory_job())["head"]["activations"], rel=0.06
            ), name


def test_kv_heads_fewer_than_ranks_are_on_several_of_them() -> None:
    def measure(group: RankGroup) -> int:
        engine = make_engine(group, Setup(config=WIDE, freeze=(), parallel={"tensor": 4}))
        return sum(slot.size for buffer in engine.buffers for slot in buffer.slots)

    assert run_ranks(measure, 4) == [job_of(Layout(4, tensor=4), {}).parameters_of(0).trained] * 4
