"""A stored model, loaded to compute with: in evaluation mode, without gradients, with its tokenizer
and head masks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.checkpoint.stored_model import check_vocabulary, find_model
from headway.errors import ConfigError
from headway.model.config import ModelConfig
from headway.model.head_masks.choice import OWN, MaskChoice, MaskSource
from headway.model.head_masks.gates_file import TrainedGates
from headway.model.layout import GATES
from headway.runtime.paths import AnyPath

if TYPE_CHECKING:
    import torch

    from headway.infer.engine.part import ModelPart
    from headway.model.base import Model
    from headway.model.head_masks.masks import HeadMasks
    from headway.parallel.collectives import RankGroup
    from headway.tokenizer.load import Tokenizer


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to compute with, in evaluation mode and without gradients."""

    model: Model
    config: ModelConfig
    tokenizer: Tokenizer | None
    path: AnyPath
    end_ids: frozenset[int] = frozenset()
    """Ids that end a text."""
    masks: HeadMasks | None = None
    """Heads that keep only sinks and a window of the past; None = every head keeps all of it."""
    masks_from: str | None = None
    """Where the masks come from: `own`, or a file; None where there are none."""
    gates: TrainedGates | None = None
    """The head gates it was trained with."""
    masks_file: Path | None = None
    """A mask table in its Hugging Face folder."""
    part: ModelPart | None = None
    """Where several ranks share the layers: the part that `model` is."""

    def require_tokenizer(self) -> Tokenizer:
        """Its tokenizer; a ConfigError where the folder has none."""
        if self.tokenizer is None:
            raise ConfigError(
                f"{self.path}: holds no tokenizer. Put tokenizer.json and tokenizer_config.json "
                "there."
            )
        return self.tokenizer

    def with_masks(self, masks: HeadMasks | None, masks_from: str | None = None) -> LoadedModel:
        """The same weights under other masks."""
        if masks is not None:
            masks.check(self.config)
        return replace(self, masks=masks, masks_from=masks_from if masks is not None else None)

    def with_mask_choice(self, choice: MaskChoice) -> LoadedModel:
        """The same weights under the masks that `--masks` and its options select."""
        source = MaskSource(str(self.path), self.config, lambda: self.gates, self.masks_file)
        return self.with_masks(
            choice.resolve(source), OWN if choice.file is None else str(choice.file)
        )

    def describe_masks(self) -> dict[str, Any] | None:
        """The masks as plain values for a result; None where every head keeps the whole past."""
        if self.masks is None:
            return None
        return self.masks.describe(self.masks_from or "given")

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.head_weight.device


def load_model(
    path: AnyPath | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    group: RankGroup | None = None,
    scores: bool = False,
) -> LoadedModel:
    """Read a model onto a device; without a dtype it computes in fp32 on the CPU and in bf16
    elsewhere.

    Every head keeps the whole past, also where the model was trained under masks:
    `model.with_mask_choice(MaskChoice())` uses its own. `group`: ranks that share the layers; each
    calls this and has its part, which an inference engine computes with. `scores`: a reward model
    is wanted; without it, it is refused.
    """
    import torch

    from headway.model.base import build_frozen_model
    from headway.tokenizer.load import load_tokenizer

    stored = find_model(path)
    # Ranks that share the layers would need the pictures of all of them cut.
    if group is None:
        stored = stored.with_pictures()
    else:
        stored = stored.without_tower()
    stored.check_head(scores=scores)
    tokenizer = None
    end_ids = stored.end_ids
    # The tokenizer's end id ends a text too: some models' own settings name fewer.
    if stored.tokenizer_folder is not None:
        tokenizer = load_tokenizer(stored.tokenizer_folder)
        if tokenizer.eos_id is not None:
            end_ids |= {tokenizer.eos_id}
        check_vocabulary(tokenizer, stored.tokenizer_folder, stored.config)

    on = torch.device(device)
    if dtype is None:
        dtype = torch.float32 if on.type == "cpu" else torch.bfloat16

    # Gates are for training; here their values become masks, if the caller chooses them.
    config = stored.config.with_(head_gates=None)
    gates = list[TrainedGates]()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        """The weights that the model computes with; gates are kept aside, for
        `with_mask_choice`."""
        for name, value in stored.weights():
            if name == GATES and stored.config.head_gates is not None:
                gates.append(TrainedGates(stored.config.head_gates, value.detach().float().cpu()))
            else:
                yield name, value

    part = None
    if group is None:
        model = build_frozen_model(config, _start_reading(weights()), on, dtype)
    else:
        from headway.infer.engine.part import ModelPart, build_part, check_part

        check_part(config, group.size)
        model = build_part(config, _start_reading(weights()), on, dtype, group)
        part = ModelPart(group)

    # Known only now: weights are read while the model is built.
    trained_gates = None
    if gates:
        trained_gates = gates[0]
    return LoadedModel(
        model,
        config,
        tokenizer,
        stored.path,
        end_ids,
        gates=trained_gates,
        masks_file=stored.masks_file,
        part=part,
    )


def _start_reading(
    weights: Iterator[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same weights, the first one already read: files that do not fit the config are refused
    before memory is allocated."""
    first = next(weights)
    return chain([first], weights)
