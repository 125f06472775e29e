"""One rank's part of a model that several ranks share: a group of ranks and weights in, its
matrices and the heads of its cache out.

    model     heads, feed-forward and vocabulary are split as in training (parallel/tensor.py);
              hidden states and logits are whole
    cache     each rank stores its KV heads. Slots and pages are counted by the rank that needs most
              bytes, so that all count the same
    tokens    what was drawn by chance is the first rank's draw on every rank
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headway.errors import ConfigError
from headway.infer.engine.request import EngineOptions
from headway.model.base import Model
from headway.model.config import ModelConfig
from headway.model.head_masks.masks import HeadMasks
from headway.optim.adamw import Config as AdamW
from headway.parallel.collectives import RankGroup, form_groups
from headway.parallel.config import ParallelConfig
from headway.parallel.engine import EngineSpec
from headway.parallel.layouts import Layout, LayoutShape, broken_tensor
from headway.parallel.mesh import Mesh
from headway.parallel.tensor import build_frozen_part, local_heads
from headway.tasks.next_token import Config as NextToken

if TYPE_CHECKING:
    from headway.infer.engine.ranks import Followers


@dataclass(frozen=True)
class ModelPart:
    """Which ranks share the layers, and which of them this one is."""

    group: RankGroup
    followers: Followers | None = None
    """The other ranks, on the first one where it has started them."""

    def heads(
        self, config: ModelConfig, masks: HeadMasks | None
    ) -> list[tuple[ModelConfig, HeadMasks | None]]:
        """The KV heads that each rank stores, as the shape of a model of these alone, and their
        masks."""
        parts: list[tuple[ModelConfig, HeadMasks | None]] = []
        for rank in range(self.group.size):
            rank_heads = local_heads(config, RankGroup(rank, self.group.size))
            linear = config.linear_attention
            if linear is not None:
                linear = linear.model_copy(
                    update={
                        "key_heads": linear.key_heads // self.group.size,
                        "value_heads": linear.value_heads // self.group.size,
                    }
                )
            short = config.short_convolution
            if short is not None:
                short = short.model_copy(update={"channels": config.convolved // self.group.size})
            space = config.state_space
            if space is not None:
                # One group alone is whole on every rank.
                groups = max(1, space.groups // self.group.size)
                heads = space.heads // self.group.size
                space = space.model_copy(update={"heads": heads, "groups": groups})
            local_config = config.with_(
                num_heads=config.num_heads // self.group.size,
                num_kv_heads=len(range(config.kv_heads)[rank_heads]),
                head_dim=config.head_size,
                linear_attention=linear,
                short_convolution=short,
                state_space=space,
            )
            local_masks = None
            if masks is not None:
                local_masks = replace(masks, full=tuple(row[rank_heads] for row in masks.full))
            parts.append((local_config, local_masks))
        return parts

    def least(self, value: int) -> int:
        """The smallest of the ranks' numbers."""
        # Groups have a maximum only.
        return -self.group.max(-value)

    def agree(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first rank's tokens, on every rank: kernels that draw may round differently from GPU
        to GPU."""
        self.group.broadcast(tokens, 0).wait()
        return tokens

    def check(self, options: EngineOptions, adapters: Mapping[str, Path]) -> None:
        """Refuse what an engine on several ranks cannot do."""
        several = f"--tensor is {self.group.size}"
        if adapters:
            raise ConfigError(
                f"{several} and adapters are loaded; they are chosen per request on one rank "
                "only. Merge one: `export hf`."
            )
        if options.speculation is not None and options.speculation.draft is not None:
            raise ConfigError(
                f"{several} and --speculate is {options.speculation.draft}; ranks share no draft "
                "model. Use ngram."
            )
        if options.record is True:
            raise ConfigError(
                f"{several} and record is true; steps that exchange between ranks are not "
                "recorded. Use auto."
            )


def check_part(config: ModelConfig, size: int) -> None:
    """Refuse a model that cannot be shared by so many ranks."""
    if config.hf_config is not None:
        raise ConfigError(
            f"--tensor is {size} and the model is of family transformers, whose layers headway "
            "cannot divide. Leave it out."
        )
    if config.media is not None:
        raise ConfigError(
            f"--tensor is {size} and the model takes pictures and sounds, which one rank reads. "
            "Leave --tensor out."
        )

    def broken(tensor: int) -> list[str]:
        return list(
            broken_tensor(
                Layout(tensor, tensor=tensor, sequence=False),
                LayoutShape(config, config.max_seq_len),
            )
        )

    for rule in broken(size):
        # The largest number of ranks that breaks no rule; one rank never does.
        fitting = next(n for n in range(min(size, config.num_heads), 0, -1) if not broken(n))
        raise ConfigError(f"{rule.replace('parallel.tensor', '--tensor')}. Use {fitting}.")


def build_part(
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    dtype: torch.dtype,
    group: RankGroup,
) -> Model:
    """This rank's part of a model with given weights; all ranks of the group call this together."""
    # The cutting of training is used, whose spec names a task and an optimizer; a frozen part has
    # neither. No sequence parallelism: the few tokens of a decoding step are whole on every rank.
    ranks = form_groups(Mesh(group.rank, tensor=group.size), group)
    parallel = ParallelConfig(tensor=group.size, sequence=False)
    return build_frozen_part(
        EngineSpec(config, NextToken(), AdamW(), device, dtype, parallel=parallel, ranks=ranks),
        weights,
    )
