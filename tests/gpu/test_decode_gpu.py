"""On CUDA: the kernels of chunks equal their references, and chunks and recorded steps give the logits of the CPU."""

import pytest
import torch
from support.cached_chunk_case import SEQUENCES, SHAPES, chunk_gap
from support.engine_steps import engine_logits
from support.initial_weights import initialize

from headway.kernels.attention import attend_chunk, causal_mask
from headway.kernels.past_attention import attend_past, flash, has_cudnn, two_parts
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CONFIG = ModelConfig(
    hidden_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=64,
    ffn_size=384,
    vocab_size=512,
    max_seq_len=4096,
)
MASKS = HeadMasks(((True, False, False, True), (False,) * 4, (True,) * 4), 96, 16)
T, PROMPT = 700, 640


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_streaming_heads_read_and_keep_a_chunk_as_the_references_do(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    for shape in [*SHAPES, (128, 2, None)]:
        far, same = chunk_gap(SEQUENCES[name], shape, "cuda", dtype)
        assert far < tolerance and same, (shape, far)


def test_every_way_behind_a_past_agrees_with_the_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, heads, 64, generator=generator).to("cuda", torch.bfloat16)
        for n, heads in ((300, 8), (1100, 2), (1100, 2))
    )
    right = attend_chunk(q.float(), k.float(), v.float(), start=800)
    assert has_cudnn(torch.bfloat16, 64)
    for found in (two_parts(q, k, v)[0], flash(q, k, v), attend_past(q, k, v)):
        assert (found.float() - right).abs().max() < 2e-2


def build(dtype: torch.dtype) -> Transformer:
    model = Transformer(CONFIG)
    initialize(model, 0)
    return model.to("cuda", dtype).requires_grad_(False)


def decoded(
    dtype: torch.dtype, device: str, masks: HeadMasks | None, chunk: int, **how: bool
) -> torch.Tensor:
    """Logits of a prompt in chunks, then step by step."""
    model = build(dtype).to(device)
    ids = torch.randint(0, 512, (2, T), generator=torch.Generator().manual_seed(2)).to(device)
    found = engine_logits(model, ids, [PROMPT, PROMPT], T - PROMPT, chunk=chunk, masks=masks, **how)
    return torch.stack(found).cpu()


@pytest.mark.parametrize("masks", [None, MASKS])
def test_chunks_and_steps_on_the_gpu_equal_those_on_the_cpu(masks: HeadMasks | None) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = decoded(torch.float32, "cpu", masks, 200)
    for how in ({"record": False}, {"record": True}):
        assert (decoded(torch.float32, "cuda", masks, 200, **how) - expected).abs().max() < 1e-3


@pytest.mark.parametrize("masks", [None, MASKS])
@pytest.mark.parametrize("compiled", [False, True])
def test_bf16_chunks_and_recorded_steps_stay_close(masks: HeadMasks | None, compiled: bool) -> None:
    expected = decoded(torch.float32, "cpu", masks, T)
    found = decoded(torch.bfloat16, "cuda", masks, 200, compile_blocks=compiled)
    assert (found - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_rows_of_different_length_decode_as_they_do_alone() -> None:
    model = build(torch.float32)
    torch.backends.cuda.matmul.allow_tf32 = False
    ids = torch.randint(0, 512, (3, T), generator=torch.Generator().manual_seed(2)).cuda()
    lengths = [300, 20, 131]
    together = engine_logits(model, ids, lengths, 40, chunk=64, masks=MASKS)
    for row, length in enumerate(lengths):
        (alone,) = engine_logits(model, ids[row : row + 1], [length + 40], 0, chunk=T, masks=MASKS)
        assert (alone - together[row]).abs().max() < 1e-3


def test_a_plain_forward_is_untouched_by_joined_projections() -> None:
    model = build(torch.float32)
    ids, position = torch.arange(64, device="cuda")[None], torch.arange(64, device="cuda")[None]
    before = model(ids, position, causal_mask(1, 64, "cuda"))
    model.fuse_projections()
    assert (model(ids, position, causal_mask(1, 64, "cuda")) - before).abs().max() < 1e-3
