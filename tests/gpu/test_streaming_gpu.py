"""On CUDA streaming attention and head mixing agree with the plain fp32 reference, and a gated step asks the device for nothing."""

from __future__ import annotations

import pytest
import torch
from support.batches import make_batch, make_step

from headway.kernels.attention import AttentionMask, attend, mask_of, reference, visible
from headway.kernels.head_mix import HeadMix, mix_heads
from headway.kernels.streaming import StreamingWindow, choose, stream, visible_streaming
from headway.kernels.streaming_pieces import merge_cuda, merge_reference
from headway.model.config import HeadGatesConfig, ModelConfig
from headway.model.init import initial_value
from headway.optim.adamw import Config as AdamW
from headway.optim.groups import hypers
from headway.parallel.assemble import assemble
from headway.parallel.engine import EngineSpec
from headway.tasks.base import StepInfo
from headway.tasks.head_sparsity import Config as HeadSparsity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
T = 640
ROWS = [[640], [300, 200, 100], [7, 33, 500, 90]]


def mask(rows: list[list[int]] = ROWS) -> AttentionMask:
    return mask_of(make_batch(rows, seq_len=T, vocab=9).to("cuda"))


def inputs(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(len(ROWS), T, h, width, generator=generator).to("cuda", dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def close(got: torch.Tensor, right: torch.Tensor, tolerance: float) -> bool:
    return bool(
        (got.float() - right.float()).abs().max() < tolerance * max(1.0, right.abs().max().item())
    )


@pytest.mark.parametrize("reach", [(64, 16), (128, 0), (1, 1), (40, 200), (1000, 4)], ids=str)
@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 4, 128), (4, 1, 40)])
@pytest.mark.parametrize("segment", [4096, 100])
def test_pieces_agree_with_the_reference(
    shape: tuple[int, int, int],
    reach: tuple[int, int],
    segment: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("headway.kernels.streaming_pieces.SEGMENT", segment)
    found = inputs(*shape, torch.bfloat16)
    expected = [x.detach().float().requires_grad_() for x in found]
    assert choose(found[0], mask()) == "pieces"
    o = stream(found[0], found[1], found[2], mask(), StreamingWindow(*reach))
    r = reference(
        expected[0], expected[1], expected[2], visible_streaming(mask(), StreamingWindow(*reach))
    )
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).cuda()
    (o.float() * weight).sum().backward()
    (r * weight).sum().backward()
    assert close(o, r, 2e-2)
    for name, a, b in zip("qkv", found, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        assert close(a.grad, b.grad, 2e-2), name


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("width", [64, 40])
def test_the_merge_kernel_gives_the_reference(listed: bool, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    o, part = (torch.randn(n, 4, width, generator=generator).cuda() for n in (300, 150))
    lse, part_lse = (4 * torch.randn(4, n, generator=generator).cuda() for n in (300, 150))
    at = torch.randperm(300, generator=generator)[:150].cuda() if listed else slice(100, 250)
    right = (o.clone(), lse.clone())
    merge_reference(*right, part, part_lse, at)
    merge_cuda(o, lse, part, part_lse, at)
    torch.testing.assert_close(o, right[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, right[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "gates", [[1.0, 0.0, 0.3, 0.9], [0.0, 1.0, 1.0, 0.0], [0.4, 0.5, 0.6, 0.7]], ids=str
)
def test_mixing_agrees_with_the_naive_mix(gates: list[float]) -> None:
    reach = StreamingWindow(64, 16)
    q, k, v = inputs(8, 4, 64, torch.bfloat16)
    z = torch.tensor([gates], device="cuda", requires_grad=True)
    seen = mask()
    o = mix_heads(
        q,
        k,
        v,
        seen,
        HeadMix.of(z, torch.tensor([gates]), reach),
        0,
        full=lambda q, k, v: attend(q, k, v, seen),
    )
    plain = [x.detach().float().requires_grad_() for x in (q, k, v, z)]
    weight = plain[3][0].repeat_interleave(2)[:, None]
    full, near = (
        reference(plain[0], plain[1], plain[2], m)
        for m in (visible(seen, None), visible_streaming(seen, reach))
    )
    r = weight * full + (1 - weight) * near
    g = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).cuda()
    (o.float() * g).sum().backward()
    (r * g).sum().backward()
    assert close(o, r, 2e-2)
    for a, b in zip((q, k, v), plain, strict=False):
        assert a.grad is not None and b.grad is not None
        assert close(a.grad, b.grad, 2e-2)
    undecided = torch.tensor([0 < x < 1 for x in gates])
    assert (
        z.grad is None
        or plain[3].grad is None
        or close(z.grad[0, undecided], plain[3].grad[0, undecided], 3e-2)
    )


def test_64k_tokens_never_need_a_square_of_memory() -> None:
    torch.cuda.empty_cache()
    generator = torch.Generator(device="cuda").manual_seed(0)
    q, k, v = (
        torch.randn(
            1, 65536, h, 64, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for h in (4, 1, 1)
    )
    batch = make_batch([[40000, 25536]], seq_len=65536, vocab=9).to("cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    stream(q, k, v, mask_of(batch), StreamingWindow(1024, 128)).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 20 * q.nbytes < 65536 * 65536 / 4


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_between_reading_the_gates_and_the_update_nothing_waits_for_the_device() -> None:
    config = ModelConfig(
        hidden_size=128, num_layers=3, num_heads=4, num_kv_heads=2, ffn_size=256, vocab_size=512, max_seq_len=T,
        head_gates=HeadGatesConfig(window=64, sinks=16, init_mean=0.0, init_std=2.0),
    )  # fmt: skip
    spec = EngineSpec(
        config,
        HeadSparsity(),
        AdamW(),
        torch.device("cuda"),
        torch.bfloat16,
        chunk_tokens=512,
        freeze=("weights",),
    )
    engine = assemble(spec)
    engine.fill(
        (name, initial_value(one, config, 0))
        for name, one in engine.specs.items()
        if one.start != "given"
    )
    gates = engine.model.head_gates
    assert gates is not None

    def step(index: int) -> None:
        batch = make_step(
            make_batch([[640], [300, 200, 100]], seq_len=T, vocab=512, seed=index).pin(), 2
        )
        engine.forward_backward(batch, StepInfo(index, 10))
        engine.update(hypers(AdamW(), engine.groups, index, 10))

    step(0)
    on_host = gates()
    gates.forward = lambda: on_host  # the one wait of a step
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(1)
    finally:
        torch.cuda.set_sync_debug_mode("default")
