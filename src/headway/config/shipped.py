"""The name or path of a recipe comes in, the path of a file goes out. Recipes lie in the package, so that a wheel has them.

my/own.yaml            a file of the user: what exists on disk comes first
laptop/sft             a shipped recipe, with or without .yaml and a leading recipes/
sft                    sft.yaml in the working directory if it is there (`headway init sft` writes it); else short for laptop/sft;
                       a name that only another folder has (flare) means that one
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


def find_recipe(given: Path | str, say: Callable[[str], object] = str) -> Path:
    """The file of a recipe that is given as a path or as the name of a shipped one. `say` learns of a file that hides a shipped one."""
    path = Path(given)
    try:
        is_folder = stat.S_ISDIR(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        is_folder = None
    except (OSError, ValueError):  # no right to look, a name that is too long: opening it explains
        return path
    if is_folder is False:
        return path
    shipped = find_shipped(path)
    if shipped is None:
        if is_folder:
            raise ConfigError(
                f"{path}: is a folder. Give the path of a recipe; a run folder has one at {path}/recipe.yaml."
            )
        raise ConfigError(
            f"{path}: no such file, and no recipe of this name comes with headway; {_hint(path)}"
        )
    mine = next(
        (file for suffix in SUFFIXES if (file := path.with_name(path.name + suffix)).is_file()),
        None,
    )
    if mine is not None and not mine.samefile(shipped):
        name = shipped.relative_to(FOLDER).with_suffix("").as_posix()
        say(
            f"the recipe is the file {mine} here; recipes/{name} is the one that comes with headway"
        )
        return mine
    return shipped


def is_shipped(path: Path) -> bool:
    """Whether a file is a recipe that comes with headway."""
    return path.resolve().is_relative_to(FOLDER.resolve())


def find_shipped(given: Path | str) -> Path | None:
    """The file of the shipped recipe of this name, whatever lies in the working directory; None if there is none."""
    name = _shipped_name(Path(given))
    return None if name is None else FOLDER / f"{name}.yaml"


def unknown_recipe(given: Path | str) -> ConfigError:
    """The answer to a name that no shipped recipe has."""
    return ConfigError(f"{given}: no recipe of this name comes with headway; {_hint(Path(given))}")


def _shipped_name(path: Path) -> str | None:
    """laptop/sft for every way to write it, None if no shipped recipe has the name."""
    names = recipe_names()
    parts = [part for part in path.parts if part != "."]
    parts = parts[1:] if parts[:1] == ["recipes"] else parts
    if not parts or path.is_absolute():
        return None
    if path.suffix in SUFFIXES:
        parts[-1] = parts[-1].removesuffix(path.suffix)
    name = "/".join(parts)
    if name in names:
        return name
    return next((one for one in names if one.rpartition("/")[2] == name), None)


def _hint(path: Path) -> str:
    names = recipe_names()
    wanted = path.with_suffix("").as_posix().removeprefix("recipes/")
    short = {one.rpartition("/")[2]: one for one in reversed(names)}
    near = difflib.get_close_matches(wanted, [*names, *short], n=1, cutoff=0.7)
    if near:
        return f"did you mean {near[0]}? `headway init` lists all."
    return f"it has {', '.join(names)}."
