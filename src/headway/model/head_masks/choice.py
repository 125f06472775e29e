"""What `--masks` and the options around it mean for one model; the variants of it that an
evaluation compares.

own     the masks its trained gates give, or without gates, masks.tsv in its Hugging Face folder
none    every head keeps the whole past
FILE    masks.tsv of `headway masks export`, or DuoAttention's file or folder

Every result is checked against the model's shape and has a window and sinks. The command line
imports this module for every help, so it imports nothing large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from headway.config.options import inner_options, option, parse_numbers
from headway.errors import ConfigError, HeadwayError
from headway.model.head_masks.baselines import WINDOWS, Baseline, random_draws, simple_choices
from headway.model.head_masks.masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks, Table

if TYPE_CHECKING:
    from headway.model.config import ModelConfig
    from headway.model.head_masks.gates_file import TrainedGates

log = logging.getLogger("headway")

OWN = "own"
NONE = "none"
FULL = "full"
"""Name of the variant without masks."""
EQUAL_PER_LAYER = (
    "Keep the same number of full heads in every layer, the best of each.",
    "--equal-per-layer",
)
"""Help and flag."""
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
                f"model is {self.model!r}, which has no head gates. Train them with objective "
                "head_sparsity, or give a mask file "
                "with --masks."
            )
        return gates


@dataclass(frozen=True)
class MaskChoice:
    """The options that say under which masks one model runs."""

    masks: str | None = option(
        None,
        "Head masks; a head at 0 keeps only sinks and a window. own: from the model's gates (the "
        "default if it has gates); "
        "none; or a file (masks.tsv, or DuoAttention's file or folder).",
        metavar="own|none|FILE",
    )
    equal_per_layer: bool = option(False, *EQUAL_PER_LAYER)
    stream_window: int | None = option(
        None, "Newest tokens a streaming head keeps; default: from the masks, else 1024."
    )
    stream_sinks: int | None = option(
        None, "First tokens a streaming head keeps; default: from the masks, else 128."
    )

    def __post_init__(self) -> None:
        if self.stream_window is not None and not 1 <= self.stream_window <= MAX_REACH:
            raise ConfigError(
                f"--stream-window is {self.stream_window}; it must be 1 (a token sees itself) or "
                f"more, and at most {MAX_REACH}."
            )
        if self.stream_sinks is not None and not 0 <= self.stream_sinks <= MAX_REACH:
            raise ConfigError(
                f"--stream-sinks is {self.stream_sinks}; it must be 0 or more, and at most "
                f"{MAX_REACH}."
            )
        if self.masks == NONE and (flag := self.first_flag()) is not None:
            raise ConfigError(
                f"{flag} is given with --masks none; it needs masks. Give --masks own or --masks "
                "FILE, or leave it out."
            )

    def first_flag(self) -> str | None:
        """The first given option that needs masks, by name."""
        if self.equal_per_layer:
            return "--equal-per-layer"
        if self.stream_window is not None:
            return "--stream-window"
        if self.stream_sinks is not None:
            return "--stream-sinks"
        return None

    @property
    def file(self) -> Path | None:
        """The mask file, where one is given."""
        if self.masks in (None, OWN, NONE):
            return None
        return Path(self.masks)

    def resolve(self, source: MaskSource) -> HeadMasks | None:
        """The masks a model runs under; None = every head keeps the whole past."""
        if self.masks == NONE:
            return None
        if self.file is not None:
            return self.read(self.file, source.config)
        # An option that needs masks and would have no effect is an error.
        masks = self.own(source)
        if masks is None and (flag := self.first_flag()) is not None:
            raise ConfigError(
                f"{flag} is given without --masks, and the model has no masks. Give --masks FILE, "
                "or leave it out."
            )
        return masks

    def own(self, source: MaskSource) -> HeadMasks | None:
        """The model's own masks; None where it has none, which `--masks own` refuses."""
        # Gates before the table: a table may have been exported at another sparsity.
        gates = source.read_gates()
        if gates is not None:
            _warn_if_different(gates, source.file)
            return self._with_reach(gates.masks(equal_per_layer=self.equal_per_layer))
        if source.file is not None:
            return self.read(source.file, source.config)
        if self.masks == OWN:
            raise ConfigError(
                f"--masks is own; {source.model} was trained without head gates and has no masks. "
                "Give a mask file, or leave --masks out."
            )
        return None

    def read(self, path: Path, config: ModelConfig, sparsity: float | None = None) -> HeadMasks:
        """The masks of a file, checked against a model."""
        from headway.model.head_masks.file import read_masks

        masks = read_masks(path, sparsity, equal_per_layer=self.equal_per_layer)
        masks.check(config, str(path))
        return self._with_reach(masks)

    def at_sparsity(self, gates: TrainedGates, sparsity: float) -> HeadMasks:
        """Trained gates at a sparsity."""
        return self._with_reach(gates.masks(sparsity, equal_per_layer=self.equal_per_layer))

    def _with_reach(self, masks: HeadMasks) -> HeadMasks:
        """With window and sinks of the options, else of the masks, else of the defaults."""
        chosen = masks.with_reach(self.stream_window, self.stream_sinks)
        default = replace(chosen, window=DEFAULT_WINDOW, sinks=DEFAULT_SINKS)
        return default.with_reach(chosen.window, chosen.sinks)


def _warn_if_different(gates: TrainedGates, file: Path | None) -> None:
    """Warn if the table next to the gates differs from them, e.g. because it was exported at
    another sparsity."""
    if file is None:
        return
    from headway.model.head_masks.file import read_masks

    try:
        is_same = read_masks(file) == gates.masks()
    except HeadwayError:
        is_same = False
    if not is_same:
        log.warning(
            "%s: differs from the gates of the model, which are used. Give --masks %s to use the "
            "file.",
            file,
            file,
        )


VariantKind = Literal["full", "masks", "random", "equal", "first", "windows"]
"""The model without masks, masks that were chosen, and what these are compared with."""


@dataclass(frozen=True)
class MaskVariant:
    """One way to run a model."""

    name: str
    masks: HeadMasks | None
    masks_from: str | None = None
    """`own` (of the model's gates), a file or the kind of a baseline; None without masks."""
    kind: VariantKind = "full"
    compared_with: str | None = None
    """Of a baseline: the name of the variant that is compared with it; None for windows alone,
    which all variants of one reach are compared with."""
    seed: int | None = None
    """Of a random draw."""


def parse_sparsities(text: str | None) -> tuple[float, ...]:
    """The shares of --sparsities; none if it is not given."""
    if text is None:
        return ()
    return parse_numbers("--sparsities", text)


RANDOM_MASKS = (
    "Also measure random masks with as many full heads; default: where there are masks.",
    "--random-masks/--no-random-masks",
)
SIMPLE_MASKS = (
    "Also measure simple masks: the best heads of each layer, the first of each, windows "
    "everywhere; default: where there are masks.",
    "--simple-masks/--no-simple-masks",
)
"""Help and flags, of `eval long` and `sparsify`."""
RANDOM_DRAWS = 5
"""The fewest draws whose spread says something."""
RANDOM_DRAWS_HELP = "Random masks for each mask; a verdict needs 2 or more."
MAX_DRAWS = 1000
"""More is a typing error."""


@dataclass(frozen=True)
class MaskSpec:
    """The masks an evaluation compares."""

    choice: MaskChoice = inner_options(MaskChoice())
    sparsities: tuple[float, ...] = option(
        (),
        "Also measure masks at these shares of streaming heads (0.3,0.5,0.7).",
        written=None,
        read=parse_sparsities,
    )
    """A soft mask file, or else the model's own gates, select the heads."""
    random: bool | None = option(None, *RANDOM_MASKS)
    """After each, random masks with as many full heads; None: where there are masks."""
    random_draws: int = option(RANDOM_DRAWS, RANDOM_DRAWS_HELP)
    simple: bool | None = option(None, *SIMPLE_MASKS)
    """After those, the simple choices; None: where there are masks."""
    seed: int = 0
    """Of the first random draw; the others have the seeds after it."""

    def __post_init__(self) -> None:
        has_repeats = len(set(self.sparsities)) < len(self.sparsities)
        if has_repeats or any(not 0 < sparsity <= 1 for sparsity in self.sparsities):
            listed = ", ".join(map(str, self.sparsities))
            raise ConfigError(
                f"--sparsities is {listed}; give different shares above 0 and up to 1. The model "
                "without masks is always evaluated."
            )
        if not 1 <= self.random_draws <= MAX_DRAWS:
            raise ConfigError(
                f"--random-draws is {self.random_draws}; it must be from 1 to {MAX_DRAWS}. To "
                "measure no random masks, give --no-random-masks."
            )
        flag = self._first_flag()
        if self.choice.masks == NONE and flag is not None:
            raise ConfigError(
                f"{flag} is given with --masks none; it needs masks. Leave one of them out."
            )

    def _first_flag(self) -> str | None:
        """The first given option that needs masks, by name."""
        if self.sparsities:
            return "--sparsities"
        if self.random:
            return "--random-masks"
        if self.simple:
            return "--simple-masks"
        return None

    def variants(self, source: MaskSource) -> list[MaskVariant]:
        """The model without masks, then under each of the masks, most full heads first, each before
        what it is compared with."""
        masked = self._masked(source)
        if not masked:
            flag = self._first_flag() or self.choice.first_flag()
            if flag is not None:
                raise ConfigError(
                    f"{flag} is given, but there are no masks. Give --masks FILE or --sparsities, "
                    f"or remove {flag}."
                )

        variants = [MaskVariant(FULL, None)]
        for ranked in masked:
            variants.append(ranked.variant)
            for baseline in self._baselines(ranked):
                # Windows alone are the same for all masks with one window.
                if all(baseline.masks != variant.masks for variant in variants) or (
                    baseline.kind != "windows"
                ):
                    variants.append(_compared(ranked.variant, baseline, variants))
        return variants

    def _baselines(self, ranked: RankedVariant) -> list[Baseline]:
        """What one of the masks is compared with."""
        masks = ranked.variant.masks
        assert masks is not None
        baselines: list[Baseline] = []
        if self.random is not False:
            baselines += random_draws(masks, self.random_draws, self.seed)
        if self.simple is not False:
            baselines += simple_choices(masks, ranked.scores)
        return baselines

    def _masked(self, source: MaskSource) -> list[RankedVariant]:
        """The variants with masks."""
        choice = self.choice
        if choice.masks == NONE:
            return []
        # A file may be at another sparsity than asked for (equal layers): its name is what it has.
        if choice.file is not None:
            tables = [
                choice.read(choice.file, source.config, sparsity)
                for sparsity in sorted(self.sparsities) or [None]
            ]
            scores = _scores_of(choice.file)
            return [
                RankedVariant(
                    MaskVariant(f"s={masks.sparsity:.2f}", masks, choice.masks, "masks"), scores
                )
                for masks in tables
            ]
        if self.sparsities:
            gates = source.trained_gates()
            return [
                RankedVariant(
                    MaskVariant(
                        f"s={sparsity:g}", choice.at_sparsity(gates, sparsity), OWN, "masks"
                    ),
                    gates.log_alpha.tolist(),
                )
                for sparsity in sorted(self.sparsities)
            ]
        masks = choice.own(source)
        if masks is None:
            return []
        gates = source.read_gates()
        scores = None
        if gates is not None:
            scores = gates.log_alpha.tolist()
        return [RankedVariant(MaskVariant(OWN, masks, OWN, "masks"), scores)]


@dataclass(frozen=True)
class RankedVariant:
    """A variant with masks, and what its heads were ranked by."""

    variant: MaskVariant
    scores: Table | None
    """None: a table of 0 and 1, which ranks nothing."""


def _scores_of(file: Path) -> Table | None:
    """The soft values of a mask file; None if it holds only 0 and 1."""
    from headway.model.head_masks.file import find_masks, read_table

    scores = read_table(find_masks(file))
    if all(value in (0.0, 1.0) for row in scores for value in row):
        return None
    return scores


def _compared(
    variant: MaskVariant, baseline: Baseline, others: Sequence[MaskVariant]
) -> MaskVariant:
    """A baseline as a variant of its own. The first random draw has no number: random s=0.5,
    random 2 s=0.5."""
    if baseline.kind == "windows":
        name = _unused(WINDOWS, others)
        return MaskVariant(name, baseline.masks, baseline.kind, baseline.kind)
    name = _unused(f"{baseline.kind} {variant.name}", others)
    return MaskVariant(
        name, baseline.masks, baseline.kind, baseline.kind, variant.name, baseline.seed
    )


def _unused(name: str, others: Sequence[MaskVariant]) -> str:
    """A name that no other variant has: with a number after its first word."""
    taken = {variant.name for variant in others}
    first, *rest = name.split(" ", 1)
    candidate = name
    number = 1
    while candidate in taken:
        number += 1
        candidate = " ".join([first, str(number), *rest])
    return candidate
