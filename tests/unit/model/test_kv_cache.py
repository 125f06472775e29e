"""The cache: heads that forget hold their slots and no more, and decoding from it is the forward under the same masks."""

import pytest
import torch
from support.head_masks import masked_forward

from headway.errors import ConfigError
from headway.infer.prefill import chunks, last_hidden
from headway.kernels.attention import ScoreRule
from headway.kernels.cached_chunk import attend_streaming_reference, store_reference
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.init import initialize
from headway.model.kv_cache import KVCache
from headway.model.kv_layer import CachedHeads, group_heads
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


def new_cache(model: Transformer, rows: int, slots: int, **more) -> KVCache:
    return KVCache(model.config, rows, slots, device="cpu", dtype=torch.float32, **more)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("window", "sinks"), [(9, 3), (8, 0), (1, 1), (64, 16)])
@pytest.mark.parametrize("chunk", [7, 16, 40])
def test_chunked_prefill_and_decode_equal_the_masked_forward(
    split: str, window: int, sinks: int, chunk: int
) -> None:
    model, given = build(), masks(split, window, sinks)
    tokens = ids(2)
    expected = masked_forward(model, tokens, given)
    cache = new_cache(model, 2, T, masks=given, prompt_lengths=[T - 20, T - 20])
    found = list(chunks(model, tokens[:, : T - 20], cache, chunk))
    for at in range(T - 20, T):
        found.append(model(tokens[:, at : at + 1], torch.full((2, 1), at), None, cache))
    assert (torch.cat(found, 1) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("window", "sinks", "chunk"), [(9, 3, 7), (8, 0, 16), (64, 16, 40)])
def test_the_way_of_cuda_through_a_chunk_equals_the_plain_one(
    split: str, window: int, sinks: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, lengths = build(), ids(2), [T, T - 20]
    given = masks(split, window, sinks)
    caches = [new_cache(model, 2, T, masks=given, prompt_lengths=lengths) for _ in range(2)]
    expected = list(chunks(model, tokens, caches[0], chunk))
    monkeypatch.setattr("headway.model.kv_cache.attend_streaming", attend_streaming_reference)
    monkeypatch.setattr("headway.model.kv_cache.store", store_reference)
    cuda = caches[1]
    monkeypatch.setattr(
        cuda, "attend", lambda layer, *given: cuda._attend_cuda(cuda.layers[layer], *given)
    )
    found = list(chunks(model, tokens, cuda, chunk))
    for row, length in enumerate(lengths):
        assert (
            torch.cat(found, 1)[row, :length] - torch.cat(expected, 1)[row, :length]
        ).abs().max() < 1e-5
    for one, other in zip(cuda.layers, caches[0].layers, strict=True):
        assert torch.allclose(one.keys, other.keys, atol=1e-5) and torch.allclose(
            one.values, other.values, atol=1e-5
        )


@pytest.mark.parametrize("chunk", [1, 5, 16, 64])
@pytest.mark.parametrize("split", ["mixed", "all streaming"])
def test_rows_of_different_length_share_a_sparse_cache(split: str, chunk: int) -> None:
    model, given = build(), masks(split)
    tokens = ids(4)
    lengths = [40, 3, 17, 1]
    cache = new_cache(model, 4, T, masks=given, prompt_lengths=lengths)
    last = last_hidden(model, tokens[:, :40], lengths, cache, chunk)
    at = torch.tensor(lengths)
    for _ in range(14):
        for row in range(4):
            alone = masked_forward(model, tokens[row : row + 1, : at[row]], given)
            assert (last[row] - alone[0, -1]).abs().max() < 1e-5
        last = model(tokens.gather(1, at[:, None]), at[:, None], None, cache)[:, 0]
        at = at + 1


@pytest.mark.parametrize("own", [5, 12, 200])
@pytest.mark.parametrize(
    "prompt", [40, 8]
)  # after 8 tokens, single steps leave the sinks of a window of 12 behind
def test_the_models_own_window_and_masks_hold_together(own: int, prompt: int) -> None:
    model, given = build(CONFIG.with_(sliding_window=own, window_layers=(0, 2))), masks("mixed")
    tokens = ids(2)
    expected = masked_forward(model, tokens, given)
    cache = new_cache(model, 2, T, masks=given, prompt_lengths=[prompt, prompt])
    found = list(chunks(model, tokens[:, :prompt], cache, 13))
    for at in range(prompt, T):
        found.append(model(tokens[:, at : at + 1], torch.full((2, 1), at), None, cache))
    assert (torch.cat(found, 1) - expected).abs().max() < 3e-5


def test_several_tokens_after_uneven_rows_equal_one_at_a_time() -> None:
    model, given = build(), masks("mixed")
    tokens, lengths = ids(2), [30, 11]
    at = torch.tensor(lengths)[:, None] + torch.arange(6)
    results = []
    for together in (True, False):
        cache = new_cache(model, 2, T, masks=given, prompt_lengths=lengths)
        last_hidden(model, tokens[:, :30], lengths, cache, 8)
        if together:
            results.append(model(tokens.gather(1, at), at, None, cache))
        else:
            steps = [
                model(tokens.gather(1, at[:, i : i + 1]), at[:, i : i + 1], None, cache)
                for i in range(6)
            ]
            results.append(torch.cat(steps, 1))
    assert (results[0] - results[1]).abs().max() < 1e-5


def test_streaming_heads_hold_sinks_and_window_and_nothing_more() -> None:
    model = build()
    rows, slots, width = 2, 200, CONFIG.head_size
    given = masks("mixed", 9, 3)
    cache = new_cache(model, rows, slots, masks=given)
    full, total = given.num_full, 12
    assert cache.num_bytes == 2 * 4 * rows * width * (full * slots + (total - full) * 12)
    dense_bytes = new_cache(model, rows, slots).num_bytes
    assert dense_bytes == 2 * 4 * rows * width * total * slots
    share = given.sparsity
    assert cache.num_bytes / dense_bytes == pytest.approx((1 - share) + share * 12 / slots)
    windowed = KVCache(
        CONFIG.with_(sliding_window=16), rows, slots, device="cpu", dtype=torch.float32
    )
    assert windowed.num_bytes * slots == dense_bytes * 16


def test_a_streaming_prefill_never_allocates_the_past(monkeypatch: pytest.MonkeyPatch) -> None:
    import headway.model.kv_layer as module

    longest = 0
    plain = module.dense

    def watched(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, rule: ScoreRule
    ) -> torch.Tensor:
        nonlocal longest
        longest = max(longest, k.shape[1])
        return plain(q, k, v, seen, rule)

    monkeypatch.setattr(module, "dense", watched)
    model, given = build(), masks("all streaming")
    cache = new_cache(model, 1, 240, masks=given, prompt_lengths=[240])
    for _ in chunks(model, ids(1, 240), cache, 16):
        pass
    assert longest == 12 + 16
    assert all(group.capacity == 12 for layer in cache.layers for group in layer.groups)


def test_heads_with_room_for_everything_are_full_heads() -> None:
    assert group_heads(CONFIG, 0, 12, masks("mixed")) == [
        CachedHeads((0, 1, 2, 3), 0, 12, None, True)
    ]
    assert group_heads(CONFIG, 0, 13, masks("mixed")) == [
        CachedHeads((0, 3), 0, 13, None, True),
        CachedHeads((1, 2), 3, 9, None, False),
    ]
    assert [
        group.capacity for group in group_heads(CONFIG, 0, 5000, HeadMasks(masks("mixed").full))
    ] == [5000, 1152]


def test_masks_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="masks holds 1 layers of 4 KV heads"):
        new_cache(build(), 1, 8, masks=HeadMasks(((True,) * 4,), 4, 1))
