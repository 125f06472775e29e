"""Rows of a cache have lengths of their own and are given and returned; a sequence in one is what it is alone."""

import pytest
import torch
from support.cache_rows import largest_gap, make_sequences, serve
from support.head_masks import masked_forward

from headway.infer.prefill import last_hidden
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.init import initialize
from headway.model.kv_cache import KVCache
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
FULL = HeadMasks(((True,) * 4,) * 3, 9, 3)
MIXED = HeadMasks(((True, False, False, True), (False,) * 4, (False, True, True, True)), 9, 3)
STREAMING = HeadMasks(((False,) * 4,) * 3, 8, 0)
SHAPES = [
    (17, 14, 0),
    (5, 30, 0),
    (1, 3, 1),
    (40, 6, 2),
    (2, 25, 3),
    (23, 9, 8),
    (3, 1, 9),
    (11, 20, 9),
    (1, 1, 30),
]
"""(prompt, new tokens, step of arrival): nine sequences in three rows."""


def build(config: ModelConfig = CONFIG) -> Transformer:
    model = Transformer(config)
    initialize(model, 1)
    return model.requires_grad_(False)


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize(
    ("config", "masks"),
    [
        (CONFIG, None),
        (CONFIG, MIXED),
        (CONFIG, STREAMING),
        (CONFIG.with_(sliding_window=7, window_layers=(0, 2)), None),
        (CONFIG.with_(sliding_window=12, window_layers=(0, 1)), MIXED),
    ],
    ids=["full", "mixed", "streaming", "windowed", "windowed and mixed"],
)
def test_sequences_that_come_and_go_are_those_computed_alone(
    config: ModelConfig, masks: HeadMasks | None, chunk: int
) -> None:
    model, sequences = build(config), make_sequences(SHAPES, 96)
    cache = KVCache(config, 3, 46, device="cpu", dtype=torch.float32, masks=masks)
    with torch.inference_mode():
        rows = serve(model, cache, sequences, chunk=chunk)
        gap = largest_gap(
            sequences, lambda ids: model.logits(masked_forward(model, ids[None], masks or FULL)[0])
        )
    assert gap < 1e-4
    assert set(rows) == {0, 1, 2} and len(rows) == 9, "rows are given again"


def test_a_row_that_ended_in_nan_leaves_nothing_behind() -> None:
    model, sequences = build(), make_sequences(SHAPES, 96)
    cache = KVCache(CONFIG, 3, 46, device="cpu", dtype=torch.float32, masks=MIXED)
    with torch.inference_mode():
        serve(model, cache, sequences, chunk=4, poison=True)
        assert (
            largest_gap(
                sequences, lambda ids: model.logits(masked_forward(model, ids[None], MIXED)[0])
            )
            < 1e-4
        )
    assert all(not buffer.any() for layer in cache.layers for buffer in (layer.keys, layer.values))


@pytest.mark.parametrize("rows", [[2, 0], [1, 2], [3]])
def test_prompts_are_read_into_chosen_rows_alone(rows: list[int]) -> None:
    model, lengths = build(), [21, 9][: len(rows)]
    ids = torch.randint(0, 96, (len(rows), 30), generator=torch.Generator().manual_seed(3))
    cache = KVCache(CONFIG, 4, 40, device="cpu", dtype=torch.float32, masks=MIXED)
    batch = cache.select(rows, lengths)
    last = last_hidden(model, ids[:, :21], lengths, batch, 6)
    assert (
        cache.host_lengths
        == [lengths[rows.index(row)] if row in rows else 0 for row in range(4)]
        == cache.lengths.tolist()
    )
    for at in range(2):  # single tokens in these rows alone
        for index, length in enumerate(lengths):
            alone = masked_forward(model, ids[index : index + 1, : length + at], MIXED)[0, -1]
            assert (last[index] - alone).abs().max() < 1e-5
        position = torch.tensor([[length + at] for length in lengths])
        last = model(ids.gather(1, position), position, None, batch)[:, 0]
    untouched = [row for row in range(4) if row not in rows]
    fresh = KVCache(CONFIG, 4, 40, device="cpu", dtype=torch.float32, masks=MIXED)
    for layer, old in zip(cache.layers, fresh.layers, strict=True):
        for group in layer.groups:
            for view, empty in zip(layer.views(group), old.views(group), strict=True):
                assert torch.equal(view[:, untouched], empty[:, untouched])


def test_rows_are_given_once_and_a_prompt_begins_in_an_empty_one() -> None:
    model, cache = build(), KVCache(CONFIG, 2, 8, device="cpu", dtype=torch.float32)
    assert (cache.num_free, cache.allocate(), cache.allocate(), cache.num_free) == (2, 0, 1, 0)
    with pytest.raises(AssertionError, match="num_free"):
        cache.allocate()
    last_hidden(model, torch.zeros(1, 5, dtype=torch.int64), [5], cache.select([1], [5]), 5)
    with pytest.raises(AssertionError, match="empty row"):
        cache.select([1], [3])
    cache.release(1)
    with pytest.raises(AssertionError):
        cache.release(1)
    assert (cache.num_free, cache.allocate(), cache.lengths.tolist()) == (1, 1, [0, 0])
