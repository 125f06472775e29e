"""On CUDA every kernel agrees with the plain fp32 reference, forward and backward, and compiled halves change nothing."""

import pytest
import torch
from support.engine_steps import engine_logits
from support.initial_weights import initialize

from headway.data.batch import Batch
from headway.errors import ConfigError
from headway.kernels.attention import (
    PLAIN,
    AttentionMask,
    ScoreRule,
    attend,
    causal_mask,
    choose,
    mask_of,
    working_backends,
)
from headway.model.config import ModelConfig
from headway.model.transformer import Block, Transformer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

T = 384
PACKED = [[100, 1, 180, 103], [384], [7, 377]]
ALONE = [[300, 84], [384], [1, 383]]


def mask(
    rows: list[list[int]], *, single_document: bool = False, max_documents: int = 9
) -> AttentionMask:
    """The mask of rows of documents, with room for more documents than there are."""
    document = torch.stack(
        [torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in rows]
    ).int()
    starts = [torch.tensor([0, *row]).cumsum(0) for row in rows]
    bounds = torch.stack(
        [torch.cat((s, torch.full((max_documents + 1 - len(s),), T))) for s in starts]
    ).int()
    zero = torch.zeros(len(rows), T, dtype=torch.int64)
    batch = Batch(
        zero, zero, zero.float(), zero.int(), document, zero[:, 0].int(), bounds, single_document
    )
    return mask_of(batch.to("cuda"))


def inputs(heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(3, T, h, width, generator=generator).to("cuda", dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads)
    ]


def compare(
    shape: tuple[int, int, int], rows: list[list[int]], window: int | None, backend: str, dtype: torch.dtype, tolerance: float,
    rule: ScoreRule = PLAIN,
) -> None:  # fmt: skip
    """Output and gradients of a backend against the fp32 reference on the same values; padding is left out where plain causal is used."""
    plain = rows is ALONE
    counted = torch.ones(3, T, 1, 1, device="cuda")
    if plain:
        for row, lengths in enumerate(rows):
            counted[row, lengths[0] :] = 0
    weight = (
        torch.randn(3, T, shape[0], shape[2], generator=torch.Generator().manual_seed(1)).cuda()
        * counted
    )
    found = inputs(*shape, dtype)
    expected = [x.detach().float().requires_grad_() for x in found]
    o = attend(*found, mask(rows, single_document=plain), window=window, backend=backend, rule=rule)
    r = attend(*expected, mask(rows), window=window, backend="reference", rule=rule)
    (o.float() * weight).sum().backward()
    (r * weight).sum().backward()
    assert ((o.float() - r) * counted).abs().max() < tolerance
    for a, b in zip(found, expected, strict=True):
        assert a.grad is not None and b.grad is not None
        assert (a.grad.float() - b.grad).abs().max() < tolerance * max(
            1.0, b.grad.abs().max().item()
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 64, 1000])
@pytest.mark.parametrize("shape", [(8, 8, 64), (8, 2, 64), (4, 1, 128), (4, 2, 40)])
def test_varlen_agrees_with_the_reference(
    shape: tuple[int, int, int], window: int | None, dtype: torch.dtype
) -> None:
    compare(shape, PACKED, window, "varlen", dtype, 2e-2)


@pytest.mark.parametrize("shape", [(8, 8, 64), (8, 2, 64), (4, 1, 128)])
@pytest.mark.parametrize("rows", [PACKED, ALONE], ids=["packed", "alone"])
def test_sdpa_agrees_with_the_reference(shape: tuple[int, int, int], rows: list[list[int]]) -> None:
    compare(shape, rows, None, "sdpa", torch.bfloat16, 2e-2)
    compare(shape, rows, None, "sdpa", torch.float32, 1e-4)
    compare(shape, PACKED, 64, "sdpa", torch.float32, 1e-4)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 2e-3)])
@pytest.mark.parametrize("window", [None, 1, 65])
@pytest.mark.parametrize("shape", [(8, 2, 64), (4, 4, 128), (4, 1, 256), (4, 2, 96)])
def test_flex_soft_caps_as_the_reference(
    shape: tuple[int, int, int], window: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    compare(shape, PACKED, window, "flex", dtype, tolerance, ScoreRule(softcap=2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_flex_takes_heads_narrower_than_its_kernels_do(dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-3
    compare((4, 2, 8), PACKED, 65, "flex", dtype, tolerance, ScoreRule(softcap=2.0))


def test_flex_pads_lengths_that_fill_no_block() -> None:
    q, k, v = (x[:, :301].detach() for x in inputs(8, 2, 64, torch.bfloat16))
    found = attend(q, k, v, causal_mask(3, 301, "cuda"), rule=ScoreRule(softcap=2.0))
    expected = attend(
        q, k, v, causal_mask(3, 301, "cuda"), rule=ScoreRule(softcap=2.0), backend="reference"
    )
    assert (found.float() - expected.float()).abs().max() < 2e-2


def test_auto_takes_varlen_for_packed_16_bit_rows_and_sdpa_otherwise() -> None:
    q = inputs(8, 2, 64, torch.bfloat16)[0]
    assert choose(q, mask(PACKED), None) == "varlen"
    assert choose(q, mask(ALONE, single_document=True), None) == "sdpa"
    assert choose(q, mask(ALONE, single_document=True), 64) == "varlen"
    assert choose(q.float(), mask(PACKED), None) == "sdpa"
    with pytest.raises(ConfigError, match="float32"):
        attend(*inputs(8, 2, 64, torch.float32), mask(PACKED), backend="varlen")


def test_every_backend_works_on_this_device() -> None:
    assert working_backends("cuda")[:3] == [
        ("reference", True, ""),
        ("sdpa", True, ""),
        ("varlen", True, ""),
    ]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_building_a_mask_does_not_wait_for_the_device() -> None:
    zero = torch.zeros(3, T, dtype=torch.int64, device="cuda")
    bounds = torch.tensor([[0, T]] * 3, dtype=torch.int32, device="cuda")
    batch = Batch(zero, zero, zero.float(), zero.int(), zero.int(), zero[:, 0].int(), bounds)
    q, k, v = inputs(8, 2, 64, torch.bfloat16)
    attend(q, k, v, mask_of(batch))
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend(q, k, v, mask_of(batch)).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


CONFIG = ModelConfig(
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=256,
    vocab_size=512,
    init_std=0.1,
)


def build(dtype: torch.dtype) -> Transformer:
    model = Transformer(CONFIG)
    initialize(model, 0)
    return model.to("cuda", dtype)


@pytest.mark.filterwarnings("ignore")
def test_compiled_halves_are_two_graphs_and_give_the_eager_result() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = build(torch.bfloat16), build(torch.bfloat16)
    for block in compiled.model.layers.values():
        assert isinstance(block, Block)
        block.pre_attention = torch.compile(block.pre_attention, fullgraph=True, dynamic=False)
        block.post_attention = torch.compile(block.post_attention, fullgraph=True, dynamic=False)
    ids = torch.randint(0, 512, (3, T), generator=torch.Generator().manual_seed(2)).cuda()
    position = (
        torch.cat([torch.cat([torch.arange(n) for n in row]) for row in PACKED]).view(3, T).cuda()
    )
    results = []
    for model in (eager, compiled):
        out = model.logits(model(ids, position, mask(PACKED))).float()
        out.square().mean().backward()
        results.append((out, model.model.embed_tokens.weight.grad))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    for a, b in zip(*results, strict=True):
        assert (a - b).float().norm() < 2e-2 * a.float().norm()


def test_decoding_from_the_cache_equals_the_whole_forward() -> None:
    model = build(torch.float32).requires_grad_(False)
    ids = torch.randint(0, 512, (2, 40), generator=torch.Generator().manual_seed(2)).cuda()
    position = torch.arange(40, device="cuda").expand(2, -1)
    expected = model.logits(model(ids, position, causal_mask(2, 40, "cuda")))
    found = torch.stack(engine_logits(model, ids, [30, 30], 10, chunk=30))
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["sdpa", "varlen", "reference"])
@pytest.mark.parametrize("compiled", [False, True])
def test_changing_a_document_leaves_its_neighbours_bit_equal(backend: str, compiled: bool) -> None:
    from functools import partial

    config = ModelConfig(
        hidden_size=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        ffn_size=256,
        vocab_size=512,
        max_seq_len=T,
    )
    model = Transformer(config)
    initialize(model, 0)
    model.to("cuda", torch.bfloat16)
    for block in model.model.layers.values():
        assert isinstance(block, Block)
        block.core = partial(attend, backend=backend)
        if compiled:
            block.pre_attention = torch.compile(block.pre_attention, fullgraph=True, dynamic=False)
            block.post_attention = torch.compile(
                block.post_attention, fullgraph=True, dynamic=False
            )
    tokens = torch.randint(0, 512, (3, T), generator=torch.Generator().manual_seed(0)).cuda()
    changed = tokens.clone()
    changed[0, 101:281] = (changed[0, 101:281] + 1) % 512
    position = (
        torch.stack([torch.cat([torch.arange(n) for n in row]) for row in PACKED]).int().cuda()
    )
    torch.use_deterministic_algorithms(True)
    try:
        seen = []
        for given in (tokens, changed):
            grads: list[torch.Tensor] = []
            handle = model.model.embed_tokens.register_forward_hook(
                lambda _m, _i, out, into=grads: out.register_hook(into.append) and None
            )
            hidden = model(given, position, mask(PACKED))
            hidden.float().square().sum().backward()
            handle.remove()
            seen.append((hidden.detach(), grads[0]))
    finally:
        torch.use_deterministic_algorithms(False)
    kept = torch.ones(3, T, dtype=torch.bool, device="cuda")
    kept[0, 101:281] = False
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one[kept], other[kept])
        assert not torch.equal(one[~kept], other[~kept])
