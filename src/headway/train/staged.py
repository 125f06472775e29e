"""A run in stages: each is an ordinary run in RUN/stages/NN-name, and starts from the last checkpoint of the one before it.

    RUN/recipe.yaml   the whole recipe        RUN/stages.json   which stages are done, and with what
    RUN/metrics.jsonl every step of all       RUN/summary.json  the whole, at the end        RUN/final -> the last stage's

A stage that is done is never run again; its settings may not change any more. All ranks go through the stages together.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from headway.checkpoint.config import CHECKPOINTS
from headway.config.load import dump_yaml, load
from headway.errors import ConfigError
from headway.infer.load import FINAL, STAGES, StoredModel, find_model
from headway.parallel.collectives import RankGroup
from headway.runtime.json_file import load_json
from headway.runtime.storage import check_writable, link_atomic, write_atomic
from headway.train.config import Recipe
from headway.train.expand import FOLDER, Stage, changes_of_finished, expand
from headway.train.folder import (
    RECIPE,
    SUMMARY,
    begin_in,
    first_decides,
    is_restart,
    move_aside,
    read_summary,
    unused_name,
    was_used,
    write_json,
)
from headway.train.place import Place
from headway.train.resolve import Resolved
from headway.train.saved import refuse_dangling, refuse_leftovers
from headway.train.stages import check_stage, foreseen, resolve_stage

log = logging.getLogger("headway")

TrainOne = Callable[[Resolved, str, Place], dict[str, Any]]
"""Trains one stage to its end: (what it is, how to resume, where it stands) -> its summary."""
ADDED = ("steps", "seconds", "tokens", "flops", "skipped_steps")


@dataclass(frozen=True)
class Begin:
    """How a staged run goes on."""

    done: list[dict[str, Any]] = field(default_factory=list)
    """What stages.json says about the stages that are finished."""
    resume: str = "auto"
    """How the first of the others starts."""
    moved: list[tuple[str, str]] = field(default_factory=list)
    """Folders to be set aside first, and where."""
    is_damaged: bool = False
    """stages.json was not readable and is to be written anew."""


def run_stages(recipe: Recipe, resume: str, world: RankGroup, train: TrainOne, moved: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Train all stages that are not done; returns the summary of the whole. `moved` is called where the run folder was set aside."""
    home, stages = recipe.run.folder, expand(recipe)
    begin = Begin(**first_decides(world, lambda: vars(decide(recipe, resume))))
    done = list(begin.done)
    if len(done) == len(stages):
        log.info("%s is complete: all %d stages were done before", home, len(stages))
        if world.rank == 0 and begin.is_damaged:
            _write_ledger(home, stages, done)
        return whole_summary(home, done)
    look_ahead(stages, done, home, world)
    world.barrier()  # every rank has read the folder before one of them changes it
    if world.rank == 0:
        _prepare(recipe, begin, moved)
        _write_ledger(home, stages, done)
    world.barrier()
    for stage in stages[len(done) :]:
        place = Place(home, stage.label, sum(entry["steps"] for entry in done))
        log.info("stage %d of %d: %s", stage.index + 1, len(stages), stage.name)
        stopped = train(_resolved(stage, done, home), begin.resume if stage.index == len(begin.done) else "auto", place)
        _free()
        if "stopped_by" in stopped:
            return {**stopped, "run": str(home), "stage": stage.name}
        done.append(first_decides(world, lambda stage=stage: _entry(stage)))
        if world.rank == 0:
            _write_ledger(home, stages, done)
    summary = whole_summary(home, done)
    if world.rank == 0:
        _finish(home, stages[-1], summary)
    return summary


def look_ahead(stages: list[Stage], done: list[dict[str, Any]], home: Path, world: RankGroup) -> list[tuple[Stage, Resolved]]:
    """Resolve and check every stage that is not done, each on what the one before it will leave; nothing is trained."""
    previous = _left_by(done, home)
    found: list[tuple[Stage, Resolved]] = []
    for stage in stages[len(done) :]:
        resolved = resolve_stage(stage, previous)
        check_stage(stage, resolved, world)
        found.append((stage, resolved))
        previous = foreseen(resolved, stage.folder)
    return found


def decide(recipe: Recipe, resume: str) -> Begin:
    """Look at the run folder and decide; changes nothing."""
    home = recipe.run.folder
    check_writable(home)
    resume = "auto" if is_restart(home) else resume
    old = home / RECIPE
    refuse_dangling([home, old])
    if resume == "never" and was_used(home):
        return Begin(moved=[(str(home), str(unused_name(home)))])
    if not old.exists():
        refuse_leftovers(home, home / CHECKPOINTS, RECIPE)
        if resume not in ("auto", "never"):
            raise ConfigError(f"--resume is {resume}, but {home} has no stages yet. Leave it out.")
        return Begin()
    before = load(Recipe, old)
    if not before.stages:
        raise ConfigError(f"{home} is a run without stages. Choose another run.name, or use --resume never to begin anew.")
    done, is_damaged = _done_before(recipe)
    if resume != "auto":
        done, moved = _back_to(Path(resume), done, home, expand(recipe))
        return Begin(done, resume, moved)
    _refuse_changes(before, recipe, done)
    return Begin(done, is_damaged=is_damaged)


def _refuse_changes(before: Recipe, now: Recipe, done: list[dict[str, Any]]) -> None:
    changed = changes_of_finished(before, now, len(done))
    if changed:
        raise ConfigError(
            f"{now.run.folder}: finished stages may not change: {'; '.join(changed)}. "
            "Set them back, choose another run.name, or use --resume never to begin anew."
        )


def _back_to(path: Path, done: list[dict[str, Any]], home: Path, stages: list[Stage]) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The stages before the one a checkpoint belongs to, and the folders of those after it, which will be made again."""
    inside = [stage for stage in stages if path.resolve().is_relative_to(stage.folder.resolve())]
    if not inside:
        raise ConfigError(f"--resume is {path}, which is no checkpoint of a stage of {home}. Give one below {home / FOLDER}.")
    index = inside[0].index
    if len(done) < index:
        raise ConfigError(f"--resume is {path}, of stage {index + 1}; stage {len(done) + 1} before it is not done. Leave --resume out.")
    later = [stage.folder for stage in stages[index + 1 :] if stage.folder.exists()]
    return done[:index], [(str(folder), str(unused_name(folder))) for folder in later]


def read_ledger(home: Path) -> list[dict[str, Any]]:
    """What stages.json says, stage by stage; nothing where there is none. One that is damaged is a ValueError."""
    try:
        found: Any = load_json(home / STAGES)
        listed: list[dict[str, Any]] = list(found["stages"])
        if any(entry["state"] == "done" and not {"steps", "seconds", "checkpoint"} <= entry.keys() for entry in listed):
            raise ValueError("an entry lacks what its stage came to")
    except FileNotFoundError:
        return []
    except (OSError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return listed


def _done_before(recipe: Recipe) -> tuple[list[dict[str, Any]], bool]:
    """The entries of the stages that are done; from what the stages themselves have left where stages.json is damaged, which is said."""
    home = recipe.run.folder
    try:
        return [entry for entry in read_ledger(home) if entry["state"] == "done"], False
    except ValueError as error:
        done = [_entry(stage) for stage in takewhile(lambda stage: read_summary(stage.folder) is not None, expand(recipe))]
        log.warning("%s is damaged (%s); by the folders of the stages %d are done", home / STAGES, error, len(done))
        return done, True


def _write_ledger(home: Path, stages: list[Stage], done: list[dict[str, Any]]) -> None:
    left = [
        {"name": stage.name, "folder": f"{FOLDER}/{stage.label}", "state": "running" if stage.index == len(done) else "waiting"}
        for stage in stages[len(done) :]
    ]
    write_json(home / STAGES, {"stages": [*done, *left]})


def _prepare(recipe: Recipe, begin: Begin, moved: Callable[[], None]) -> None:
    home = recipe.run.folder
    for old, new in begin.moved:
        move_aside(Path(old), Path(new))
        if Path(old) == home:
            moved()
        log.info("what was there is now %s", new)
    begin_in(home)
    for stale in (home / FINAL, home / SUMMARY):  # of a run that had fewer stages
        stale.unlink(missing_ok=True)
    write_atomic(home / RECIPE, dump_yaml(recipe, only_given=True))


def _left_by(done: list[dict[str, Any]], home: Path) -> StoredModel | None:
    return find_model(home / done[-1]["checkpoint"]) if done and done[-1]["checkpoint"] else None


def _resolved(stage: Stage, done: list[dict[str, Any]], home: Path) -> Resolved:
    """A stage with the weights the one before it has left."""
    if not stage.follows:
        return resolve_stage(stage, None)
    source = done[-1]["checkpoint"]
    recorded = load(Recipe, stage.folder / RECIPE).init.source if (stage.folder / RECIPE).exists() else None
    # a run folder that was moved since keeps the name it was begun with
    told = recorded if recorded is not None and recorded.endswith(source) else str(home / source)
    return resolve_stage(stage.starting_from(told), _left_by(done, home))


def _entry(stage: Stage) -> dict[str, Any]:
    """What stages.json keeps of a stage that is done."""
    summary = read_summary(stage.folder)
    assert summary is not None, "a stage that is done has a summary"
    folder = f"{FOLDER}/{stage.label}"
    kept = summary.get("checkpoint")
    checkpoint = None if kept is None else f"{folder}/{CHECKPOINTS}/{Path(kept).name}"
    return {"name": stage.name, "folder": folder, "state": "done", **summary, "checkpoint": checkpoint}


def whole_summary(home: Path, done: list[dict[str, Any]]) -> dict[str, Any]:
    """What the stages came to together: sums, the first loss of the first and the numbers of the last."""
    first, last = done[0], done[-1]
    total = {key: sum(entry[key] or 0 for entry in done) for key in ADDED}
    rates = {f"{kind}_per_second": _rate(done, f"{kind}_per_second") for kind in ("tokens", "samples")}
    kept = {key: value for key, value in last.items() if key.startswith(("last_", "best_")) or key in ("data_wait_share", "stopped_early")}
    final = str(home / FINAL) if last.get("final") else None
    begun = {key: first[key] for key in ("first_loss", "first_valid_loss")}
    return {"run": str(home), **total, **rates, **begun, **kept, "final": final, "stages": done}


def _rate(done: list[dict[str, Any]], key: str) -> float | None:
    """The mean over the time of all stages."""
    known = [(entry[key], entry["seconds"]) for entry in done if entry.get(key) is not None]
    seconds = sum(time for _, time in known)
    return sum(rate * time for rate, time in known) / seconds if seconds else None


def _finish(home: Path, last: Stage, summary: dict[str, Any]) -> None:
    if summary["final"] is not None:
        link_atomic(home / FINAL, f"{FOLDER}/{last.label}/{FINAL}")
    write_json(home / SUMMARY, summary)
    log.info("all %d stages are done: %d steps in %.0f s; %s", len(summary["stages"]), summary["steps"], summary["seconds"], home)


def _free() -> None:
    """Let go of a stage's memory before the next one asks for its own."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
