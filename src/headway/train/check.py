"""Check a recipe for a number of ranks before a job is queued: what `headway train` would refuse in
its first second is refused here.

In: a recipe and the number of ranks it will get. Out: nothing, or one error. Weights and data are
looked for, not read; nothing is written.
"""

from __future__ import annotations

from pathlib import Path

from headway.checkpoint.stored_model import StoredModel
from headway.data.config import SourceConfig
from headway.data.open import SourceStore, SourceStores
from headway.errors import HeadwayError
from headway.prepare.detect import format_of
from headway.text.hub import is_hub_id
from headway.train.config import Recipe
from headway.train.resolve import Resolved, resolve
from headway.train.staged_run import expected_model, resolve_stage
from headway.train.stages import expand


def check_for_ranks(recipe: Recipe, world: int) -> None:
    """Refuse a recipe that cannot train on this many ranks."""
    if not recipe.stages:
        _check(resolve(recipe), world)
        return

    # No stage has run, so each is checked on the model that the one before it would leave.
    previous: StoredModel | None = None
    for stage in expand(recipe):
        resolved = resolve_stage(stage, previous)
        try:
            _check(resolved, world)
        except HeadwayError as problem:
            raise type(problem)(f"stage {stage.name}: {problem}") from None
        previous = expected_model(resolved, stage.folder)


def _check(resolved: Resolved, world: int) -> None:
    recipe = resolved.recipe
    # In the order of `build`, as far as it needs neither ranks nor data.
    mesh = recipe.parallel.mesh(0, world)
    recipe.parallel.check(mesh, recipe.precision)
    recipe.batch.resolve(recipe.data.seq_len, mesh.data)
    SourceStores.of(recipe.data, _look_for)


def _look_for(source: SourceConfig) -> SourceStore:
    """A source that is here, or that the job will download.

    It is not opened: the path stands for its store.
    """
    # NAME:SPLIT names a part of a data set of the hub.
    if not is_hub_id(source.path.partition(":")[0]) and source.format is None:
        format_of(source.path)
    return SourceStore(source, Path(source.path))
