"""Plans of mixtures: all parameters take memory, active ones take time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import make_batch
from support.engines import Setup, make_engine
from support.live_bytes import LiveBytes

from headway.errors import ParallelError
from headway.kernels.attention import causal_mask, mask_of
from headway.model.config import ModelConfig
from headway.model.rope import Rotation
from headway.model.router import counted_tokens
from headway.model.transformer import Block
from headway.parallel.collectives import RankGroup
from headway.parallel.layouts import Layout
from headway.plan.job import PlanJob
from headway.plan.memory import MemoryJob, moments
from headway.plan.search import _space, fitting_jobs, layouts_of
from headway.plan.traffic import expert_traffic

MIXTURE = ModelConfig(
    hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=512, vocab_size=96, max_seq_len=256,
    experts={"num": 8, "per_token": 3, "ffn_size": 96, "first_dense": 1},
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_mixtures_are_those_that_live_after_an_eager_forward(
    dtype: torch.dtype,
) -> None:
    engine = make_engine(RankGroup(), Setup(config=MIXTURE, dtype=dtype, freeze=()))
    batch = make_batch([[256], [256]], seq_len=256, vocab=96)
    with LiveBytes() as live:
        hidden, routing = engine.model(
            batch.tokens, batch.position, mask_of(batch), counted=counted_tokens(batch)
        )
    kept = live.without([buffer.param for buffer in engine.buffers])
    assert hidden.requires_grad
    assert routing.probability.requires_grad
    job = MemoryJob(
        MIXTURE, 10**6, 0, rows=2, seq_len=256, accumulate=2, compute_bytes=dtype.itemsize
    )
    assert kept == pytest.approx(moments(job)["head"]["activations"], rel=0.05)


@pytest.mark.slow
def test_a_compiled_mixture_keeps_what_the_estimate_says() -> None:
    torch.compiler.reset()
    block = Block(MIXTURE, 1)
    for half in ("pre_attention", "post_attention"):
        setattr(
            block,
            half,
            torch.compile(
                getattr(block, half),
                fullgraph=True,
                dynamic=False,
                backend="aot_eager_decomp_partition",
            ),
        )
    x = torch.randn(2, 256, 128, requires_grad=True)
    counted = torch.ones(2, 256)
    turn = Rotation(MIXTURE)(torch.arange(256)[None].expand(2, -1))
    mask = causal_mask(2, 256)
    outside = {t.untyped_storage().data_ptr() for t in (*turn, *block.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, *turn, mask, counted)
    whole = MIXTURE.with_(experts={**MIXTURE.experts.model_dump(), "first_dense": 0})  # pyright: ignore[reportOptionalMemberAccess]
    job = MemoryJob(
        whole, 10**6, 0, rows=2, seq_len=256, accumulate=1, compute_bytes=4, compiled=True
    )
    expected = (
        moments(job)["head"]["activations"]
        - moments(replace(job, held_blocks=3))["head"]["activations"]
    )
    assert sum(saved.values()) == pytest.approx(expected, rel=0.05)


UNSPLIT = PlanJob(MIXTURE, 256, 2, 1, Layout(8))
EXPERT_PARAMETERS = 3 * 8 * 3 * 96 * 128  # mixtures, experts, matrices of each


def test_split_experts_are_counted_once_per_rank() -> None:
    split = UNSPLIT.varied(Layout(8, expert=4), 2, 1)
    shared = UNSPLIT.parameters_of(0).trained - EXPERT_PARAMETERS
    assert split.parameters_of(0).trained == shared + EXPERT_PARAMETERS // 4
    assert split.parameters_of(0).experts == EXPERT_PARAMETERS // 4
    assert split.memory_job().trained_shard == shared / 8 + EXPERT_PARAMETERS / 4 / 2
    in_two_shards = UNSPLIT.varied(Layout(8, expert=4, shard=2), 2, 1)
    assert in_two_shards.memory_job().trained_shard == shared / 2 + EXPERT_PARAMETERS / 4


def test_tokens_of_split_experts_are_traffic() -> None:
    split = UNSPLIT.varied(Layout(8, expert=4), 2, 1)
    # mixtures, exchanges, tokens, experts of a token, width, bytes, to others
    assert expert_traffic(split, 3).sent_bytes == 3 * 4 * (2 * 256) * 3 * 128 * 2 * 3 / 4
    assert expert_traffic(UNSPLIT, 3).sent_bytes == 0


def test_a_search_splits_experts_where_there_are_some() -> None:
    assert {layout.expert for layout in layouts_of(UNSPLIT)} == {1, 2, 4, 8}
    dense = PlanJob(MIXTURE.with_(experts=None), 256, 2, 1, Layout(8))
    assert {layout.expert for layout in layouts_of(dense)} == {1}


def test_a_search_does_not_join_split_experts_and_selective_recompute() -> None:
    for job in fitting_jobs(UNSPLIT, _space(UNSPLIT)):
        assert job.layout.expert == 1 or job.memory.recompute != "selective"


def test_layouts_that_cannot_share_experts_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ParallelError,
        match=r"parallel.expert is 3; it must divide the 8 data-parallel ranks. The nearest .*expert=2",
    ):
        PlanJob(MIXTURE, 256, 2, 1, Layout(8, expert=3)).check()
    with pytest.raises(ParallelError, match="the model has no experts"):
        PlanJob(MIXTURE.with_(experts=None), 256, 2, 1, Layout(8, expert=2)).check()
