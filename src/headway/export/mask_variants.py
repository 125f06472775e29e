"""Which masks a model is read with: a file, sparsities of its trained gates, random masks beside them. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.eval.long_context import Variant
from headway.infer.load import find_model
from headway.infer.masks import equal_layers, load_masks, random_masks, settled
from headway.model.head_masks import HeadMasks

FULL = "full"


@dataclass(frozen=True)
class MaskWish:
    """Masks as they are asked for."""

    masks: Path | None = None
    sparsities: tuple[float, ...] = ()
    """Shares of streaming heads at which a soft mask file, or else the model's own gates, are cut."""
    equal_per_layer: bool = False
    window: int | None = None
    sinks: int | None = None
    random: bool = False
    """Beside each, random masks with as many full heads."""
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 < sparsity <= 1 for sparsity in self.sparsities) or len(set(self.sparsities)) < len(self.sparsities):
            told = ", ".join(map(str, self.sparsities))
            raise ConfigError(f"--sparsities is {told}; give different shares above 0 and up to 1. The full model is always asked.")
        if self.masks is None and not self.sparsities:
            flags = {
                "--random-masks": self.random,
                "--equal-per-layer": self.equal_per_layer,
                "--stream-window": self.window is not None,
                "--stream-sinks": self.sinks is not None,
            }
            for flag, given in flags.items():
                if given:
                    raise ConfigError(f"{flag} is given and there are no masks. Give --masks FILE or --sparsities, or leave it out.")

    def variants(self, model: Path | str) -> list[Variant]:
        """The model as it is, then under each of the masks, most heads first."""
        found = [Variant(FULL, None)]
        for name, masks in self._wanted(model):
            found.append(Variant(name, masks))
            if self.random:
                found.append(Variant(f"random {name}", random_masks(masks, self.seed)))
        return found

    def _wanted(self, model: Path | str) -> list[tuple[str, HeadMasks]]:
        if self.masks is None and not self.sparsities:
            return []
        config = find_model(model).config
        if self.masks is not None:
            cuts = sorted(self.sparsities) or [None]
            wanted = [
                load_masks(self.masks, config, sparsity=cut, equal_per_layer=self.equal_per_layer, window=self.window, sinks=self.sinks)
                for cut in cuts
            ]
            return [(f"s={masks.sparsity:.2f}", masks) for masks in wanted]
        from headway.export.masks import read_trained_gates

        gates = read_trained_gates(model)
        result: list[tuple[str, HeadMasks]] = []
        for cut in sorted(self.sparsities):
            masks = gates.masks(cut)
            masks = equal_layers(masks) if self.equal_per_layer else masks
            result.append((f"s={cut:g}", settled(masks.with_reach(self.window, self.sinks))))
        return result
