"""Pages and rings give the hidden states of a forward under explicit masks: packed pieces, then steps, under any masks and windows."""

import pytest
import torch
from support.dense_head_masks import masked_forward
from support.family_shapes import FAMILY_SHAPES
from support.initial_weights import initialize

from headway.kernels.cached_chunk import attend_streaming_reference, store_reference
from headway.kernels.paged_attention import paged_reference
from headway.model import paged_layer
from headway.model.base import Model, build_model
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.model.paged_cache import CacheShape, PagedCache
from headway.model.paged_layer import LayerPages, PrefillPiece

BASE = ModelConfig(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_size=48,
    vocab_size=320,
    max_seq_len=160,
    init_std=0.5,
)
LENGTHS = (37, 3, 90)
STEPS = 6
PAGE = 8
CASES: dict[str, tuple[ModelConfig, HeadMasks | None]] = {
    "dense": (BASE, None),
    "masks": (BASE, HeadMasks(((True, False), (False, False)), window=6, sinks=2)),
    "window": (BASE.with_(sliding_window=10), None),
    "both": (
        BASE.with_(sliding_window=20),
        HeadMasks(((True, False), (False, True)), window=6, sinks=3),
    ),
    "soft-capped": (
        BASE.with_(attention_softcap=2.0),
        HeadMasks(((True, False), (False, False)), window=6, sinks=2),
    ),
}
FAMILIES = {
    name: ModelConfig.model_validate({**BASE.model_dump(), **settings})
    for name, settings in FAMILY_SHAPES.items()
}
CASES |= {name: (config, None) for name, config in FAMILIES.items()}
CASES |= {f"{name} masks": (FAMILIES[name], CASES["masks"][1]) for name in ("gemma2", "gpt_oss")}


def build(config: ModelConfig) -> Model:
    model = build_model(config).eval().requires_grad_(False)
    initialize(model, 4)
    return model


def paged(
    model: Model, masks: HeadMasks | None, sequences: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Pieces of different sizes of all prompts, packed, then steps of all rows."""
    cache = PagedCache(
        CacheShape(model.config, masks, 160, PAGE, torch.float32),
        slots=4,
        pages=60,
        snapshots=2,
        device=torch.device("cpu"),
    )
    for row, tokens in enumerate(sequences):
        cache.table.append(
            row, [cache.pool.allocate() for _ in range(cache.table.num_pages(len(tokens)))]
        )
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    begin = [0, 0, 0]
    while begin != list(LENGTHS):
        pieces = [
            PrefillPiece(row, begin[row], min(length - begin[row], 11 + 5 * row))
            for row, length in enumerate(LENGTHS)
        ]
        pieces = [piece for piece in pieces if piece.count]
        tokens = torch.cat([sequences[piece.slot][piece.start : piece.end] for piece in pieces])
        position = torch.cat([torch.arange(piece.start, piece.end) for piece in pieces])
        hidden = model.cached_forward()(tokens[None], position[None], cache.prefill_batch(pieces))[
            0
        ]
        for piece_read, part in zip(
            pieces, hidden.split([piece.count for piece in pieces]), strict=True
        ):
            outputs[piece_read.slot].append(part)
            begin[piece_read.slot] = piece_read.end
    cache.table.flush()
    batch = cache.decode_batch(3)
    batch.slots.copy_(torch.arange(3))
    for step in range(STEPS):
        batch.most = max(LENGTHS) + step + 1
        positions = torch.tensor([length + step for length in LENGTHS])
        tokens = torch.stack(
            [
                sequence[position]
                for sequence, position in zip(sequences, positions.tolist(), strict=True)
            ]
        )
        hidden = model.cached_forward()(tokens[:, None], positions[:, None], batch)
        for row in range(3):
            outputs[row].append(hidden[row])
    return [torch.cat(parts) for parts in outputs]


@pytest.mark.parametrize("path", ["plain", "kernel"])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_the_masked_forward(
    name: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, masks = CASES[name]
    if path == "kernel":  # the layout that CUDA's kernels read, by their references
        monkeypatch.setattr(paged_layer, "attend_streaming", attend_streaming_reference)
        monkeypatch.setattr(paged_layer, "store", store_reference)
        monkeypatch.setattr(paged_layer, "uses_kernels", lambda q: True)
        monkeypatch.setattr(paged_layer, "paged_attention", paged_reference)
        monkeypatch.setattr(LayerPages, "step", LayerPages._step_cuda)
    model = build(config)
    generator = torch.Generator().manual_seed(3)
    sequences = [
        torch.randint(0, 320, (length + STEPS,), generator=generator) for length in LENGTHS
    ]
    with torch.inference_mode():
        for tokens, hidden in zip(sequences, paged(model, masks, sequences), strict=True):
            expected = masked_forward(model, tokens[None], masks)[0]
            assert (hidden - expected).abs().max() < 2e-5 * max(1.0, expected.abs().max())
