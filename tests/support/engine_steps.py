"""What the engine launches, for given tokens: logits of prompts in chunks, and of steps."""

from pathlib import Path
from typing import Any

import torch

from headway.infer.engine.device import EngineDevice
from headway.infer.engine.memory import build_cache
from headway.infer.engine.request import EngineOptions
from headway.infer.load import LoadedModel
from headway.model.base import Model
from headway.model.head_masks.masks import HeadMasks
from headway.model.paged_layer import PrefillPiece


@torch.inference_mode()
def engine_logits(
    model: Model,
    tokens: torch.Tensor,
    lengths: list[int],
    steps: int,
    *,
    chunk: int,
    masks: HeadMasks | None = None,
    **options: Any,
) -> list[torch.Tensor]:
    """Of each row, fp32 [lengths[row] + steps, V]: of its prompt, then of steps of all rows."""
    loaded = LoadedModel(model, model.config, None, Path(), masks=masks)
    rows = len(tokens)
    settings = EngineOptions(max_running=rows, page_tokens=16, prefix_reuse=False, **options)
    cache = build_cache(loaded, settings, tokens.shape[1])
    device = EngineDevice(loaded, cache, settings, model.config.vocab)
    logits_of_rows: list[list[torch.Tensor]] = [[] for _ in range(rows)]
    for row, length in enumerate(lengths):
        pages = [cache.pool.allocate() for _ in range(cache.shape.pages_per_slot)]
        cache.table.append(row, pages)
        cache.table.flush()
        for begin in range(0, length, chunk):
            end = min(begin + chunk, length)
            piece = PrefillPiece(row, begin, end - begin)
            hidden = device.prefill([piece], [tokens[row, begin:end].tolist()])
            logits_of_rows[row].append(device.logits(hidden))
    slots = list(range(rows))
    cache.set_length(slots, lengths)
    for step in range(steps):
        for row, length in enumerate(lengths):
            device.last_token[row] = tokens[row, length + step]
        # The next step overwrites these logits.
        logits = device.decode(slots, max(lengths) + step + 1).clone()
        for row in range(rows):
            logits_of_rows[row].append(logits[row : row + 1])
    return [torch.cat(parts) for parts in logits_of_rows]
