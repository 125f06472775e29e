"""What `--masks` and the options around it mean for one model; the variants of it that an evaluation compares.

own     the masks its trained gates give, or without gates, masks.tsv in its Hugging Face folder
none    every head keeps the whole past
FILE    masks.tsv of `headway masks export`, or DuoAttention's file or folder

Every result is checked against the model's shape and has a window and sinks. Imports without torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headway.errors import ConfigError, HeadwayError
from headway.model.config import ModelConfig
from headway.model.head_masks.file import read_masks
from headway.model.head_masks.gates_file import TrainedGates
from headway.model.head_masks.masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks, random_masks

log = logging.getLogger("headway")

OWN, NONE, FULL = "own", "none", "full"
MAX_REACH = 2**40
"""More tokens than any model keeps."""


@dataclass(frozen=True)
class MaskSource:
    """What a model brings from which its own masks are made."""

    model: str
    """Its path, for messages."""
    config: ModelConfig
    read_gates: Callable[[], TrainedGates | None]
    """The gates it was trained with; called only where they are needed."""
    file: Path | None
    """The mask table in its Hugging Face folder."""

    def trained_gates(self) -> TrainedGates:
        """Its gates; refused where it has none."""
        gates = self.read_gates()
        if gates is None:
            raise ConfigError(
                f"model is {self.model!r}, which has no head gates. Train them with objective head_sparsity, or give a mask file "
                "with --masks."
            )
        return gates


@dataclass(frozen=True)
class MaskChoice:
    """The options that say under which masks one model runs."""

    masks: str | None = None
    """own, none or a file; None: own where the model has masks, else none."""
    equal_per_layer: bool = False
    """The same number of full heads in every layer, those with the layer's highest scores."""
    window: int | None = None
    """Replaces the window of the masks."""
    sinks: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and not 1 <= self.window <= MAX_REACH:
            raise ConfigError(
                f"--stream-window is {self.window}; it must be 1 (a token sees itself) or more, and at most {MAX_REACH}."
            )
        if self.sinks is not None and not 0 <= self.sinks <= MAX_REACH:
            raise ConfigError(
                f"--stream-sinks is {self.sinks}; it must be 0 or more, and at most {MAX_REACH}."
            )
        if self.masks == NONE and (flag := self.first_flag()) is not None:
            raise ConfigError(
                f"{flag} is given with --masks none; it needs masks. Give --masks own or --masks FILE, or leave it out."
            )

    def first_flag(self) -> str | None:
        """The first given option that needs masks, by name."""
        given = {
            "--equal-per-layer": self.equal_per_layer,
            "--stream-window": self.window is not None,
            "--stream-sinks": self.sinks is not None,
        }
        return next((flag for flag, is_given in given.items() if is_given), None)

    @property
    def file(self) -> Path | None:
        """The mask file, where one is given."""
        return None if self.masks in (None, OWN, NONE) else Path(self.masks)

    def resolve(self, source: MaskSource) -> HeadMasks | None:
        """The masks a model runs under; None = every head keeps the whole past."""
        if self.masks == NONE:
            return None
        if self.file is not None:
            return self.read(self.file, source.config)
        masks = self.own(source)
        if masks is None and (flag := self.first_flag()) is not None:
            raise ConfigError(
                f"{flag} is given without --masks, and the model has no masks. Give --masks FILE, or leave it out."
            )
        return masks

    def own(self, source: MaskSource) -> HeadMasks | None:
        """The model's own masks; None where it has none, which `--masks own` refuses."""
        gates = source.read_gates()
        if gates is not None:
            _warn_if_different(gates, source.file)
            return self._with_reach(gates.masks(equal_per_layer=self.equal_per_layer))
        if source.file is not None:
            return self.read(source.file, source.config)
        if self.masks == OWN:
            raise ConfigError(
                f"--masks is own; {source.model} was trained without head gates and has no masks. Give a mask file, or leave --masks out."
            )
        return None

    def read(self, path: Path, config: ModelConfig, sparsity: float | None = None) -> HeadMasks:
        """The masks of a file, checked against a model."""
        masks = read_masks(path, sparsity, equal_per_layer=self.equal_per_layer)
        masks.check(config, str(path))
        return self._with_reach(masks)

    def at_sparsity(self, gates: TrainedGates, sparsity: float) -> HeadMasks:
        """Trained gates at a sparsity."""
        return self._with_reach(gates.masks(sparsity, equal_per_layer=self.equal_per_layer))

    def _with_reach(self, masks: HeadMasks) -> HeadMasks:
        found = masks.with_reach(self.window, self.sinks)
        return found.with_reach(
            DEFAULT_WINDOW if found.window is None else found.window,
            DEFAULT_SINKS if found.sinks is None else found.sinks,
        )


def _warn_if_different(gates: TrainedGates, file: Path | None) -> None:
    """Warn if the table next to the gates differs from them, e.g. because it was exported at another sparsity."""
    if file is None:
        return
    try:
        same = read_masks(file) == gates.masks()
    except HeadwayError:
        same = False
    if not same:
        log.warning(
            "%s: differs from the gates of the model, which are used. Give --masks %s to use the file.",
            file,
            file,
        )


@dataclass(frozen=True)
class MaskVariant:
    """One way to run a model."""

    name: str
    masks: HeadMasks | None
    masks_from: str | None = None
    """`own` (of the model's gates), a file or `random`; None without masks."""


@dataclass(frozen=True)
class MaskSpec:
    """The masks an evaluation compares."""

    choice: MaskChoice = MaskChoice()
    sparsities: tuple[float, ...] = ()
    """Shares of streaming heads at which a soft mask file, or else the model's own gates, select heads."""
    random: bool = False
    """After each, random masks with as many full heads."""
    seed: int = 0

    def __post_init__(self) -> None:
        if any(not 0 < sparsity <= 1 for sparsity in self.sparsities) or len(
            set(self.sparsities)
        ) < len(self.sparsities):
            given = ", ".join(map(str, self.sparsities))
            raise ConfigError(
                f"--sparsities is {given}; give different shares above 0 and up to 1. The model without masks is always evaluated."
            )
        if self.choice.masks == NONE and (self.sparsities or self.random):
            flag = "--sparsities" if self.sparsities else "--random-masks"
            raise ConfigError(
                f"{flag} is given with --masks none; it needs masks. Leave one of them out."
            )

    def variants(self, source: MaskSource) -> list[MaskVariant]:
        """The model without masks, then under each of the masks, most full heads first."""
        found = [MaskVariant(FULL, None)]
        masked = self._masked(source)
        if not masked:
            flag = "--random-masks" if self.random else self.choice.first_flag()
            if flag is not None:
                raise ConfigError(
                    f"{flag} is given, but there are no masks. Give --masks FILE or --sparsities, or remove {flag}."
                )
        for variant in masked:
            found.append(variant)
            if self.random and variant.masks is not None:
                found.append(
                    MaskVariant(
                        f"random {variant.name}", random_masks(variant.masks, self.seed), "random"
                    )
                )
        return found

    def _masked(self, source: MaskSource) -> list[MaskVariant]:
        choice = self.choice
        if choice.masks == NONE:
            return []
        if choice.file is not None:
            read = [
                choice.read(choice.file, source.config, sparsity)
                for sparsity in sorted(self.sparsities) or [None]
            ]
            return [MaskVariant(f"s={masks.sparsity:.2f}", masks, choice.masks) for masks in read]
        if self.sparsities:
            gates = source.trained_gates()
            return [
                MaskVariant(f"s={sparsity:g}", choice.at_sparsity(gates, sparsity), OWN)
                for sparsity in sorted(self.sparsities)
            ]
        masks = choice.own(source)
        return [] if masks is None else [MaskVariant(OWN, masks, OWN)]
