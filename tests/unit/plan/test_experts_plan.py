"""Plans of mixtures: all parameters take memory, active ones take time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.batches import make_batch
from support.engines import Setup, make_engine
from support.live import LiveBytes

from headway.kernels.attention import causal_mask, mask_of
from headway.model.config import ModelConfig
from headway.model.rope import Rotation
from headway.model.router import counted_tokens
from headway.model.transformer import Block
from headway.parallel.collectives import RankGroup
from headway.plan.memory import MemoryJob, moments

MIXTURE = ModelConfig(
    hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, ffn_size=512, vocab_size=96, max_seq_len=256,
    experts={"num": 8, "per_token": 3, "ffn_size": 96, "first_dense": 1},
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_mixtures_are_those_that_live_after_an_eager_forward(dtype: torch.dtype) -> None:
    engine = make_engine(RankGroup(), Setup(config=MIXTURE, dtype=dtype, freeze=()))
    batch = make_batch([[256], [256]], seq_len=256, vocab=96)
    with LiveBytes() as live:
        hidden, routing = engine.model(batch.tokens, batch.position, mask_of(batch), counted=counted_tokens(batch))
    kept = live.without([buffer.param for buffer in engine.buffers])
    assert hidden.requires_grad and routing.probability.requires_grad
    job = MemoryJob(MIXTURE, 10**6, 0, rows=2, seq_len=256, accumulate=2, compute_bytes=dtype.itemsize)
    assert kept == pytest.approx(moments(job)["head"]["activations"], rel=0.05)


@pytest.mark.slow
def test_a_compiled_mixture_keeps_what_the_estimate_says() -> None:
    torch.compiler.reset()
    block = Block(MIXTURE, 1)
    for half in ("before", "after"):
        setattr(block, half, torch.compile(getattr(block, half), fullgraph=True, dynamic=False, backend="aot_eager_decomp_partition"))
    x, counted = torch.randn(2, 256, 128, requires_grad=True), torch.ones(2, 256)
    turn, mask = Rotation(MIXTURE)(torch.arange(256)[None].expand(2, -1)), causal_mask(2, 256)
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
    job = MemoryJob(whole, 10**6, 0, rows=2, seq_len=256, accumulate=1, compute_bytes=4, compiled=True)
    expected = moments(job)["head"]["activations"] - moments(replace(job, held_blocks=3))["head"]["activations"]
    assert sum(saved.values()) == pytest.approx(expected, rel=0.05)
