"""A run in stages: each is an ordinary run in RUN/stages/NN-name and starts from the last checkpoint of the one before it.

    RUN/recipe.yaml   the whole recipe          RUN/stages.json   which stages are done, and their summaries
    RUN/metrics.jsonl the steps of all stages   RUN/summary.json  of all stages, at the end    RUN/final -> that of the last stage

A finished stage never runs again, and its settings may not change. All ranks go through the stages together.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from headway.checkpoint.config import CHECKPOINTS
from headway.checkpoint.stored_model import FINAL, STAGES, StoredModel, find_model
from headway.config.load import dump_yaml, load
from headway.data.target_check import check_targets
from headway.errors import ConfigError, HeadwayError
from headway.model.adapter.config import all_specs
from headway.model.adapter.stored import StoredAdapter
from headway.model.layout import param_specs
from headway.optim.groups import make_groups, objective_specs, trainable
from headway.parallel.collectives import RankGroup
from headway.runtime.json_file import load_json
from headway.runtime.storage import check_writable, link_atomic, write_atomic
from headway.train.batches import open_run_data
from headway.train.code_record import record_code
from headway.train.config import Recipe
from headway.train.control import on_first_rank
from headway.train.frozen_model import check_reference
from headway.train.resolve import Resolved, resolve
from headway.train.run_folder import (
    RECIPE,
    SUMMARY,
    begin_in,
    move_aside,
    read_summary,
    refuse_broken_links,
    unused_name,
    was_used,
    write_json,
)
from headway.train.run_name import refuse_missing_data
from headway.train.stages import FOLDER, Stage, StagePosition, changes_of_finished, expand
from headway.train.start import is_restart, refuse_leftovers
from headway.train.wrapped import wrapping_of

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("headway")

TrainStage = Callable[[Resolved, str, StagePosition], dict[str, Any]]
"""Trains one stage to its end: (stage, how to resume, its position) -> its summary."""
SUMMED = ("steps", "seconds", "tokens", "flops", "skipped_steps")


@dataclass(frozen=True)
class StagedStart:
    """How a staged run starts."""

    done: list[dict[str, Any]] = field(default_factory=list)
    """The entries of stages.json of finished stages."""
    resume: str = "auto"
    """How the first unfinished stage starts."""
    moved: list[tuple[str, str]] = field(default_factory=list)
    """Folders to move first, and their new names."""
    is_damaged: bool = False
    """stages.json was not readable and must be rewritten."""


def run_stages(
    recipe: Recipe,
    resume: str,
    world: RankGroup,
    train: TrainStage,
    moved: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train all unfinished stages; returns the summary of the whole run. `moved` is called after the run folder was moved."""
    home, stages = recipe.run.folder, expand(recipe)
    begin = StagedStart(**on_first_rank(world, lambda: vars(decide_staged_start(recipe, resume))))
    done = list(begin.done)
    if len(done) == len(stages):
        log.info("%s is complete: all %d stages were done before", home, len(stages))
        if world.rank == 0 and begin.is_damaged:
            _write_ledger(home, stages, done)
        return whole_summary(home, done)
    check_stages(stages, done, home, world)
    world.barrier()  # every rank has read the folder before one of them changes it
    if world.rank == 0:
        _prepare(recipe, begin, moved)
        _write_ledger(home, stages, done)
    world.barrier()
    for stage in stages[len(done) :]:
        position = StagePosition(home, stage.label, sum(entry["steps"] for entry in done))
        log.info("stage %d of %d: %s", stage.index + 1, len(stages), stage.name)
        stopped = train(
            _resolved(stage, done, home),
            begin.resume if stage.index == len(begin.done) else "auto",
            position,
        )
        _free()
        if "stopped_by" in stopped:
            return {**stopped, "run": str(home), "stage": stage.name}
        done.append(on_first_rank(world, lambda stage=stage: _entry(stage)))
        if world.rank == 0:
            _write_ledger(home, stages, done)
    summary = whole_summary(home, done)
    if world.rank == 0:
        _finish(home, stages[-1], summary)
    return summary


def check_stages(
    stages: list[Stage], done: list[dict[str, Any]], home: Path, world: RankGroup
) -> list[tuple[Stage, Resolved]]:
    """Resolve and check every unfinished stage on the model the one before it will produce; nothing is trained."""
    previous = _left_by(done, home, stages[0].recipe)
    found: list[tuple[Stage, Resolved]] = []
    for stage in stages[len(done) :]:
        resolved = resolve_stage(stage, previous)
        check_stage(stage, resolved, world)
        found.append((stage, resolved))
        previous = expected_model(resolved, stage.folder)
    return found


def resolve_stage(stage: Stage, previous: StoredModel | None) -> Resolved:
    """Read what a stage refers to; an error names the stage."""
    try:
        return resolve(stage.recipe, previous if stage.follows else None)
    except HeadwayError as problem:
        _raise_of(stage, problem)


def check_stage(stage: Stage, resolved: Resolved, world: RankGroup) -> None:
    """Open what a stage reads, match its patterns and check its batch, so that its errors are found before the first stage trains."""
    recipe, model = resolved.recipe, resolved.model
    specs = all_specs(model, recipe.adapter)
    try:
        recipe.batch.resolve(recipe.data.seq_len, recipe.parallel.mesh(world.rank, world.size).data)
        specs |= objective_specs(recipe.objective.build().module)
        training = trainable(specs, recipe.freeze, recipe.train)
        make_groups(recipe.optim, specs, training, recipe.objective.rules)
        check_targets(open_run_data(resolved), resolved.tokenizer)
        check_reference(resolved)
    except HeadwayError as problem:
        _raise_of(stage, problem)


def _raise_of(stage: Stage, problem: HeadwayError) -> NoReturn:
    raise type(problem)(
        "\n".join(f"stage {stage.name}: {line}" for line in str(problem).splitlines())
    ) from None


def expected_model(resolved: Resolved, folder: Path) -> StoredModel:
    """The model a stage will produce, as far as it is known before training: shape, tokenizer, initial weights."""

    def initial() -> Iterator[tuple[str, Tensor]]:
        from headway.model.init import initial_value

        for spec in param_specs(resolved.model):
            yield spec.name, initial_value(spec, resolved.model, resolved.recipe.seed)

    weights: Callable[[], Iterator[tuple[str, Tensor]]] = (
        initial if resolved.weights is None else resolved.weights.weights
    )
    adapter = resolved.recipe.adapter
    carried = (
        None if adapter is None else StoredAdapter(adapter, resolved.base, weights, dict, list)
    )
    return StoredModel(folder, resolved.model, resolved.tokenizer_path, weights, adapter=carried)


def decide_staged_start(recipe: Recipe, resume: str) -> StagedStart:
    """Read the run folder and decide; changes nothing."""
    home = recipe.run.folder
    check_writable(home)
    resume = "auto" if is_restart(home) else resume
    old = home / RECIPE
    refuse_broken_links([home, old])
    if resume == "never" and was_used(home):
        return StagedStart(moved=[(str(home), str(unused_name(home)))])
    if not old.exists():
        refuse_leftovers(home, home / CHECKPOINTS)
        if resume not in ("auto", "never"):
            raise ConfigError(f"--resume is {resume}, but {home} has no stages yet. Leave it out.")
        return StagedStart()
    before = load(Recipe, old)
    if not before.stages:
        raise ConfigError(
            f"{home} is a run without stages. Choose another run.name, or use --resume never to start a new run."
        )
    done, is_damaged = _done_before(recipe)
    if resume != "auto":
        done, moved = _back_to(Path(resume), done, home, expand(recipe))
        return StagedStart(done, resume, moved)
    _refuse_changes(before, recipe, done)
    return StagedStart(done, is_damaged=is_damaged)


def _refuse_changes(before: Recipe, now: Recipe, done: list[dict[str, Any]]) -> None:
    changed = changes_of_finished(before, now, len(done))
    if changed:
        for stage in expand(now):
            refuse_missing_data(stage.recipe)
        raise ConfigError(
            f"{now.run.folder}: finished stages may not change: {'; '.join(changed)}. "
            "Set them back, choose another run.name, or use --resume never to start a new run."
        )


def _back_to(
    path: Path, done: list[dict[str, Any]], home: Path, stages: list[Stage]
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The stages before the one a checkpoint belongs to, and the folders of later ones, which will be trained again."""
    inside = [stage for stage in stages if path.resolve().is_relative_to(stage.folder.resolve())]
    if not inside:
        raise ConfigError(
            f"--resume is {path}, which is not a checkpoint of a stage of {home}. Give one below {home / FOLDER}."
        )
    index = inside[0].index
    if len(done) < index:
        raise ConfigError(
            f"--resume is {path}, of stage {index + 1}; stage {len(done) + 1} before it is not done. Leave --resume out."
        )
    later = [stage.folder for stage in stages[index + 1 :] if stage.folder.exists()]
    return done[:index], [(str(folder), str(unused_name(folder))) for folder in later]


def read_ledger(home: Path) -> list[dict[str, Any]]:
    """The entries of stages.json; empty if it is missing. A damaged one raises ValueError."""
    try:
        found: Any = load_json(home / STAGES)
        listed: list[dict[str, Any]] = list(found["stages"])
        if any(
            entry["state"] == "done" and not {"steps", "seconds", "checkpoint"} <= entry.keys()
            for entry in listed
        ):
            raise ValueError("an entry lacks its summary")
    except FileNotFoundError:
        return []
    except (OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return listed


def _done_before(recipe: Recipe) -> tuple[list[dict[str, Any]], bool]:
    """The entries of finished stages; where stages.json is damaged, from the summaries of the stages, with a warning."""
    home = recipe.run.folder
    try:
        return [entry for entry in read_ledger(home) if entry["state"] == "done"], False
    except ValueError as error:
        done = [
            _entry(stage)
            for stage in takewhile(
                lambda stage: read_summary(stage.folder) is not None, expand(recipe)
            )
        ]
        log.warning(
            "%s is damaged (%s); according to their folders, %d stages are done",
            home / STAGES,
            error,
            len(done),
        )
        return done, True


def _write_ledger(home: Path, stages: list[Stage], done: list[dict[str, Any]]) -> None:
    left = [
        {
            "name": stage.name,
            "folder": f"{FOLDER}/{stage.label}",
            "state": "running" if stage.index == len(done) else "waiting",
        }
        for stage in stages[len(done) :]
    ]
    write_json(home / STAGES, {"stages": [*done, *left]})


def _prepare(recipe: Recipe, begin: StagedStart, moved: Callable[[], None]) -> None:
    home = recipe.run.folder
    for old, new in begin.moved:
        move_aside(Path(old), Path(new))
        if Path(old) == home:
            moved()
    begin_in(home)
    record_code(home, recipe)
    final = home / FINAL
    if final.is_dir() and not final.is_symlink():
        target = unused_name(final)
        final.rename(target)
        log.warning(
            "%s was a folder, as a copy that follows links leaves it; it is now %s, and the link is written at the end",
            final,
            target,
        )
    for stale in (final, home / SUMMARY):  # of a run that had fewer stages
        stale.unlink(missing_ok=True)
    write_atomic(home / RECIPE, dump_yaml(recipe, only_given=True))


def _left_by(done: list[dict[str, Any]], home: Path, recipe: Recipe) -> StoredModel | None:
    return (
        find_model(home / done[-1]["checkpoint"], wrapping=wrapping_of(recipe))
        if done and done[-1]["checkpoint"]
        else None
    )


def _resolved(stage: Stage, done: list[dict[str, Any]], home: Path) -> Resolved:
    """A stage with the weights of the one before it."""
    if not stage.follows:
        return resolve_stage(stage, None)
    source = done[-1]["checkpoint"]
    recorded = (
        load(Recipe, stage.folder / RECIPE).init.source
        if (stage.folder / RECIPE).exists()
        else None
    )
    # a run folder that was moved keeps the name it began with
    weights = recorded if recorded is not None and recorded.endswith(source) else str(home / source)
    return resolve_stage(stage.starting_from(weights), _left_by(done, home, stage.recipe))


def _entry(stage: Stage) -> dict[str, Any]:
    """The entry of stages.json for a finished stage."""
    summary = read_summary(stage.folder)
    assert summary is not None, "a stage that is done has a summary"
    folder = f"{FOLDER}/{stage.label}"
    last = summary.get("checkpoint")
    checkpoint = None if last is None else f"{folder}/{CHECKPOINTS}/{Path(last).name}"
    return {
        "name": stage.name,
        "folder": folder,
        "state": "done",
        **summary,
        "checkpoint": checkpoint,
    }


def whole_summary(home: Path, done: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of all stages: sums, the first loss of the first and the numbers of the last."""
    first, last = done[0], done[-1]
    total = {key: sum(entry[key] or 0 for entry in done) for key in SUMMED}
    rates = {
        f"{kind}_per_second": _rate(done, f"{kind}_per_second") for kind in ("tokens", "samples")
    }
    latest = {
        key: value
        for key, value in last.items()
        if key.startswith(("last_", "best_")) or key in ("data_wait_share", "stopped_early")
    }
    final = str(home / FINAL) if last.get("final") else None
    begun = {key: first[key] for key in ("first_loss", "first_valid_loss")}
    return {"run": str(home), **total, **rates, **begun, **latest, "final": final, "stages": done}


def _rate(done: list[dict[str, Any]], key: str) -> float | None:
    """The mean over the time of all stages that have it."""
    known = [(entry[key], entry["seconds"]) for entry in done if entry.get(key) is not None]
    seconds = sum(time for _, time in known)
    return sum(rate * time for rate, time in known) / seconds if seconds else None


def _finish(home: Path, last: Stage, summary: dict[str, Any]) -> None:
    if summary["final"] is not None:
        link_atomic(home / FINAL, f"{FOLDER}/{last.label}/{FINAL}")
    write_json(home / SUMMARY, summary)
    log.info(
        "all %d stages are done: %d steps in %.0f s; %s",
        len(summary["stages"]),
        summary["steps"],
        summary["seconds"],
        home,
    )


def _free() -> None:
    """Free the memory of a stage before the next one starts."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
