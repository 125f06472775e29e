"""On CUDA, latent attention of published widths: bf16 near fp32 forward and backward, packed and compiled, and decoding from stored latents."""

import pytest
import torch
from support.engine_steps import engine_logits
from support.initial_weights import initialize

from headway.data.batch import Batch
from headway.model.base import compile_method
from headway.model.config import ModelConfig
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.paged_layer import PrefillPiece
from headway.model.transformer import Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

T, LENGTHS = 512, [200, 57, 255]
LATENT = {
    "kv_rank": 512,
    "q_rank": 256,
    "nope_head_dim": 128,
    "rope_head_dim": 64,
    "value_head_dim": 128,
}


def build(heads: int, dtype: torch.dtype) -> Transformer:
    config = ModelConfig(
        hidden_size=512, num_layers=2, num_heads=heads, ffn_size=256, vocab_size=320, max_seq_len=1024, rope_interleaved=True,
        tie_embeddings=False, latent_attention=LATENT, init_std=0.05,
        rope_scaling={"kind": "yarn", "factor": 40.0, "original_max_seq_len": 4096, "mscale": 1.0, "mscale_all_dim": 1.0},
    )  # fmt: skip
    model = Transformer(config)
    initialize(model, 0)
    return model.to("cuda", dtype)


def step(model: Transformer) -> tuple[float, dict[str, torch.Tensor]]:
    tokens = torch.randint(0, 320, (1, T), generator=torch.Generator().manual_seed(0))
    position = torch.cat([torch.arange(length) for length in LENGTHS])[None].int()
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[
        None
    ].int()
    bounds = torch.tensor([[0, 200, 257, T, T]], dtype=torch.int32)
    weight, zero = torch.full((1, T), 1 / T), torch.zeros(1, dtype=torch.int32)
    batch = Batch(
        tokens, tokens.roll(-1, 1), weight, position, document, zero, bounds, single_document=False
    ).to("cuda")
    total = model.forward_batch(batch).head.nll(batch.targets, batch.loss_weight).total
    total.backward()
    return total.item(), {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("compiled", [False, True])
def test_a_packed_step_in_bf16_is_near_the_one_in_fp32(compiled: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    low = build(16, torch.bfloat16)
    exact = build(16, torch.float32)
    exact.load_state_dict({name: value.float() for name, value in low.state_dict().items()})
    exact.use_attention("reference")
    if compiled:
        for block in low.blocks().values():
            for method in low.BLOCK_METHODS:
                setattr(block, method, compile_method(getattr(block, method)))
    expected, right = step(exact)
    found, gradients = step(low)
    assert found == pytest.approx(expected, rel=1e-2)
    assert gradients.keys() == right.keys()
    for name, value in right.items():
        assert (gradients[name] - value).norm() <= 0.05 * value.norm(), name


@pytest.mark.parametrize("heads", [16, 40, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recorded_steps_over_latents_are_the_forward(heads: int, dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(heads, dtype).requires_grad_(False)
    tokens = torch.randint(0, 320, (2, 150), generator=torch.Generator().manual_seed(1)).cuda()
    position = torch.arange(150, device="cuda").expand(2, -1)
    with torch.inference_mode():
        whole = model.logits(model.hidden_states(tokens, position)).float()
    found = torch.stack(engine_logits(model, tokens, [120, 120], 30, chunk=100))
    near = 2e-3 if dtype == torch.float32 else 5e-2
    assert (found - whole).abs().max() < near * whole.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_of_latents_give_the_forward(dtype: torch.dtype) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(32, dtype).requires_grad_(False)
    tokens = torch.randint(0, 320, (150,), generator=torch.Generator().manual_seed(2)).cuda()
    position = torch.arange(150, device="cuda")
    cache = PagedCache(
        CacheShape(model.config, None, 256, 16, dtype),
        slots=2,
        pages=12,
        snapshots=0,
        device=torch.device("cuda"),
    )
    cache.table.append(0, list(range(10))[::-1])
    cache.table.flush()
    forward = model.cached_forward()
    with torch.inference_mode():
        whole = model.hidden_states(tokens[None], position[None])[0].float()
        found: list[torch.Tensor] = []
        for start, stop in ((0, 100), (100, 140)):
            piece = PrefillPiece(0, start, stop - start)
            found.append(
                forward(
                    tokens[None, start:stop],
                    position[None, start:stop],
                    cache.prefill_batch([piece]),
                )[0]
            )
        batch = cache.decode_batch(2)
        batch.slots[0] = 0
        for at in range(140, 150):
            batch.most = at + 1
            two, where = tokens[at].repeat(2)[:, None], torch.tensor([[at], [-1]], device="cuda")
            found.append(forward(two, where, batch)[0])
    near = 2e-3 if dtype == torch.float32 else 5e-2
    assert (torch.cat(found).float() - whole).abs().max() < near * whole.abs().max()
