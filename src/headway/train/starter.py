"""The name of a shipped recipe and overrides come in; the text of a recipe to edit goes out, with what each setting means.

    run: {name: lora-laptop}      ->      run:
                                            name: lora-laptop                    # Name of the run and of its folder.

Read back, the text gives exactly the settings of the shipped recipe with the overrides. Imports without torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from headway.config.load import apply_overrides, load, read_yaml
from headway.config.shipped import FOLDER, recipe_names
from headway.train.config import Recipe
from headway.train.stages import expand

COMMENT_COLUMN = 42
WIDTH = 140
NOT_SUGGESTED = ("stages", "tokenizer", "steps", "epochs", "freeze", "train")
"""Settings a recipe has for a reason or not at all: not offered among the further ones."""


def shipped_recipes() -> dict[str, str]:
    """Name and first sentence of every shipped recipe."""
    return {
        name: _head(FOLDER / f"{name}.yaml")[0].removeprefix("# ").partition(". ")[0].rstrip(".,:")
        for name in recipe_names()
    }


def commented_recipe(path: Path, overrides: Sequence[str] = ()) -> str:
    """The text of a recipe file: one setting per line, each with its description, and further settings as comments."""
    recipe = load(Recipe, path, overrides)
    plain = read_yaml(path)
    apply_overrides(Recipe, plain, overrides, {})
    lines = [*_head(path), "# All settings with their defaults: headway config show THIS_FILE"]
    for key, value in plain.items():
        lines += (
            ["", *_setting(key, value, recipe, recipe)]
            if isinstance(value, (dict, list))
            else _setting(key, value, recipe, recipe)
        )
    further = [
        line
        for name in _further(plain)
        for line in _setting(name, getattr(recipe, name), recipe, recipe)
    ]
    return (
        "\n".join(
            [
                *lines,
                "",
                "# Further settings, with their defaults:",
                *(f"# {line}" for line in further),
            ]
        )
        + "\n"
    )


def _head(path: Path) -> list[str]:
    """The comment at the top of a recipe file."""
    head: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        head.append(line)
    return head or [f"# {path.stem}"]


def _setting(key: str, value: Any, config: Any, recipe: Recipe, indent: str = "") -> Iterator[str]:
    """The lines of one setting, with those below it."""
    below, description = _field(config, key)
    if isinstance(value, dict) and value:
        yield f"{indent}{key}:"
        for name, one in value.items():
            yield from _setting(name, one, below, recipe, indent + "  ")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{indent}{key}:"
        configs = (
            [stage.recipe for stage in expand(recipe)] if key == "stages" and not indent else below
        )
        for at, item in enumerate(value):
            of = configs[at] if isinstance(configs, (list, tuple)) and at < len(configs) else None
            lines = [
                line
                for name, one in item.items()
                for line in _setting(name, one, of, recipe, indent + "    ")
            ]
            yield f"{indent}  - {lines[0].strip()}"
            yield from lines[1:]
    else:
        yield from _described(f"{key}: {_value(value)}", description, indent)


def _value(value: Any) -> str:
    """A value as YAML on one line."""
    yaml, out = YAML(), StringIO()
    yaml.default_flow_style = True
    yaml.width = 1 << 20
    yaml.dump({"value": value}, out)
    return out.getvalue().strip().removeprefix("{value: ").removesuffix("}")


def _described(text: str, description: str, indent: str) -> Iterator[str]:
    """A setting with its description behind it, or above it where there is no room."""
    line = f"{indent}{text:<{COMMENT_COLUMN - len(indent)}}  # {description}"
    if not description:
        yield indent + text
    elif len(line) <= WIDTH:
        yield line
    else:
        yield from textwrap.wrap(
            description, 120, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        yield indent + text


def _field(config: Any, key: str) -> tuple[Any, str]:
    """The value and the description of a setting; neither where the config does not declare it."""
    for name, info in type(config).model_fields.items() if isinstance(config, BaseModel) else ():
        if key in (name, info.alias):
            return getattr(config, name), (info.description or "").partition(". ")[0].rstrip(".")
    return None, ""


def _further(plain: dict[str, Any]) -> Iterator[str]:
    """Settings at the top of a recipe that this one does not give: single values, with a default."""
    for name, info in Recipe.model_fields.items():
        is_single = isinstance(info.default, (str, int, float, bool))
        if is_single and (info.alias or name) not in plain and name not in NOT_SUGGESTED:
            yield name
