"""How verbs take head masks: `--masks FILE` and what goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from headway.errors import ConfigError

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel

MASKS = typer.Option(None, help="Head masks (masks.tsv, or DuoAttention's file or folder): heads at 0 keep only sinks and a window.")
EQUAL_PER_LAYER = typer.Option(False, "--equal-per-layer", help="Round the masks so that every layer has as many full heads.")
STREAM_WINDOW = typer.Option(None, help="Newest tokens a streaming head keeps; default: as beside the masks, else 1024.")
STREAM_SINKS = typer.Option(None, help="First tokens a streaming head keeps; default: as beside the masks, else 128.")


def with_masks(
    loaded: LoadedModel, masks: Path | None, *, equal_per_layer: bool = False, window: int | None = None, sinks: int | None = None
) -> LoadedModel:
    """The model under the masks that were asked for."""
    from headway.infer.masks import load_masks

    if masks is None:
        for flag, given in (("--equal-per-layer", equal_per_layer), ("--stream-window", window), ("--stream-sinks", sinks)):
            if given is not None and given is not False:
                raise ConfigError(f"{flag} is given without --masks, which it is about. Give --masks FILE, or leave it out.")
        return loaded
    return loaded.with_masks(load_masks(masks, loaded.config, equal_per_layer=equal_per_layer, window=window, sinks=sinks))
