"""The folder of a run that the user gave no name. In: a recipe and the file it was read from; out: the recipe with a name.

    headway train lora ...               runs/lora-laptop: the name in the shipped recipe
    the same with other settings         runs/lora-laptop-qwen2.5-0.5b-chat: recipe, model and data
    and with still other settings        runs/lora-laptop-qwen2.5-0.5b-chat-2
    headway train mine.yaml ...          runs/mine-qwen2.5-0.5b-chat: the file has no run.name

Invariant: the same settings lead to the same folder, where the run resumes; runs with other settings never share one. A run.name of the
user is kept. Imports without torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from headway.config.load import find_external_code, load, read_plain
from headway.config.section import differences
from headway.config.shipped import is_shipped
from headway.errors import ConfigError, HeadwayError
from headway.runtime.json_file import load_json
from headway.train.config import Recipe
from headway.train.stages import changes_of_finished

GIVEN = Path("logs") / "given.yaml"
"""In a run folder: the recipe as it was given, before model and data were read. recipe.yaml has what was read from them, too."""
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
"""Settings that a resumed run may change, and that still make another experiment. Others say how, where and how long a run computes."""
LONGEST_PART = 60
LONGEST_NAME = 200


def with_name(
    recipe: Recipe, file: Path | None, overrides: Sequence[str], say: Callable[[str], object]
) -> Recipe:
    """The recipe with a name of its own, unless the user gave one; `say` learns of a folder that holds another run."""
    if any(override.partition("=")[0].strip() in ("run.name", "run") for override in overrides):
        return recipe
    has_name = "name" in recipe.run.model_fields_set
    if has_name and (file is None or not is_shipped(file)):
        return recipe
    other: str | None = None
    for name in _names(recipe, file, has_name=has_name):
        folder = recipe.run.dir / name
        problem = _other_settings(folder, recipe)
        if problem is None:
            if other is not None:
                refuse_missing_data(
                    recipe
                )  # before anything is said of folders: the file may be a mistake
                say(f"{other}; this run goes to {folder}. run.name=NAME chooses another name")
            return recipe.model_copy(update={"run": recipe.run.model_copy(update={"name": name})})
        other = other or problem
    raise ConfigError(
        f"{recipe.run.dir} has too many runs of this recipe, model and data. Give run.name=NAME."
    )


def name_override(recipe: Recipe) -> str:
    """The name of a run for the command line of its ranks."""
    return f'run.name="{recipe.run.name}"'


def _names(recipe: Recipe, file: Path | None, *, has_name: bool) -> Iterator[str]:
    """Names to try, best first."""
    label = recipe.run.name
    if file is not None and not has_name:
        label = _part(file.stem)
        # A run of an earlier version is under the default name.
        if _is_used(recipe.run.folder) and _other_settings(recipe.run.folder, recipe) is None:
            yield recipe.run.name
    else:
        yield label
    parts = [label, *_described(recipe)]
    name = "-".join(parts)[:LONGEST_NAME]
    if name != label or (file is not None and not has_name):
        yield name
    for number in range(2, 1000):
        yield f"{name}-{number}"


def _described(recipe: Recipe) -> Iterator[str]:
    """Model and data of a recipe, as parts of a name."""
    if recipe.init.source is not None:
        yield _part(
            re.sub(
                r"\.gguf$",
                "",
                recipe.init.source.rstrip("/").rpartition("/")[2],
                flags=re.IGNORECASE,
            )
        )
    sources = recipe.data.train or ()
    if sources:
        path = sources[0].path.partition(":")[0].rstrip("/")
        first = path.rpartition("/")[2].partition(".")[0] or "data"
        yield _part(first) if len(sources) == 1 else f"{_part(first)}-and-{len(sources) - 1}-more"


def _part(text: str) -> str:
    return re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-.")[:LONGEST_PART] or "run"


def _is_used(folder: Path) -> bool:
    return any((folder / name).exists() for name in USED)


def _other_settings(folder: Path, recipe: Recipe) -> str | None:
    """Why a folder is not this recipe's: what differs. None if it is free, or has a run with the same settings, which resumes."""
    if not _is_used(folder):
        return None
    is_whole = (folder / GIVEN).is_file()
    path = folder / GIVEN if is_whole else folder / RECIPE
    try:
        if _modules(read_plain(path, ())) != _modules(
            recipe.model_dump(mode="json", by_alias=True, exclude_unset=True)
        ):
            return f"{folder} holds a run with code of other modules"
        old = load(Recipe, path)
    except ConfigError:
        return None  # how a run starts says what is wrong with the folder
    changes = (
        _changes(old, recipe, folder)
        if is_whole or old.stages or recipe.stages
        else _changes_of_origin(old, recipe)
    )
    if not changes:
        return None
    more = f" and {len(changes) - 1} more" if len(changes) > 1 else ""
    return f"{folder} holds a run with other settings ({changes[0]}{more})"


def _modules(data: Any) -> set[str]:
    """The user's modules that loading a recipe would import: those of another recipe are not imported to compare it."""
    return {str(code) for code in find_external_code(data) if code.is_imported}


def _changes(old: Recipe, new: Recipe, folder: Path) -> list[str]:
    """What differs between two recipes as they were given, of all that decides what a run learns."""
    fixed, free = differences(old, new)
    changes = fixed + [change for change in free if change.startswith(LEARNED)]
    if not old.stages or not new.stages:
        return changes
    # Stages that have not begun may change; the finished ones belong to the run.
    changes = [change for change in changes if not change.startswith("stages")]
    return changes + changes_of_finished(old, new, _finished_stages(folder))


def _finished_stages(folder: Path) -> int:
    try:
        ledger: Any = load_json(folder / "stages.json")
        return sum(1 for entry in ledger["stages"] if entry["state"] == "done")
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return 0


def _changes_of_origin(old: Recipe, new: Recipe) -> list[str]:
    """The same for a run of an earlier version, whose recipe has what was read from model and data: where it comes from decides."""
    pairs = {
        "init.from": (old.init.source, new.init.source),
        "data.train": (
            [one.path for one in old.data.train or ()],
            [one.path for one in new.data.train or ()],
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
    """Refuse a training or validation file that is not there. Names of the hub are not looked up."""
    from headway.prepare.detect import format_of
    from headway.text.hub import is_hub_id

    data = recipe.data
    sets = data.valid.sets if data.valid is not None and isinstance(data.valid.sets, dict) else {}
    for source in [*(data.train or ()), *(one for many in sets.values() for one in many)]:
        if source.format is not None or is_hub_id(source.path.partition(":")[0]):
            continue
        try:
            format_of(source.path)
        except HeadwayError:
            if not Path(source.path).exists():
                raise
