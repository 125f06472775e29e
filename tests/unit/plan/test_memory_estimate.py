"""The estimate of memory against bytes that torch really holds."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.batches import make_batch
from support.engines import Setup, make_engine
from support.live_bytes import LiveBytes

from headway.kernels.attention import causal_mask, mask_of
from headway.model.config import ModelConfig
from headway.model.rope import Rotation
from headway.model.transformer import Block
from headway.parallel.collectives import RankGroup
from headway.parallel.config import MemoryConfig
from headway.plan.memory import ROUND, MemoryJob, estimate, moments, suggestions
from headway.train.memory import explain

WIDE = ModelConfig(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=512,
    vocab_size=96,
    max_seq_len=256,
)


def job_of(engine: Any, **changes: Any) -> MemoryJob:
    trained = sum(slot.size for buffer in engine.buffers for slot in buffer.slots)
    frozen = sum(value.numel() for value in engine.frozen.values.values())
    start = MemoryJob(
        WIDE,
        trained,
        frozen,
        rows=2,
        seq_len=256,
        accumulate=2,
        compute_bytes=engine.spec.dtype.itemsize,
    )
    return replace(start, **changes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", ["fp32", "bf16", "8bit"])
def test_what_is_kept_between_steps_is_what_the_engine_allocates(
    dtype: torch.dtype, state: str
) -> None:
    engine = make_engine(
        RankGroup(), Setup(config=WIDE, dtype=dtype, state_dtype=state, freeze=("layers.1",))
    )
    kinds = estimate(job_of(engine, state_dtype=state)).kinds
    shares = engine.buffers[0].master is engine.buffers[0].param
    held = {
        "weights": sum(buffer.param.nbytes for buffer in engine.buffers)
        + sum(value.nbytes for value in engine.frozen.values.values()),
        "masters": 0 if shares else sum(buffer.master.nbytes for buffer in engine.buffers),
        "gradients": sum(grad.nbytes for buffer in engine.buffers for grad in buffer.grads),
        "optimizer state": sum(
            part.nbytes for buffer in engine.buffers for part in buffer.state.values()
        ),
    }
    assert {kind: kinds[kind] / ROUND for kind in held} == pytest.approx(held, rel=0.02)


def kept_by_a_forward(engine: Any) -> int:
    """Bytes that live after an eager forward of two rows, beside the parameters."""
    batch = make_batch([[256], [256]], seq_len=256, vocab=96)
    mask = mask_of(batch)
    with LiveBytes() as live:
        hidden = engine.model(batch.tokens, batch.position, mask)
    assert hidden.requires_grad
    return live.without([buffer.param for buffer in engine.buffers])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "memory", [{}, {"recompute": 0.5}, {"recompute": 1}, {"recompute": "selective"}]
)
def test_activations_are_those_that_live_after_an_eager_forward(
    dtype: torch.dtype, memory: dict[str, Any]
) -> None:
    engine = make_engine(RankGroup(), Setup(config=WIDE, dtype=dtype, freeze=(), memory=memory))
    kept = kept_by_a_forward(engine)
    job = job_of(engine, memory=MemoryConfig.model_validate(memory))
    expected = moments(job)["head"]["activations"]
    assert kept == pytest.approx(expected, rel=0.05)


def latent_model(q_rank: int | None) -> ModelConfig:
    """Latents are wide here, so that a copy of them more or less shows."""
    latent = {
        "q_rank": q_rank,
        "kv_rank": 192,
        "nope_head_dim": 32,
        "rope_head_dim": 16,
        "value_head_dim": 32,
    }
    shape = {
        "hidden_size": 128,
        "num_layers": 4,
        "num_heads": 4,
        "ffn_size": 256,
        "vocab_size": 96,
        "max_seq_len": 256,
    }
    return ModelConfig.model_validate({**shape, "latent_attention": latent})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("q_rank", [None, 192])
def test_latents_are_those_that_live_after_an_eager_forward(
    dtype: torch.dtype, q_rank: int | None
) -> None:
    model = latent_model(q_rank)
    engine = make_engine(RankGroup(), Setup(config=model, dtype=dtype, freeze=()))
    kept = kept_by_a_forward(engine)
    expected = moments(job_of(engine, model=model))["head"]["activations"]
    assert kept == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [(0, 1, 2, 3), (0, 2)])
def test_layers_of_linear_attention_keep_what_the_estimate_says(
    dtype: torch.dtype, layers: tuple[int, ...]
) -> None:
    linear = {
        "key_heads": 2,
        "value_heads": 6,
        "key_head_dim": 24,
        "value_head_dim": 40,
        "taps": 3,
        "layers": layers,
    }
    model = WIDE.with_(linear_attention=linear, attention_gate=True, qk_norm=True)
    engine = make_engine(RankGroup(), Setup(config=model, dtype=dtype, freeze=()))
    kept = kept_by_a_forward(engine)
    expected = moments(job_of(engine, model=model))["head"]["activations"]
    assert kept == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 3])
def test_state_space_layers_keep_what_the_estimate_says(dtype: torch.dtype, groups: int) -> None:
    space = {"heads": 6, "head_dim": 40, "state_size": 24, "groups": groups, "layers": (0, 2, 3)}
    model = WIDE.with_(state_space=space)
    engine = make_engine(RankGroup(), Setup(config=model, dtype=dtype, freeze=()))
    kept = kept_by_a_forward(engine)
    expected = moments(job_of(engine, model=model))["head"]["activations"]
    assert kept == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [2, 4])
def test_layers_of_short_convolutions_keep_what_the_estimate_says(
    dtype: torch.dtype, taps: int
) -> None:
    model = WIDE.with_(short_convolution={"taps": taps, "layers": (0, 2, 3)}, qk_norm=True)
    engine = make_engine(RankGroup(), Setup(config=model, dtype=dtype, freeze=()))
    kept = kept_by_a_forward(engine)
    expected = moments(job_of(engine, model=model))["head"]["activations"]
    assert kept == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("selective", [False, True])
def test_a_compiled_block_keeps_what_the_estimate_says(selective: bool) -> None:
    from headway.parallel.recompute import recompute_method

    torch.compiler.reset()
    block = Block(WIDE, 0)
    memory = MemoryConfig(recompute="selective" if selective else "none")
    for half in ("pre_attention", "post_attention"):
        if selective:
            recompute_method(block, half, is_random=False, compiled=True)
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
    turn = Rotation(WIDE)(torch.arange(256)[None].expand(2, -1))
    mask = causal_mask(2, 256)
    outside = {t.untyped_storage().data_ptr() for t in (*turn, *block.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = block(x, *turn, mask)
    job = MemoryJob(
        WIDE,
        10**6,
        0,
        rows=2,
        seq_len=256,
        accumulate=1,
        compute_bytes=4,
        memory=memory,
        compiled=True,
    )
    more = (
        moments(replace(job, model=WIDE.with_(num_layers=5)))["head"]["activations"]
        - moments(job)["head"]["activations"]
    )
    assert sum(saved.values()) == pytest.approx(more, rel=0.05)
    assert out.requires_grad


@pytest.mark.slow
def test_a_compiled_block_with_latents_keeps_what_the_estimate_says() -> None:
    model = latent_model(192)
    torch.compiler.reset()
    block = Block(model, 0)
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
    turn = Rotation(model)(torch.arange(256)[None].expand(2, -1))
    mask = causal_mask(2, 256)
    outside = {t.untyped_storage().data_ptr() for t in (*turn, *block.parameters())}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in outside:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x, *turn, mask)
    job = MemoryJob(
        model, 10**6, 0, rows=2, seq_len=256, accumulate=1, compute_bytes=4, compiled=True
    )
    more = (
        moments(replace(job, model=model.with_(num_layers=5)))["head"]["activations"]
        - moments(job)["head"]["activations"]
    )
    assert sum(saved.values()) == pytest.approx(more, rel=0.01)


def test_suggestions_say_what_each_frees_and_none_that_is_in_use() -> None:
    config = WIDE.with_(vocab_size=2000)
    job = MemoryJob(
        config,
        10**6,
        0,
        rows=8,
        seq_len=256,
        accumulate=2,
        compute_bytes=2,
        compiled=True,
        on_cuda=True,
        chunk_tokens=512,
    )
    freed = dict(suggestions(job))
    assert freed["memory.recompute=1"] > freed["memory.recompute=selective"] > 0
    assert list(freed.values()) == sorted(freed.values(), reverse=True)
    now = estimate(job).total
    for name, change in {
        "memory.recompute=1": {"memory": MemoryConfig(recompute=1.0)},
        "optim.state_dtype=8bit": {"state_dtype": "8bit"},
        "batch.micro_rows=4": {"rows": 4, "accumulate": 4},
        "memory.offload=[optimizer]": {"memory": MemoryConfig(offload=("optimizer",))},
    }.items():
        assert freed[name] == now - estimate(replace(job, **change)).total, name
    used = replace(
        job,
        memory=MemoryConfig(recompute=1.0, offload=("activations", "optimizer")),
        state_dtype="8bit",
        rows=1,
    )
    assert not {name for name, _ in suggestions(used)} & {
        "memory.recompute=1",
        "optim.state_dtype=8bit",
        "memory.offload=[optimizer]",
    }


def test_advice_on_a_cpu_names_what_helps_there() -> None:
    job = MemoryJob(WIDE, 10**6, 0, rows=8, seq_len=256, accumulate=2, compute_bytes=4)
    names = {name for name, _ in suggestions(job)}
    assert {"memory.recompute=1", "batch.micro_rows=4"} <= names
    assert not any("offload" in name for name in names)
    assert {"memory.offload=[activations]"} <= {
        name for name, _ in suggestions(replace(job, on_cuda=True))
    }
    least = replace(
        job,
        rows=1,
        seq_len=1,
        state_dtype="8bit",
        memory=MemoryConfig(recompute=1.0),
        trained=10**9,
    )
    assert suggestions(least) == []
    assert explain(least).endswith(
        "use a smaller model, a shorter data.seq_len, or a machine with more memory."
    )
    on_cuda = replace(
        least, on_cuda=True, memory=MemoryConfig(recompute=1.0, offload=("optimizer",))
    )
    assert explain(on_cuda).endswith("use a smaller model or more ranks.")
