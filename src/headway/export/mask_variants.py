"""The variants under which a model is read: in full, under masks of its gates or of a file, random ones. Imports without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError
from headway.eval.long_context import Variant
from headway.infer.load import StoredModel, find_model
from headway.infer.masks import NONE, OWN, MaskChoice, random_masks
from headway.model.head_masks import HeadMasks

FULL = "full"


@dataclass(frozen=True)
class MaskWish:
    """Masks as they are asked for."""

    choice: MaskChoice = MaskChoice()
    sparsities: tuple[float, ...] = ()
    """Shares of streaming heads at which a soft mask file, or else the model's own gates, are cut."""
    random: bool = False
    """Beside each, random masks with as many full heads."""
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 < sparsity <= 1 for sparsity in self.sparsities) or len(set(self.sparsities)) < len(self.sparsities):
            given = ", ".join(map(str, self.sparsities))
            raise ConfigError(f"--sparsities is {given}; give different shares above 0 and up to 1. The full model is always asked.")
        if self.choice.masks == NONE and (self.sparsities or self.random):
            flag = "--sparsities" if self.sparsities else "--random-masks"
            raise ConfigError(f"{flag} is given with --masks none, and it is about masks. Leave one of them out.")

    def variants(self, model: Path | str) -> list[Variant]:
        """The model without masks, then under each of the masks, most heads first."""
        found = [Variant(FULL, None)]
        wanted = self._wanted(find_model(model))
        if not wanted:
            flag = "--random-masks" if self.random else self.choice.first_flag()
            if flag is not None:
                raise ConfigError(f"{flag} is given and there are no masks. Give --masks FILE or --sparsities, or leave it out.")
        for one in wanted:
            found.append(one)
            if self.random and one.masks is not None:
                found.append(Variant(f"random {one.name}", random_masks(one.masks, self.seed), "random"))
        return found

    def _wanted(self, found: StoredModel) -> list[Variant]:
        given = self.choice.masks
        if given == NONE:
            return []
        if given not in (None, OWN):
            cuts = sorted(self.sparsities) or [None]
            read = [self.choice.read(Path(given), found.config, cut) for cut in cuts]
            return [Variant(f"s={masks.sparsity:.2f}", masks, given) for masks in read]
        if self.sparsities:
            from headway.export.masks import trained_gates

            gates = trained_gates(found)
            return [Variant(f"s={cut:g}", self.choice.cut(gates, cut), OWN) for cut in sorted(self.sparsities)]
        masks: HeadMasks | None = self.choice.own(found.gates(), found.masks_file, found.config)
        if masks is None and given == OWN:
            raise ConfigError(
                f"--masks is own; {found.path} was trained without head gates and has no masks. Give a mask file, or leave --masks out."
            )
        return [] if masks is None else [Variant(OWN, masks, OWN)]
