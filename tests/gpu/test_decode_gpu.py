"""On CUDA: the decode kernel equals the plain reference, prefill in chunks and recorded steps equal the forward under the same masks."""

import pytest
import torch
from support.cache_rows import largest_gap, make_sequences, serve
from support.chunk_case import SEQUENCES, SHAPES, gap
from support.decode_case import REGIONS, case, gaps

from headway.infer.decode import Decoder
from headway.infer.prefill import chunks
from headway.kernels.attention import attend_chunk, causal_mask
from headway.kernels.decode_attention import decode_attention
from headway.kernels.past_attention import attend_past, flash, has_cudnn, two_parts
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.init import initialize
from headway.model.kv_cache import KVCache
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


@pytest.mark.parametrize("name", REGIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_kernel_equals_the_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    for head_size, groups in ((64, 4), (128, 1), (24, 3)):
        gap, same = gaps(name, head_size, groups, "cuda", dtype)
        assert gap < tolerance and same, (head_size, groups, gap)
        gap, same = gaps(name, head_size, groups, "cuda", dtype, softcap=0.5)
        assert gap < tolerance and same, ("softcap", head_size, groups, gap)
    gap, same = gaps(name, 64, 4, "cuda", dtype, shared=True)
    assert gap < tolerance and same, ("one position for all rows", gap)


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_streaming_heads_read_and_keep_a_chunk_as_the_references_do(
    name: str, dtype: torch.dtype, tolerance: float
) -> None:
    for shape in [*SHAPES, (128, 2, None)]:
        far, same = gap(SEQUENCES[name], shape, "cuda", dtype)
        assert far < tolerance and same, (shape, far)


def test_every_way_behind_a_past_agrees_with_the_dense_one() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, heads, 64, generator=generator).to("cuda", torch.bfloat16)
        for n, heads in ((300, 8), (1100, 2), (1100, 2))
    )
    position = torch.arange(800, 1100, device="cuda").expand(2, -1)
    right = attend_chunk(q.float(), k.float(), v.float(), start=800, position=position)
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
    """Hidden-state logits of a prompt in chunks, then step by step."""
    model = build(dtype).to(device)
    ids = torch.randint(0, 512, (2, T), generator=torch.Generator().manual_seed(2)).to(device)
    cache = KVCache(
        CONFIG, 2, T, device=device, dtype=dtype, masks=masks, prompt_lengths=[PROMPT, PROMPT]
    )
    with torch.inference_mode():
        found = [
            model.logits(hidden).float() for hidden in chunks(model, ids[:, :PROMPT], cache, chunk)
        ]
        decoder = Decoder(model, cache, steps=60, **how)
        for at in range(PROMPT, T):
            found.append(decoder.step(ids[:, at]).clone()[:, None])
    return torch.cat(found, 1).cpu()


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
    cache = KVCache(
        CONFIG, 3, T, device="cuda", dtype=torch.float32, masks=MASKS, prompt_lengths=lengths
    )
    with torch.inference_mode():
        for _ in chunks(model, ids[:, :300], cache, 64):
            pass
        decoder, at = Decoder(model, cache, steps=40), torch.tensor(lengths, device="cuda")
        for _ in range(40):
            found = decoder.step(ids.gather(1, at[:, None])[:, 0]).clone()
            at = at + 1
        for row in range(3):
            alone = KVCache(
                CONFIG,
                1,
                T,
                device="cuda",
                dtype=torch.float32,
                masks=MASKS,
                prompt_lengths=[lengths[row] + 40],
            )
            hidden = torch.cat(
                list(chunks(model, ids[row : row + 1, : lengths[row] + 40], alone, T)), 1
            )
            assert (model.logits(hidden[0, -1]).float() - found[row]).abs().max() < 1e-3


@pytest.mark.parametrize(
    "how", [{"record": False}, {"record": True}, {"record": True, "compile_blocks": True}]
)
@pytest.mark.parametrize("masks", [None, MASKS])
def test_sequences_that_come_and_go_are_those_computed_alone(
    masks: HeadMasks | None, how: dict[str, bool]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(torch.float32)
    shapes = [
        (170, 14, 0),
        (5, 140, 0),
        (1, 30, 1),
        (400, 60, 2),
        (2, 25, 3),
        (230, 9, 8),
        (3, 1, 9),
        (111, 20, 9),
    ]
    sequences = make_sequences(shapes, 512, "cuda")
    cache = KVCache(CONFIG, 3, 460, device="cuda", dtype=torch.float32, masks=masks)

    def alone(ids: torch.Tensor) -> torch.Tensor:
        own = KVCache(
            CONFIG,
            1,
            460,
            device="cuda",
            dtype=torch.float32,
            masks=masks,
            prompt_lengths=[len(ids)],
        )
        return model.logits(torch.cat(list(chunks(model, ids[None], own, 460)), 1)[0]).float()

    with torch.inference_mode():
        assert len(serve(model, cache, sequences, chunk=64, poison=True, **how)) == 8
        assert largest_gap(sequences, alone) < 1e-3


def test_a_row_at_minus_one_is_neither_read_nor_written() -> None:
    for name in REGIONS:
        q, k, v, keys, values, position, plan = case(name, 64, 4, "cuda")
        expected = decode_attention(q, k, v, keys.clone(), values.clone(), position, plan)
        position[1] = -1
        rows, begin = len(position), 0
        for sinks, window, _ in REGIONS[name]:  # row 1 of every region
            size = (sinks + window) * 64
            keys[begin + size : begin + 2 * size] = torch.nan
            begin += rows * size
        before = keys.clone()
        found = decode_attention(q, k, v, keys, values, position, plan)
        others = [0, 2, 3]
        assert torch.equal(found[others], expected[others]) and not found[1].any()
        is_nan = before.isnan()
        assert torch.equal(keys.isnan(), is_nan)


def test_a_plain_forward_is_untouched_by_a_decoder() -> None:
    model = build(torch.float32)
    ids, position = torch.arange(64, device="cuda")[None], torch.arange(64, device="cuda")[None]
    before = model(ids, position, causal_mask(1, 64, "cuda"))
    Decoder(model, KVCache(CONFIG, 1, 64, device="cuda", dtype=torch.float32), steps=1)
    assert (model(ids, position, causal_mask(1, 64, "cuda")) - before).abs().max() < 1e-3
