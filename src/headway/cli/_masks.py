"""How verbs take head masks: `--masks own|none|FILE` and what goes with it, and how they say which are used."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from headway.infer.load import LoadedModel
    from headway.model.head_masks.choice import MaskChoice

log = logging.getLogger("headway")

MASKS = typer.Option(
    None,
    metavar="own|none|FILE",
    help="Head masks, under which heads at 0 keep only sinks and a window: own (of the model's gates; the default where it has any), "
    "none, or a file (masks.tsv, or DuoAttention's file or folder).",
)
EQUAL_PER_LAYER = typer.Option(False, "--equal-per-layer", help="As many full heads in every layer, the best of each.")
STREAM_WINDOW = typer.Option(None, help="Newest tokens a streaming head keeps; default: as the masks say, else 1024.")
STREAM_SINKS = typer.Option(None, help="First tokens a streaming head keeps; default: as the masks say, else 128.")


def with_masks(loaded: LoadedModel, choice: MaskChoice, *, quiet: bool = False) -> LoadedModel:
    """The model under the masks that were asked for; what is used is reported where the model or the user has masks."""
    from headway.model.head_masks.masks import in_words

    chosen = loaded.with_mask_choice(choice)
    if not quiet and (choice.masks is not None or chosen.masks is not None):
        hint = " --masks none reads it without." if choice.masks is None else ""
        log.info("%s: masks %s.%s", loaded.path, in_words(chosen.describe_masks()), hint)
    return chosen
