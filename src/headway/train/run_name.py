"""The folder of a run that the user gave no name.

In: a recipe and the file it was read from; out: the recipe with a name.

    headway train lora ...               runs/lora-laptop: the name in the shipped recipe
    the same with other settings         runs/lora-laptop-qwen2.5-0.5b-chat: recipe, model and data
    and with still other settings        runs/lora-laptop-qwen2.5-0.5b-chat-2
    headway train mine.yaml ...          runs/mine-qwen2.5-0.5b-chat: the file has no run.name

Invariant: the same settings lead to the same folder, where the run resumes; runs with other
settings never share one. A run.name of the user is kept. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.config.external_code import find_external_code
from headway.config.load import load, read_plain
from headway.config.section import differences
from headway.config.shipped import is_shipped
from headway.errors import ConfigError, HeadwayError
from headway.runtime.json_file import load_json
from headway.train.config import Recipe

GIVEN = Path("logs") / "given.yaml"
"""In a run folder: the recipe as it was given, before model and data were read. recipe.yaml has
what was read from them, too.
"""
RECIPE = "recipe.yaml"
USED = (RECIPE, "metrics.jsonl", "saved.json")
LEARNED = (
    "optim",
    "objective",
    "batch.lr_scaling",
    "batch.reference_rows",
    "precision",
    "fp8",
    "loss_scale",
)
"""Settings that a resumed run may change, and that still make another experiment. Others say how,
where and how long a run computes.
"""
LONGEST_PART = 60
LONGEST_NAME = 200
"""Below the 255 bytes that file systems take, with room for a number or `.old-1` behind it."""
MAX_RUNS = 1000
"""Numbers that are tried after the name of a recipe, model and data."""


def with_name(
    recipe: Recipe, file: Path | None, overrides: Sequence[str], say: Callable[[str], object]
) -> Recipe:
    """The recipe with a name of its own, unless the user gave one.

    `say` learns of a folder that holds another run.
    """
    if any(override.partition("=")[0].strip() in ("run.name", "run") for override in overrides):
        return recipe
    # A name in a shipped recipe was not chosen by the user.
    has_name = "name" in recipe.run.model_fields_set
    if has_name and (file is None or not is_shipped(file)):
        return recipe

    # The first folder that was passed over, and why: it has the name that the user expects.
    passed_over: str | None = None
    for name in _candidate_names(recipe, file, has_name=has_name):
        folder = recipe.run.dir / name
        problem = _settings_problem(folder, recipe)
        if problem is None:
            if passed_over is not None:
                # Before anything is said of folders: other settings may come from a mistyped file.
                refuse_missing_data(recipe)
                say(f"{passed_over}; this run goes to {folder}. run.name=NAME chooses another name")
            run = recipe.run.model_copy(update={"name": name})
            return recipe.model_copy(update={"run": run})
        passed_over = passed_over or problem
    raise ConfigError(
        f"{recipe.run.dir} has too many runs of this recipe, model and data. Give run.name=NAME."
    )


def name_override(recipe: Recipe) -> str:
    """The name of a run for the command line of its ranks."""
    return f'run.name="{recipe.run.name}"'


def _candidate_names(recipe: Recipe, file: Path | None, *, has_name: bool) -> Iterator[str]:
    """Names to try, best first."""
    default_name = recipe.run.name
    label = default_name
    is_named_by_file = file is not None and not has_name
    if file is not None and not has_name:
        label = _name_part(file.stem)
        # A run of an earlier version is under the default name.
        if _is_used(recipe.run.folder) and _settings_problem(recipe.run.folder, recipe) is None:
            yield default_name
    else:
        yield label

    parts = [label, *_model_and_data(recipe)]
    name = "-".join(parts)[:LONGEST_NAME]
    if name != label or is_named_by_file:
        yield name
    for number in range(2, MAX_RUNS):
        yield f"{name}-{number}"


def _model_and_data(recipe: Recipe) -> Iterator[str]:
    """Model and data of a recipe, as parts of a name."""
    if recipe.init.source is not None:
        model = recipe.init.source.rstrip("/").rpartition("/")[2]
        yield _name_part(re.sub(r"\.gguf$", "", model, flags=re.IGNORECASE))

    sources = recipe.data.train or ()
    if sources:
        path = sources[0].path.partition(":")[0].rstrip("/")
        first = _name_part(path.rpartition("/")[2].partition(".")[0] or "data")
        if len(sources) > 1:
            first = f"{first}-and-{len(sources) - 1}-more"
        yield first


def _name_part(text: str) -> str:
    """A text as a part of a folder's name: lower case, without characters that shells treat."""
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.")[:LONGEST_PART] or "run"


def _is_used(folder: Path) -> bool:
    return any((folder / name).exists() for name in USED)


def _settings_problem(folder: Path, recipe: Recipe) -> str | None:
    """Why a folder is not this recipe's: what differs.

    None if it is free, or has a run with the same settings, which resumes.
    """
    if not _is_used(folder):
        return None

    path = folder / RECIPE
    has_original = (folder / GIVEN).is_file()
    if has_original:
        path = folder / GIVEN
    settings = recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
    try:
        # Compared before the recipe is loaded, because loading it imports its modules.
        if _imported_modules(read_plain(path, ())) != _imported_modules(settings):
            return f"{folder} holds a run with code of other modules"
        old = load(Recipe, path)
    except ConfigError:
        # The start of the run, which reads the folder too, says what is wrong with it.
        return None

    # The recipe.yaml of a run with stages is as it was given, too.
    if has_original or old.stages or recipe.stages:
        changes = _changes(old, recipe, folder)
    else:
        changes = _changes_of_early_run(old, recipe)
    if not changes:
        return None
    more = ""
    if len(changes) > 1:
        more = f" and {len(changes) - 1} more"
    return f"{folder} holds a run with other settings ({changes[0]}{more})"


def _imported_modules(data: Any) -> set[str]:
    """The user's modules that loading a recipe would import.

    Those of another recipe are not imported to compare it.
    """
    return {str(code) for code in find_external_code(data) if code.is_imported}


def _changes(old: Recipe, new: Recipe, folder: Path) -> list[str]:
    """What differs between two recipes as they were given, of all that decides what a run
    learns.
    """
    fixed, free = differences(old, new)
    changes = fixed + [change for change in free if change.startswith(LEARNED)]
    if not old.stages or not new.stages:
        return changes
    from headway.train.stages import changes_of_finished

    # Stages that have not begun may change; the finished ones belong to the run.
    changes = [change for change in changes if not change.startswith("stages")]
    return changes + changes_of_finished(old, new, _finished_stages(folder))


def _finished_stages(folder: Path) -> int:
    try:
        ledger: Any = load_json(folder / "stages.json")
        return sum(1 for entry in ledger["stages"] if entry["state"] == "done")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0


def _changes_of_early_run(old: Recipe, new: Recipe) -> list[str]:
    """What differs from a run of an earlier version, which has no recipe as it was given.

    Its recipe.yaml has what was read from model and data, too, so that few settings can be
    compared.
    """
    pairs = {
        "init.from": (old.init.source, new.init.source),
        "data.train": (
            [source.path for source in old.data.train or ()],
            [source.path for source in new.data.train or ()],
        ),
        "data.seq_len": (old.data.seq_len, new.data.seq_len),
        "tokenizer": (old.tokenizer, new.tokenizer),
        "objective.kind": (old.objective.kind, new.objective.kind),
        "adapter": (old.adapter, new.adapter),
        "seed": (old.seed, new.seed),
    }
    changes = [
        f"{key}: {before} -> {after}" for key, (before, after) in pairs.items() if before != after
    ]
    _, free = differences(old, new)
    return changes + [change for change in free if change.startswith(LEARNED)]


def refuse_missing_data(recipe: Recipe) -> None:
    """Refuse a training or validation file that is not there.

    Names of the hub are not looked up.
    """
    from headway.prepare.detect import format_of
    from headway.text.hub import is_hub_id

    data = recipe.data
    sources = list(data.train or ())
    if data.valid is not None and isinstance(data.valid.sets, dict):
        for of_set in data.valid.sets.values():
            sources += of_set
    for source in sources:
        if source.format is not None or is_hub_id(source.path.partition(":")[0]):
            continue
        try:
            format_of(source.path)
        except HeadwayError:
            # Other problems of a file are reported when it is opened.
            if not Path(source.path).exists():
                raise
