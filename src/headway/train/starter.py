"""The name of a shipped recipe and overrides come in; the text of a recipe to edit goes out, with
what each setting means.

    run: {name: lora-laptop}   ->   run:
                                      name: lora-laptop         # Name of the run and of its folder.

Read back, the text gives exactly the settings of the shipped recipe with the overrides. Imports
without torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from ruamel.yaml import YAML

from headway.config.load import load, read_yaml
from headway.config.overrides import apply_overrides
from headway.config.shipped import FOLDER, recipe_names
from headway.train.config import Recipe
from headway.train.stages import expand

COMMENT_COLUMN = 42
"""Where the descriptions behind settings begin."""
WIDTH = 140
"""Upper bound on the columns of a setting with its description behind it."""
COMMENT_WIDTH = 120
"""Upper bound on the columns of a description above a setting."""
NOT_SUGGESTED = ("stages", "tokenizer", "steps", "epochs", "freeze", "train")
"""Settings a recipe has for a reason or not at all: not offered among the further ones."""


def shipped_recipes() -> dict[str, str]:
    """Name and first sentence of every shipped recipe."""
    return {
        name: _top_comment(FOLDER / f"{name}.yaml")[0]
        .removeprefix("# ")
        .partition(". ")[0]
        .rstrip(".,:")
        for name in recipe_names()
    }


def commented_recipe(path: Path, overrides: Sequence[str] = ()) -> str:
    """The text of a recipe file, one setting per line, each with its description.

    Further settings follow as comments.
    """
    recipe = load(Recipe, path, overrides)
    plain = read_yaml(path)
    apply_overrides(Recipe, plain, overrides, {})
    lines = [
        *_top_comment(path),
        "# All settings with their defaults: headway config show THIS_FILE",
    ]
    for key, value in plain.items():
        # Sections stand apart; single settings stand together.
        if isinstance(value, (dict, list)):
            lines.append("")
        lines += _setting_lines(key, value, recipe, recipe)

    lines += ["", "# Further settings, with their defaults:"]
    for name in _further_settings(plain):
        for line in _setting_lines(name, getattr(recipe, name), recipe, recipe):
            lines.append(f"# {line}")
    return "\n".join(lines) + "\n"


def _top_comment(path: Path) -> list[str]:
    """The comment at the top of a recipe file."""
    head: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        head.append(line)
    return head or [f"# {path.stem}"]


def _setting_lines(
    key: str, value: Any, config: Any, recipe: Recipe, indent: str = ""
) -> Iterator[str]:
    """The lines of one setting, with those below it.

    `value` is what the file says; `config` is the validated section, which knows descriptions.
    """
    inner_config, description = _declared(config, key)
    if isinstance(value, dict) and value:
        yield f"{indent}{key}:"
        for name, inner in value.items():
            yield from _setting_lines(name, inner, inner_config, recipe, indent + "  ")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        yield f"{indent}{key}:"
        configs = inner_config
        if key == "stages" and not indent:
            # A stage declares no settings of its own: they are those of a recipe.
            configs = [stage.recipe for stage in expand(recipe)]
        for index, item in enumerate(value):
            item_config = None
            if isinstance(configs, (list, tuple)) and index < len(configs):
                item_config = configs[index]
            lines: list[str] = []
            for name, inner in item.items():
                lines += _setting_lines(name, inner, item_config, recipe, indent + "    ")
            yield f"{indent}  - {lines[0].strip()}"
            yield from lines[1:]
    else:
        yield from _with_description(f"{key}: {_one_line_yaml(value)}", description, indent)


def _one_line_yaml(value: Any) -> str:
    """A value as YAML on one line."""
    yaml = YAML()
    out = StringIO()
    # `{value: ...}` on one line, however long it is.
    yaml.default_flow_style = True
    yaml.width = 1 << 20
    yaml.dump({"value": value}, out)
    return out.getvalue().strip().removeprefix("{value: ").removesuffix("}")


def _with_description(text: str, description: str, indent: str) -> Iterator[str]:
    """A setting with its description behind it, or above it where there is no room."""
    line = f"{indent}{text:<{COMMENT_COLUMN - len(indent)}}  # {description}"
    if not description:
        yield indent + text
    elif len(line) <= WIDTH:
        yield line
    else:
        margin = f"{indent}# "
        yield from textwrap.wrap(
            description, COMMENT_WIDTH, initial_indent=margin, subsequent_indent=margin
        )
        yield indent + text


def _declared(config: Any, key: str) -> tuple[Any, str]:
    """The value and the description of a setting; neither where the config does not declare it."""
    if not isinstance(config, BaseModel):
        return None, ""
    for name, info in type(config).model_fields.items():
        if key in (name, info.alias):
            first_sentence = (info.description or "").partition(". ")[0].rstrip(".")
            return getattr(config, name), first_sentence
    return None, ""


def _further_settings(plain: dict[str, Any]) -> Iterator[str]:
    """Settings at the top of a recipe that this one does not give: single values, with a
    default.
    """
    for name, info in Recipe.model_fields.items():
        is_single = isinstance(info.default, (str, int, float, bool))
        if is_single and (info.alias or name) not in plain and name not in NOT_SUGGESTED:
            yield name
