"""The name or path of a recipe comes in, the path of a file goes out. Recipes lie in the package,
so that a wheel has them.

my/own.yaml   a file of the user: what exists on disk comes first
laptop/sft    a shipped recipe, with or without .yaml and a leading recipes/
sft           sft.yaml in the working directory if it is there (`headway init sft` writes it);
              else short for laptop/sft; a name that only another folder has (flare) means that one
"""

from __future__ import annotations

import difflib
import stat
from collections.abc import Callable
from pathlib import Path

from headway.errors import ConfigError

FOLDER = Path(__file__).parents[1] / "recipes"
SUFFIXES = (".yaml", ".yml")


def recipe_names() -> list[str]:
    """The names of all shipped recipes: laptop/dpo, laptop/lora, ..."""
    return sorted(
        path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.yaml")
    )


def find_recipe(name: Path | str, say: Callable[[str], object] = str) -> Path:
    """The file of a recipe, from its path or the name of a shipped one.

    `say` receives a line if a file in the working directory hides a shipped recipe.
    """
    path = Path(name)
    # None: there is nothing of this name.
    is_folder: bool | None
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = None
    except (OSError, ValueError):  # no right to look, a name that is too long: opening it explains
        return path
    if is_folder is False:
        return path

    # There is nothing of this name, or a folder: `headway train sft` beside a run folder `sft`
    # still means the recipe.
    shipped = find_shipped(path)
    if shipped is None:
        if is_folder:
            raise ConfigError(
                f"{path}: is a folder. Give the path of a recipe; a run "
                f"folder has one at {path}/recipe.yaml."
            )
        raise ConfigError(
            f"{path}: no such file, and no recipe of this name comes with headway; {_hint(path)}"
        )

    for suffix in SUFFIXES:
        users_file = path.with_name(path.name + suffix)
        if not users_file.is_file():
            continue
        if users_file.samefile(shipped):  # inside headway's own folder
            return shipped
        shipped_name = shipped.relative_to(FOLDER).with_suffix("").as_posix()
        say(
            f"the recipe is the file {users_file} here; "
            f"recipes/{shipped_name} is the one that comes with headway"
        )
        return users_file
    return shipped


def is_shipped(path: Path) -> bool:
    """Whether a file is a recipe that comes with headway."""
    return path.resolve().is_relative_to(FOLDER.resolve())


def find_shipped(written: Path | str) -> Path | None:
    """The file of the shipped recipe of this name, whatever lies in the working directory.

    None if there is none.
    """
    name = _shipped_name(Path(written))
    if name is None:
        return None
    return FOLDER / f"{name}.yaml"


def unknown_recipe(name: Path | str) -> ConfigError:
    """The error for a name that no shipped recipe has."""
    return ConfigError(f"{name}: no recipe of this name comes with headway; {_hint(Path(name))}")


def _shipped_name(path: Path) -> str | None:
    """laptop/sft for every way to write it, None if no shipped recipe has the name."""
    names = recipe_names()
    parts = [part for part in path.parts if part != "."]
    if parts[:1] == ["recipes"]:
        parts = parts[1:]
    if not parts or path.is_absolute():
        return None
    if path.suffix in SUFFIXES:
        parts[-1] = parts[-1].removesuffix(path.suffix)

    name = "/".join(parts)
    if name in names:
        return name
    # Sorted names: `sft` is the first folder's, laptop/sft.
    return next((full_name for full_name in names if full_name.rpartition("/")[2] == name), None)


def _hint(path: Path) -> str:
    names = recipe_names()
    wanted = path.with_suffix("").as_posix().removeprefix("recipes/")
    short_names = dict.fromkeys(name.rpartition("/")[2] for name in reversed(names))
    near = difflib.get_close_matches(wanted, [*names, *short_names], n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]}? `headway init` lists all."
    return f"it has {', '.join(names)}."
