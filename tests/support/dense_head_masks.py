"""The plainest form of head masks: a dense mask per query head, over whole documents, in fp32."""

import torch

from headway.kernels.attention import AttentionMask, causal_mask, visible
from headway.kernels.sinks import softmax
from headway.model.base import Model
from headway.model.head_masks.masks import HeadMasks
from headway.model.projector import MediaTensors
from headway.model.transformer import Block, Transformer
from headway.model.vision import PictureTensors


def masked_forward(
    model: Model,
    ids: torch.Tensor,
    masks: HeadMasks | None,
    media: MediaTensors | PictureTensors | None = None,
) -> torch.Tensor:
    """Hidden states [B,T,D] of rows that are one document each, every head under its own mask.

    Without masks every head sees what its layer's window shows. No cache takes part."""
    assert isinstance(model, Transformer)
    rows, length = ids.shape
    position = torch.arange(length)
    if masks is None:
        streaming = torch.ones(length, length, dtype=torch.bool)
    else:
        assert masks.window is not None
        assert masks.sinks is not None
        distance = position[:, None] - position[None, :]
        streaming = (distance < masks.window) | (position[None, :] < masks.sinks)
    kept = {}
    for layer, block in enumerate(model.model.layers.values()):
        assert isinstance(block, Block)
        if block.stateful is not None:
            continue  # no heads to mask: its own core, over the whole document
        kept[block] = block.core
        full = torch.zeros(1, 1, 1, dtype=torch.bool)
        if masks is not None:
            full = torch.tensor(masks.full[layer])[:, None, None]

        def core(
            q, k, v, mask: AttentionMask, *, window=None, full=full, rule=block.rule
        ) -> torch.Tensor:
            seen = visible(mask, window)[:, None] & (full | streaming)[None]
            groups = q.shape[2] // k.shape[2]
            seen = seen.expand(-1, k.shape[2], -1, -1)
            k = k.repeat_interleave(groups, 2)
            v = v.repeat_interleave(groups, 2)
            seen = seen.repeat_interleave(groups, 1)
            scores = rule(torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5)
            sinks = None if rule.sinks is None else rule.sinks[:, None, None]
            return torch.einsum(
                "bhts,bshd->bthd", softmax(scores.masked_fill(~seen, -torch.inf), sinks), v
            )

        block.core = core
    hidden = model(ids, position.expand(rows, -1), causal_mask(rows, length), media=media)
    for block, core in kept.items():
        block.core = core
    return hidden
