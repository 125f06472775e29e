"""The chat template a run teaches goes with its tokenizer: whoever loads a checkpoint or final/ asks in the form the model learned."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from headway.tokenizer.chat import OWN, find_template
from headway.tokenizer.to_jinja import to_jinja

if TYPE_CHECKING:
    from headway.tokenizer.load import Tokenizer
    from headway.train.build import Run

log = logging.getLogger("headway")

TOKENIZER = "tokenizer"
"""Folder of a run that holds its tokenizer with the template."""


def carry_template(run: Run, tokenizer: Tokenizer) -> None:
    """Where all conversations of a run are written in one template, let its checkpoints and final/ have it. The first rank's work."""
    names = {source.chat_template for source in run.recipe.data.train or () if source.kind != "text"}
    if len(names) != 1 or OWN in names:
        return
    (name,) = names
    written = to_jinja(find_template(name, tokenizer), tokenizer)
    if written is None or written == tokenizer.chat_template:
        return
    folder = run.start.folder / TOKENIZER
    tokenizer.with_chat_template(written).save(folder)
    run.tokenizer_path = run.saver.tokenizer = folder
    replaced = ", in place of its own" if tokenizer.chat_template is not None else ""
    log.info("chat template %s goes into the tokenizer of checkpoints and final/%s", name, replaced)
