"""A run in stages: each is an ordinary run in RUN/stages/NN-name and starts from the last
checkpoint of the one before it.

    RUN/recipe.yaml     the whole recipe
    RUN/stages.json     which stages are done, and their summaries
    RUN/metrics.jsonl   the steps of all stages
    RUN/summary.json    of all stages, at the end
    RUN/final           a link to that of the last stage

A finished stage never runs again, and its settings may not change. All ranks go through the stages
together.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
    SUMMARY_KEYS,
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
OF_LAST = ("data_wait_share", "rollout_share", "stopped_early")
"""Keys that the summary of all stages takes from the last."""
SUMMED = ("steps", "seconds", "tokens", "flops", "skipped_steps")
"""Keys of a summary that are added up over the stages."""


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
    """Train all unfinished stages; returns the summary of the whole run.

    `moved` is called after the run folder was moved.
    """
    home = recipe.run.folder
    stages = expand(recipe)
    begin = StagedStart(**on_first_rank(world, lambda: vars(decide_staged_start(recipe, resume))))
    done = list(begin.done)
    if len(done) == len(stages):
        log.info("%s is complete: all %d stages were done before", home, len(stages))
        if world.rank == 0 and begin.is_damaged:
            _write_ledger(home, stages, done)
        return whole_summary(home, done)

    # A mistake in the last stage must be found now, not after days of training the first ones.
    check_stages(stages, done, home, world)
    # Every rank must have read the folder before one of them changes it.
    world.barrier()
    if world.rank == 0:
        _prepare(recipe, begin, moved)
        _write_ledger(home, stages, done)
    world.barrier()

    for stage in stages[len(done) :]:
        steps_before = sum(entry["steps"] for entry in done)
        position = StagePosition(home, stage.label, steps_before)
        log.info("stage %d of %d: %s", stage.index + 1, len(stages), stage.name)

        # --resume is about the first stage that is trained now; those after it are new.
        resume_stage = "auto"
        if stage.index == len(begin.done):
            resume_stage = begin.resume
        outcome = train(_resolve_next(stage, done, home), resume_stage, position)
        _free_memory()
        if "stopped_by" in outcome:
            return {**outcome, "run": str(home), "stage": stage.name}

        # From the stage's files, which a later start will read, too.
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
    """Resolve and check every unfinished stage on the model the one before it will produce.

    Nothing is trained.
    """
    previous = _model_of_last_stage(done, home, stages[0].recipe)
    checked: list[tuple[Stage, Resolved]] = []
    for stage in stages[len(done) :]:
        resolved = resolve_stage(stage, previous)
        check_stage(stage, resolved, world)
        checked.append((stage, resolved))
        previous = expected_model(resolved, stage.folder)
    return checked


def resolve_stage(stage: Stage, previous: StoredModel | None) -> Resolved:
    """Read what a stage refers to; an error names the stage."""
    try:
        return resolve(stage.recipe, previous if stage.follows else None)
    except HeadwayError as problem:
        _raise_for_stage(stage, problem)


def check_stage(stage: Stage, resolved: Resolved, world: RankGroup) -> None:
    """Open what a stage reads, match its patterns and check its batch.

    Its errors are found before the first stage trains.
    """
    recipe = resolved.recipe
    model = resolved.model
    specs = all_specs(model, recipe.adapter)
    try:
        recipe.batch.resolve(recipe.data.seq_len, recipe.parallel.mesh(world.rank, world.size).data)
        specs |= objective_specs(recipe.objective.build().module)
        training = trainable(specs, recipe.freeze, recipe.train)
        make_groups(recipe.optim, specs, training, recipe.objective.rules)
        check_targets(open_run_data(resolved), resolved.tokenizer)
        check_reference(resolved)
    except HeadwayError as problem:
        _raise_for_stage(stage, problem)


def _raise_for_stage(stage: Stage, problem: HeadwayError) -> NoReturn:
    """Raise an error once more, with the name of the stage in front of each of its lines."""
    lines = [f"stage {stage.name}: {line}" for line in str(problem).splitlines()]
    raise type(problem)("\n".join(lines)) from None


def expected_model(resolved: Resolved, folder: Path) -> StoredModel:
    """The model a stage will produce, as far as it is known before training.

    Shape and tokenizer are; weights are those that the stage starts from.
    """

    def initial() -> Iterator[tuple[str, Tensor]]:
        from headway.model.init import initial_value

        for spec in param_specs(resolved.model):
            yield spec.name, initial_value(spec, resolved.model, resolved.recipe.seed)

    weights: Callable[[], Iterator[tuple[str, Tensor]]] = initial
    if resolved.weights is not None:
        weights = resolved.weights.weights
    adapter = resolved.recipe.adapter
    stored_adapter = None
    if adapter is not None:
        # Its updates do not exist yet: the two last arguments give none.
        stored_adapter = StoredAdapter(adapter, resolved.base, weights, dict, list)
    return StoredModel(
        folder, resolved.model, resolved.tokenizer_path, weights, adapter=stored_adapter
    )


def decide_staged_start(recipe: Recipe, resume: str) -> StagedStart:
    """Read the run folder and decide; changes nothing."""
    home = recipe.run.folder
    check_writable(home)
    if is_restart(home):
        resume = "auto"
    old = home / RECIPE
    refuse_broken_links([home, old])
    if resume == "never" and was_used(home):
        return StagedStart(moved=[(str(home), str(unused_name(home)))])

    if not old.exists():
        refuse_leftovers(home, home / CHECKPOINTS)
        if resume not in ("auto", "never"):
            raise ConfigError(f"--resume is {resume}, but {home} has no stages yet. Leave it out.")
        return StagedStart()

    old_recipe = load(Recipe, old)
    if not old_recipe.stages:
        raise ConfigError(
            f"{home} is a run without stages. Choose another run.name, or use --resume never to "
            "start a new run."
        )
    done, is_damaged = _finished_entries(recipe)
    if resume != "auto":
        done, moved = _rewind_to(Path(resume), done, home, expand(recipe))
        return StagedStart(done, resume, moved)
    _refuse_changes(old_recipe, recipe, done)
    return StagedStart(done, is_damaged=is_damaged)


def _refuse_changes(before: Recipe, now: Recipe, done: list[dict[str, Any]]) -> None:
    """Refuse a recipe in which finished stages have other settings than they were trained with."""
    changed = changes_of_finished(before, now, len(done))
    if not changed:
        return
    # A file that is missing explains more than the settings that differ because of it.
    for stage in expand(now):
        refuse_missing_data(stage.recipe)
    raise ConfigError(
        f"{now.run.folder}: finished stages may not change: {'; '.join(changed)}. "
        "Set them back, choose another run.name, or use --resume never to start a new run."
    )


def _rewind_to(
    path: Path, done: list[dict[str, Any]], home: Path, stages: list[Stage]
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The stages before the one a checkpoint belongs to, and the folders to move.

    Those are the folders of later stages, which will be trained again.
    """
    # Resolved, because checkpoints/latest is a link.
    inside = [stage for stage in stages if path.resolve().is_relative_to(stage.folder.resolve())]
    if not inside:
        raise ConfigError(
            f"--resume is {path}, which is not a checkpoint of a stage of {home}. "
            f"Give one below {home / FOLDER}."
        )
    index = inside[0].index
    if len(done) < index:
        raise ConfigError(
            f"--resume is {path}, of stage {index + 1}; "
            f"stage {len(done) + 1} before it is not done. Leave --resume out."
        )
    later = [stage.folder for stage in stages[index + 1 :] if stage.folder.exists()]
    return done[:index], [(str(folder), str(unused_name(folder))) for folder in later]


def read_ledger(home: Path) -> list[dict[str, Any]]:
    """The entries of stages.json; empty if it is missing. A damaged one raises ValueError."""
    try:
        content: Any = load_json(home / STAGES)
        entries: list[dict[str, Any]] = list(content["stages"])
        for entry in entries:
            if entry["state"] == "done" and not SUMMARY_KEYS.issubset(entry):
                raise ValueError("an entry lacks its summary")
    except FileNotFoundError:
        return []
    except (OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return entries


def _finished_entries(recipe: Recipe) -> tuple[list[dict[str, Any]], bool]:
    """The entries of finished stages.

    Where stages.json is damaged, from the summaries of the stages, with a warning.
    """
    home = recipe.run.folder
    try:
        return [entry for entry in read_ledger(home) if entry["state"] == "done"], False
    except ValueError as error:
        # Stages are trained in order: the first one without a summary is the first to train.
        done: list[dict[str, Any]] = []
        for stage in expand(recipe):
            if read_summary(stage.folder) is None:
                break
            done.append(_entry(stage))
        log.warning(
            "%s is damaged (%s); according to their folders, %d stages are done",
            home / STAGES,
            error,
            len(done),
        )
        return done, True


def _write_ledger(home: Path, stages: list[Stage], done: list[dict[str, Any]]) -> None:
    """Write stages.json: the entries of finished stages, then what the others are."""
    entries = list(done)
    for stage in stages[len(done) :]:
        entries.append(
            {
                "name": stage.name,
                "folder": f"{FOLDER}/{stage.label}",
                "state": "running" if stage.index == len(done) else "waiting",
            }
        )
    write_json(home / STAGES, {"stages": entries})


def _prepare(recipe: Recipe, begin: StagedStart, moved: Callable[[], None]) -> None:
    home = recipe.run.folder
    for old, new in begin.moved:
        move_aside(Path(old), Path(new))
        if Path(old) == home:
            moved()

    begin_in(home)
    record_code(home, recipe)
    final = home / FINAL
    # The run's final is a link to that of its last stage. A folder there is what a copy of the
    # run made of the link, and it may be the only one: it is kept under another name.
    if final.is_dir() and not final.is_symlink():
        target = unused_name(final)
        final.rename(target)
        log.warning(
            "%s was a folder, as a copy that follows links leaves it; "
            "it is now %s, and the link is written at the end",
            final,
            target,
        )

    # Those of a run that was complete with fewer stages.
    final.unlink(missing_ok=True)
    (home / SUMMARY).unlink(missing_ok=True)
    write_atomic(home / RECIPE, dump_yaml(recipe, only_given=True))


def _model_of_last_stage(
    done: list[dict[str, Any]], home: Path, recipe: Recipe
) -> StoredModel | None:
    """The model of the last finished stage; None where it has left no checkpoint."""
    if done and done[-1]["checkpoint"]:
        return find_model(home / done[-1]["checkpoint"], wrapping=wrapping_of(recipe))
    return None


def _resolve_next(stage: Stage, done: list[dict[str, Any]], home: Path) -> Resolved:
    """A stage with the weights of the one before it."""
    if not stage.follows:
        return resolve_stage(stage, None)
    source = done[-1]["checkpoint"]
    weights = str(home / source)
    if (stage.folder / RECIPE).exists():
        # init.from may not change when a stage resumes. Where the run folder was moved, it keeps
        # the path that it began with.
        recorded = load(Recipe, stage.folder / RECIPE).init.source
        if recorded is not None and recorded.endswith(source):
            weights = recorded
    return resolve_stage(
        stage.starting_from(weights), _model_of_last_stage(done, home, stage.recipe)
    )


def _entry(stage: Stage) -> dict[str, Any]:
    """The entry of stages.json for a finished stage."""
    summary = read_summary(stage.folder)
    assert summary is not None, "a stage that is done has a summary"
    folder = f"{FOLDER}/{stage.label}"
    # Relative to the run folder, so that the run may be moved between two stages.
    checkpoint = None
    if summary.get("checkpoint") is not None:
        checkpoint = f"{folder}/{CHECKPOINTS}/{Path(summary['checkpoint']).name}"
    return {
        "name": stage.name,
        "folder": folder,
        "state": "done",
        **summary,
        "checkpoint": checkpoint,
    }


def whole_summary(home: Path, done: list[dict[str, Any]]) -> dict[str, Any]:
    """The summary of all stages: sums, the first loss of the first and the numbers of the last."""
    first = done[0]
    last = done[-1]
    total = {key: sum(entry[key] or 0 for entry in done) for key in SUMMED}
    rates = {key: _mean_rate(done, key) for key in ("tokens_per_second", "samples_per_second")}
    latest = {
        key: value
        for key, value in last.items()
        if key.startswith(("last_", "best_")) or key in OF_LAST
    }
    final = None
    if last.get("final"):
        final = str(home / FINAL)
    first_losses = {key: first[key] for key in ("first_loss", "first_valid_loss")}
    return {
        "run": str(home),
        **total,
        **rates,
        **first_losses,
        **latest,
        "final": final,
        "stages": done,
    }


def _mean_rate(done: list[dict[str, Any]], key: str) -> float | None:
    """The mean over the time of all stages that have it."""
    known = [(entry[key], entry["seconds"]) for entry in done if entry.get(key) is not None]
    seconds = sum(time for _, time in known)
    if seconds:
        return sum(rate * time for rate, time in known) / seconds
    return None


def _finish(home: Path, last: Stage, summary: dict[str, Any]) -> None:
    """On the first rank: what makes the run folder that of a finished run."""
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


def _free_memory() -> None:
    """Free the memory of a stage before the next one starts."""
    import torch

    # A run and its parts refer to each other, so that only a collection frees them.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
