"""The Transformer: documents stay apart, a cache changes nothing, its halves compile once, every switch does what it says."""

import pytest
import torch
from support.engine_steps import engine_logits
from support.initial_weights import initialize

from headway.kernels.attention import AttentionMask, attend, causal_mask, mask_of
from headway.model.config import ModelConfig
from headway.model.paged_rows import PagedRows
from headway.model.rope import Rotation, inverse_frequencies, rotate
from headway.model.transformer import Block, Transformer

SMALL = ModelConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=96,
    init_std=0.3,
)
VARIANTS = {
    "plain": SMALL,
    "windows": SMALL.with_(sliding_window=5, window_layers=(1,)),
    "rotation off": SMALL.with_(no_rope_layers=(0, 2), qk_norm=True),
    "layernorm biases": SMALL.with_(
        norm="layernorm", qkv_bias=True, output_bias=True, ffn_bias=True, tie_embeddings=False
    ),
}
# The compiler looks at .grad of everything it is given and lets torch warn about it.
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
LENGTHS = [7, 1, 12, 4]
T = sum(LENGTHS)


def build(config: ModelConfig, *, compiled: bool = False, backend: str = "auto") -> Transformer:
    model = Transformer(config)
    initialize(model, 1)
    for block in model.model.layers.values():
        assert isinstance(block, Block)
        block.core = lambda q, k, v, mask, *, window=None: attend(
            q, k, v, mask, window=window, backend=backend
        )
        if compiled:
            for half in ("pre_attention", "post_attention"):
                setattr(
                    block,
                    half,
                    torch.compile(
                        getattr(block, half), fullgraph=True, dynamic=False, backend="aot_eager"
                    ),
                )
    return model


def tokens(length: int = T, rows: int = 1, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(seed))


def packed() -> tuple[torch.Tensor, AttentionMask]:
    """Position and mask of one row that holds documents of LENGTHS."""
    from headway.data.batch import Batch

    position = torch.cat([torch.arange(n) for n in LENGTHS])[None].int()
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))[
        None
    ].int()
    bounds = torch.tensor([[0, *torch.tensor(LENGTHS).cumsum(0).tolist(), T, T]], dtype=torch.int32)
    zero = torch.zeros(1, T, dtype=torch.int64)
    return position, mask_of(
        Batch(
            zero, zero, zero.float(), position, document, torch.zeros(1, dtype=torch.int32), bounds
        )
    )


def plain(model: Transformer, ids: torch.Tensor) -> torch.Tensor:
    rows, length = ids.shape
    return model.logits(
        model(ids, torch.arange(length).expand(rows, -1), causal_mask(rows, length))
    )


@pytest.mark.parametrize("case", VARIANTS)
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_packed_documents_give_the_logits_they_give_alone(case: str, backend: str) -> None:
    model = build(VARIANTS[case], backend=backend)
    ids = tokens()
    together = model.logits(model(ids, *packed()))
    start = 0
    for length in LENGTHS:
        alone = plain(model, ids[:, start : start + length])
        assert (together[:, start : start + length] - alone).abs().max() < 1e-5
        start += length


@compiles
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("case", ["plain", "windows"])
def test_changing_a_document_leaves_logits_and_gradients_of_its_neighbours_bit_equal(
    case: str, backend: str, compiled: bool
) -> None:
    torch._dynamo.reset()
    model = build(VARIANTS[case], compiled=compiled, backend=backend)
    results = []
    for seed in (3, 4):
        ids = tokens()
        ids[0, 8:20] = tokens(seed=seed + 40)[0, 8:20]
        kept: list[torch.Tensor] = []
        hook = model.model.embed_tokens.register_forward_hook(
            lambda _m, _i, out, kept=kept: kept.append(out) or out.retain_grad()
        )
        logits = model.logits(model(ids, *packed()))
        logits.square().sum().backward()
        hook.remove()
        results.append((logits.detach(), kept[0].grad))
    for a, b in zip(*results, strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a[0, :8], b[0, :8])
        assert torch.equal(a[0, 20:], b[0, 20:])
        assert not torch.equal(a[0, 8:20], b[0, 8:20])


@compiles
def test_compiled_halves_are_two_graphs_for_all_layers_and_change_nothing() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = build(SMALL)
    compiled = build(SMALL, compiled=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        logits = plain(compiled, tokens())
        logits.sum().backward()
        compiled.zero_grad()
        plain(compiled, tokens(seed=8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert (logits - plain(eager, tokens())).abs().max() < 1e-5


@pytest.mark.parametrize("case", VARIANTS)
def test_reading_rows_in_parts_with_a_paged_cache_equals_one_forward(case: str) -> None:
    model = build(VARIANTS[case])
    ids = tokens(20, rows=2)
    expected = plain(model, ids)
    rows = PagedRows(model, 2, 20)
    with torch.inference_mode():
        parts = [rows.read(part) for part in ids.split((9, 1, 4, 1, 5), dim=1)]
        assert (model.logits(torch.cat(parts, 1)) - expected).abs().max() < 1e-5


def test_rows_of_different_length_share_a_cache() -> None:
    model = build(VARIANTS["windows"])
    ids = tokens(14, rows=2)
    lengths = [8, 3]
    decoded = engine_logits(model, ids, lengths, 5, chunk=8)
    for row, logits in enumerate(decoded):
        alone = plain(model, ids[row : row + 1, : lengths[row] + 5])[0]
        assert (logits - alone).abs().max() < 1e-5


def test_layers_without_rotation_do_not_see_positions() -> None:
    model = build(SMALL.with_(no_rope_layers=(0, 1, 2)))
    ids = tokens()
    mask = causal_mask(1, T)
    far = torch.arange(T)[None] * 7 + 100
    assert torch.equal(model(ids, torch.arange(T)[None], mask), model(ids, far, mask))
    turned = build(SMALL.with_(no_rope_layers=(0, 1)))
    assert not torch.equal(turned(ids, torch.arange(T)[None], mask), turned(ids, far, mask))


def test_rotation_keeps_lengths_and_only_differences_of_position_count() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=generator)
    turn = Rotation(SMALL)

    def product(i: int, j: int) -> torch.Tensor:
        (cos_q, sin_q) = turn(torch.tensor([[i]]))
        (cos_k, sin_k) = turn(torch.tensor([[j]]))
        return (rotate(q, cos_q, sin_q) * rotate(k, cos_k, sin_k)).sum()

    assert product(9, 4).item() == pytest.approx(product(105, 100).item(), abs=1e-5)
    assert rotate(q, *turn(torch.tensor([[17]]))).norm().item() == pytest.approx(
        q.norm().item(), abs=1e-5
    )


def test_frequencies_stay_fp32_through_meta_and_casts() -> None:
    with torch.device("meta"):
        model = Transformer(SMALL)
    model = model.bfloat16().to_empty(device="cpu")
    assert torch.equal(model.rotation.frequencies, inverse_frequencies(SMALL))
    cos, _ = model.rotation(torch.tensor([[100_000]]))
    assert cos.dtype == torch.float32
    initialize(model, 0)
    assert plain(model, tokens()).dtype == torch.bfloat16


def test_the_embeddings_gradient_is_scaled_and_its_value_is_not() -> None:
    grads = []
    for share in (1.0, 0.25):
        model = build(SMALL.with_(embed_grad_scale=share, tie_embeddings=False))
        out = plain(model, tokens())
        out.sum().backward()
        grads.append((out, model.model.embed_tokens.weight.grad))
    assert torch.allclose(grads[0][0], grads[1][0], atol=1e-5)
    assert torch.allclose(grads[0][1] * 0.25, grads[1][1], atol=1e-5)


def test_dropout_acts_in_training_alone() -> None:
    model = build(SMALL.with_(dropout=0.5))
    torch.manual_seed(0)
    assert not torch.equal(plain(model, tokens()), plain(model, tokens()))
    model.eval()
    assert torch.equal(plain(model, tokens()), plain(model, tokens()))
    assert torch.equal(plain(model, tokens()), plain(build(SMALL), tokens()))


def test_tied_models_have_one_matrix_and_untied_two() -> None:
    tied = build(SMALL)
    untied = build(SMALL.with_(tie_embeddings=False))
    assert tied.head_weight is tied.model.embed_tokens.weight
    assert "lm_head.weight" not in tied.state_dict()
    assert untied.lm_head is not None
    assert untied.head_weight is untied.lm_head.weight


def test_a_swapped_core_is_what_a_block_calls() -> None:
    model = build(SMALL)
    windows: list[int | None] = []

    def core(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: AttentionMask,
        *,
        window: int | None = None,
    ) -> torch.Tensor:
        windows.append(window)
        return attend(q, k, v, mask, window=window)

    for block in model.model.layers.values():
        assert isinstance(block, Block)
        block.core = core
    plain(model, tokens())
    assert windows == [None] * 3
