"""Prompts go through a model a chunk at a time, so that streaming heads never hold more than their capacity and one chunk.

tokens [B, T]   |chunk 0|chunk 1|chunk 2|      each chunk sees what the cache stores of those before it
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from headway.model.base import Model
from headway.model.kv_cache import KVCache
from headway.model.projector import MediaTensors

CHUNK_TOKENS = 4096


def chunks(
    model: Model,
    tokens: torch.Tensor,
    cache: KVCache,
    chunk_tokens: int = CHUNK_TOKENS,
    media: MediaTensors | None = None,
) -> Iterator[torch.Tensor]:
    """Hidden states [B, up to chunk_tokens, D] of tokens [B,T], which are added to an empty cache."""
    rows, length = tokens.shape
    for begin in range(0, length, chunk_tokens):
        end = min(begin + chunk_tokens, length)
        position = torch.arange(begin, end, device=tokens.device).expand(rows, -1)
        yield model.prefill(
            tokens[:, begin:end], position, cache, None if media is None else media.at(begin, end)
        )


def last_hidden(
    model: Model,
    tokens: torch.Tensor,
    lengths: list[int],
    cache: KVCache,
    chunk_tokens: int,
    media: MediaTensors | None = None,
) -> torch.Tensor:
    """[B,D]: the hidden state of each row's last token before its padding."""
    at = torch.tensor(lengths, device=tokens.device) - 1
    found: torch.Tensor | None = None
    begin = 0
    for hidden in chunks(model, tokens, cache, chunk_tokens, media):
        inside = (at - begin).clamp(0, hidden.shape[1] - 1)
        here = hidden[torch.arange(len(lengths), device=at.device), inside]
        found = here if found is None else torch.where((at >= begin)[:, None], here, found)
        begin += hidden.shape[1]
    assert found is not None
    return found
