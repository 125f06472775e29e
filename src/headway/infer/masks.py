"""Under which head masks a model is read: its own, none, or those of a file; checked, window and sinks settled.

own     what the gates it was trained with have come to, or masks.tsv in its Hugging Face folder where there are no gates
none    every head keeps the whole past
FILE    masks.tsv of `headway masks export`, or DuoAttention's file or folder
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headway.errors import ConfigError, HeadwayError
from headway.model.config import ModelConfig
from headway.model.head_masks import DEFAULT_SINKS, DEFAULT_WINDOW, HeadMasks, read_masks

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.model.gates_file import TrainedGates

log = logging.getLogger("headway")

OWN, NONE = "own", "none"
MAX_REACH = 2**40
"""More tokens than any model keeps."""


@dataclass(frozen=True)
class MaskChoice:
    """Masks as they are asked for."""

    masks: str | None = None
    """own, none or a file; None: own where the model has masks, else none."""
    equal_per_layer: bool = False
    """As many full heads in every layer, those with the highest scores of the layer."""
    window: int | None = None
    """Instead of what the masks say."""
    sinks: int | None = None

    def __post_init__(self) -> None:
        check_reach(self.window, self.sinks)
        if self.masks == NONE and (flag := self.first_flag()) is not None:
            raise ConfigError(
                f"{flag} is given with --masks none, and it is about masks. Give --masks own or --masks FILE, or leave it out."
            )

    def first_flag(self) -> str | None:
        """The first option that is about masks, by name."""
        given = {
            "--equal-per-layer": self.equal_per_layer,
            "--stream-window": self.window is not None,
            "--stream-sinks": self.sinks is not None,
        }
        return next((flag for flag, is_given in given.items() if is_given), None)

    def of(self, loaded: LoadedModel) -> LoadedModel:
        """The model under the masks that were asked for."""
        if self.masks == NONE:
            return loaded.with_masks(None)
        if self.masks not in (None, OWN):
            path = Path(self.masks)
            return loaded.with_masks(self.read(path, loaded.config), str(path))
        masks = self.own(loaded.gates, loaded.masks_file, loaded.config)
        if masks is None and self.masks == OWN:
            raise ConfigError(
                f"--masks is own; {loaded.path} was trained without head gates and has no masks. Give a mask file, or leave --masks out."
            )
        if masks is None and (flag := self.first_flag()) is not None:
            raise ConfigError(f"{flag} is given without --masks, which it is about. Give --masks FILE, or leave it out.")
        return loaded.with_masks(masks, OWN)

    def own(self, gates: TrainedGates | None, file: Path | None, config: ModelConfig) -> HeadMasks | None:
        """The masks a model has of its own: of its gates, else of the table in its folder; None where it has neither."""
        if gates is not None:
            _compare(gates, file)
            return self._reaching(gates.masks(equal_per_layer=self.equal_per_layer))
        return None if file is None else self.read(file, config)

    def read(self, path: Path, config: ModelConfig, sparsity: float | None = None) -> HeadMasks:
        """The masks of a file, for one model, with window and sinks."""
        masks = read_masks(path, sparsity, equal_per_layer=self.equal_per_layer)
        masks.check(config, str(path))
        return self._reaching(masks)

    def cut(self, gates: TrainedGates, sparsity: float) -> HeadMasks:
        """Trained gates at a sparsity."""
        return self._reaching(gates.masks(sparsity, equal_per_layer=self.equal_per_layer))

    def _reaching(self, masks: HeadMasks) -> HeadMasks:
        found = masks.with_reach(self.window, self.sinks)
        return found.with_reach(
            DEFAULT_WINDOW if found.window is None else found.window, DEFAULT_SINKS if found.sinks is None else found.sinks
        )


def check_reach(window: int | None, sinks: int | None) -> None:
    """Refuse a window or sinks that no head can have."""
    if window is not None and not 1 <= window <= MAX_REACH:
        raise ConfigError(f"--stream-window is {window}; it must be 1 (a token sees itself) or more, and at most {MAX_REACH}.")
    if sinks is not None and not 0 <= sinks <= MAX_REACH:
        raise ConfigError(f"--stream-sinks is {sinks}; it must be 0 or more, and at most {MAX_REACH}.")


def _compare(gates: TrainedGates, file: Path | None) -> None:
    """Report a table beside the gates that says something else, such as one exported there at another sparsity."""
    if file is None:
        return
    try:
        same = read_masks(file) == gates.masks()
    except HeadwayError:
        same = False
    if not same:
        log.warning("%s: differs from the gates of the model, which are used. Give --masks %s to use the file.", file, file)


def describe(loaded: LoadedModel) -> dict[str, Any] | None:
    """The masks a model is read under, as plain values for a result; None where every head keeps the whole past."""
    masks = loaded.masks
    if masks is None:
        return None
    heads = masks.num_layers * masks.num_kv_heads
    return {
        "from": loaded.masks_from or "given",
        "full_heads": masks.num_full,
        "heads": heads,
        "sparsity": masks.sparsity,
        "window": masks.window,
        "sinks": masks.sinks,
    }


def in_words(described: dict[str, Any] | None) -> str:
    """The same for people."""
    if described is None:
        return "none"
    return (
        f"{described['from']} ({described['full_heads']} of {described['heads']} heads full, window {described['window']}, "
        f"sinks {described['sinks']})"
    )


def random_masks(like: HeadMasks, seed: int) -> HeadMasks:
    """As many full heads, at random places: what a choice of heads is compared with."""
    places = [(layer, head) for layer in range(like.num_layers) for head in range(like.num_kv_heads)]
    chosen = set(random.Random(seed).sample(places, like.num_full))
    rows = range(like.num_layers)
    return replace(like, full=tuple(tuple((layer, head) in chosen for head in range(like.num_kv_heads)) for layer in rows))
