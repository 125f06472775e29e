"""How the stages of a recipe follow each other: what each will find is read and checked before the first one trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from headway.data.open import open_data
from headway.data.targets import check_targets
from headway.errors import HeadwayError
from headway.infer.adapted import Carried
from headway.infer.load import StoredModel
from headway.model.layout import param_specs
from headway.optim.groups import OBJECTIVE, make_groups, trainable
from headway.parallel.collectives import RankGroup
from headway.prepare.sources import prepare_sources
from headway.train.expand import Stage
from headway.train.reference_model import check_reference
from headway.train.resolve import Resolved, resolve

if TYPE_CHECKING:
    from torch import Tensor


def resolve_stage(stage: Stage, previous: StoredModel | None) -> Resolved:
    """Read what a stage refers to; a mistake says which stage it is in."""
    try:
        return resolve(stage.recipe, previous if stage.follows else None)
    except HeadwayError as problem:
        _raise_of(stage, problem)


def check_stage(stage: Stage, resolved: Resolved, world: RankGroup) -> None:
    """Open what a stage reads, match its patterns and lay out its batch: a mistake in the last stage is said before the first trains."""
    recipe, model = resolved.recipe, resolved.model
    shapes = {spec.name: spec.shape for spec in param_specs(model)}
    if recipe.adapter is not None:
        shapes |= recipe.adapter.shapes(model)
    try:
        recipe.batch.resolve(recipe.data.seq_len, recipe.parallel.mesh(world.rank, world.size).data)
        module = recipe.objective.build().module
        if module is not None:
            shapes |= {OBJECTIVE + name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        make_groups(recipe.optim, shapes, trainable(shapes, recipe.freeze, recipe.train), recipe.objective.rules)
        tokenizer, pairs = resolved.tokenizer_path, recipe.objective.PAIRS
        stores = prepare_sources(recipe.data, tokenizer, pairs=pairs)
        data = open_data(recipe.data, stores, tokenizer=tokenizer, vocab_size=model.vocab, seed=recipe.seed, pairs=pairs)
        check_targets(data, resolved.tokenizer)
        check_reference(resolved)
    except HeadwayError as problem:
        _raise_of(stage, problem)


def _raise_of(stage: Stage, problem: HeadwayError) -> NoReturn:
    raise type(problem)("\n".join(f"stage {stage.name}: {line}" for line in str(problem).splitlines())) from None


def foreseen(resolved: Resolved, folder: Path) -> StoredModel:
    """The model a stage will leave, as far as it is known before it has trained: its shape, its tokenizer, its first weights."""

    def initial() -> Iterator[tuple[str, Tensor]]:
        from headway.model.init import initial_value

        for spec in param_specs(resolved.model):
            yield spec.name, initial_value(spec.name, spec.shape, resolved.model, resolved.recipe.seed)

    weights: Callable[[], Iterator[tuple[str, Tensor]]] = initial if resolved.weights is None else resolved.weights.weights
    adapter = resolved.recipe.adapter
    carried = None if adapter is None else Carried(adapter, resolved.base, weights, dict, list)
    return StoredModel(folder, resolved.model, resolved.tokenizer_path, weights, carried=carried)
