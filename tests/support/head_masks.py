"""The plainest form of head masks: a dense mask per query head, over whole documents, in fp32."""

import torch

from headway.kernels.attention import AttentionMask, causal_mask, visible
from headway.kernels.sinks import softmax
from headway.model.head_masks.masks import HeadMasks
from headway.model.transformer import Block, Transformer


def masked_forward(model: Transformer, ids: torch.Tensor, masks: HeadMasks) -> torch.Tensor:
    """Hidden states [B,T,D] of rows that are one document each, every head under its own mask."""
    assert masks.window is not None and masks.sinks is not None
    rows, length = ids.shape
    at = torch.arange(length)
    distance = at[:, None] - at[None, :]
    streaming = (distance < masks.window) | (at[None, :] < masks.sinks)
    kept = {}
    for layer, block in enumerate(model.model.layers.values()):
        assert isinstance(block, Block)
        kept[block] = block.core
        full = torch.tensor(masks.full[layer])[:, None, None]

        def core(
            q, k, v, mask: AttentionMask, *, window=None, full=full, rule=block.rule
        ) -> torch.Tensor:
            seen = visible(mask, window)[:, None] & (full | streaming)[None]
            groups = q.shape[2] // k.shape[2]
            k, v, seen = (
                k.repeat_interleave(groups, 2),
                v.repeat_interleave(groups, 2),
                seen.repeat_interleave(groups, 1),
            )
            scores = rule(torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5)
            sinks = None if rule.sinks is None else rule.sinks[:, None, None]
            return torch.einsum(
                "bhts,bshd->bthd", softmax(scores.masked_fill(~seen, -torch.inf), sinks), v
            )

        block.core = core
    hidden = model(ids, at.expand(rows, -1), causal_mask(rows, length))
    for block, core in kept.items():
        block.core = core
    return hidden
