"""Rows in a paged cache: chunks and steps are the masked forward; heads that forget store little."""

import pytest
import torch
from support.dense_head_masks import masked_forward
from support.engine_steps import engine_logits
from support.initial_weights import initialize

from headway.errors import ConfigError
from headway.kernels.attention import ScoreRule
from headway.model import ring_prefill
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.paged_rows import PAGE_TOKENS, PagedRows
from headway.model.ring_prefill import RingHeads
from headway.model.transformer import Transformer

CONFIG = ModelConfig(
    hidden_size=32,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    ffn_size=48,
    vocab_size=96,
    max_seq_len=256,
    init_std=0.3,
)
T = 61
SPLITS = {
    "all full": ((1, 1, 1, 1),) * 3,
    "all streaming": ((0, 0, 0, 0),) * 3,
    "mixed": ((1, 0, 0, 1), (0, 0, 0, 0), (0, 1, 1, 1)),
    "one head": ((0, 1, 0, 0), (1, 1, 1, 1), (0, 0, 0, 1)),
}


def build(config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config)
    initialize(model, 1)
    return model.requires_grad_(False)


def masks(split: str, window: int = 9, sinks: int = 3) -> HeadMasks:
    return HeadMasks(
        tuple(tuple(bool(full) for full in row) for row in SPLITS[split]), window, sinks
    )


def ids(rows: int, length: int = T) -> torch.Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("window", "sinks"), [(9, 3), (8, 0), (1, 1), (64, 16)])
@pytest.mark.parametrize("chunk", [7, 16, 40])
def test_chunks_and_steps_equal_the_masked_forward(
    split: str, window: int, sinks: int, chunk: int
) -> None:
    model = build()
    chosen = masks(split, window, sinks)
    tokens = ids(2)
    rows = PagedRows(model, 2, T, masks=chosen)
    parts = [rows.read(part) for part in tokens[:, : T - 20].split(chunk, dim=1)]
    # Steps, and several tokens at once behind them.
    parts += [rows.step(tokens[:, position])[:, None] for position in range(T - 20, T - 8)]
    parts.append(rows.read(tokens[:, T - 8 : T - 2]))
    parts += [rows.step(tokens[:, position])[:, None] for position in range(T - 2, T)]
    assert rows.length == T
    assert (torch.cat(parts, 1) - masked_forward(model, tokens, chosen)).abs().max() < 2e-5


@pytest.mark.parametrize("model_window", [5, 12, 200])
@pytest.mark.parametrize(
    "prompt", [40, 8]
)  # after 8 tokens, single steps leave the sinks of a window of 12 behind
def test_the_models_own_window_and_masks_hold_together(model_window: int, prompt: int) -> None:
    model = build(CONFIG.with_(sliding_window=model_window, window_layers=(0, 2)))
    chosen = masks("mixed")
    tokens = ids(2)
    rows = PagedRows(model, 2, T, masks=chosen)
    parts = [rows.read(part) for part in tokens[:, :prompt].split(13, dim=1)]
    parts += [rows.step(tokens[:, position])[:, None] for position in range(prompt, T)]
    assert (torch.cat(parts, 1) - masked_forward(model, tokens, chosen)).abs().max() < 3e-5


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("split", ["mixed", "all streaming"])
def test_rows_of_different_length_share_a_sparse_cache(split: str, chunk: int) -> None:
    model = build()
    chosen = masks(split)
    tokens = ids(4)
    lengths = [40, 3, 17, 1]
    decoded = engine_logits(model, tokens, lengths, 14, chunk=chunk, masks=chosen)
    for row, logits in enumerate(decoded):
        alone = masked_forward(model, tokens[row : row + 1, : lengths[row] + 14], chosen)
        assert (logits - model.logits(alone[0])).abs().max() < 1e-4


def test_streaming_heads_store_sinks_window_and_a_page_to_spare() -> None:
    shape = CacheShape(CONFIG, masks("mixed"), 200, 8, torch.float32)
    full = 5
    streaming = 7
    position = 2 * 4 * CONFIG.head_size
    assert shape.page_bytes == position * full * 8
    assert shape.state_bytes == position * streaming * (3 + 9 + 8)
    assert CacheShape(CONFIG, None, 200, 8, torch.float32).page_bytes == position * 12 * 8
    windowed = CacheShape(CONFIG.with_(sliding_window=16), None, 200, 8, torch.float32)
    assert (windowed.page_bytes, windowed.state_bytes) == (0, position * 12 * (16 + 8))
    rows = PagedRows(build(), 2, 200, masks=masks("mixed"))
    shape = rows.cache.shape
    assert rows.cache.num_bytes == 2 * (4 * shape.page_bytes + shape.state_bytes)


def test_a_streaming_prefill_never_allocates_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0
    plain = ring_prefill.dense

    def watched(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, k.shape[1])
        return plain(q, k, v, seen, rule)

    monkeypatch.setattr(ring_prefill, "dense", watched)
    rows = PagedRows(build(), 1, 240, masks=masks("all streaming"))
    for part in ids(1, 240).split(16, dim=1):
        rows.read(part)
    assert longest == 12 + PAGE_TOKENS + 16


def test_heads_with_room_for_everything_are_full_heads() -> None:
    def groups(context: int, chosen: HeadMasks) -> tuple[tuple[int, ...], list[RingHeads]]:
        return CacheShape(CONFIG, chosen, context, 8, torch.float32).groups(0)

    assert groups(12, masks("mixed")) == ((0, 1, 2, 3), [])
    assert groups(13, masks("mixed")) == ((0, 3), [RingHeads((1, 2), 3, 17, 9, None)])
    unsaid = HeadMasks(masks("mixed").full)
    assert groups(5000, unsaid) == ((0, 3), [RingHeads((1, 2), 128, 1032, 1024, None)])


@pytest.mark.parametrize("split", ["all full", "mixed"])
def test_a_page_that_ended_in_nan_leaves_nothing_behind(split: str) -> None:
    """A sequence takes pages and rings in which another one left numbers that are not finite."""
    model = build()
    chosen = masks(split)
    tokens = ids(1)
    rows = PagedRows(model, 1, T, masks=chosen)
    for layer in rows.cache.layers.values():
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    for page in range(rows.cache.pool.num_pages):
        rows.cache.clear_page(page)
    parts = [rows.read(tokens[:, :30])]
    parts += [rows.step(tokens[:, position])[:, None] for position in range(30, T)]
    assert (torch.cat(parts, 1) - masked_forward(model, tokens, chosen)).abs().max() < 1e-5


def test_a_paged_cache_refuses_masks_of_another_model() -> None:
    wrong = HeadMasks(((True,) * 4,), 4, 1)
    with pytest.raises(ConfigError, match="masks holds 1 layers of 4 KV heads"):
        PagedRows(build(), 1, 8, masks=wrong)
    shape = CacheShape(CONFIG, wrong, 8, 8, torch.float32)
    with pytest.raises(ConfigError, match="masks holds 1 layers of 4 KV heads"):
        PagedCache(shape, slots=1, pages=1, snapshots=0, device=torch.device("cpu"))
