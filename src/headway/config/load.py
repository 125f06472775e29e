"""A recipe comes in as YAML 1.2 plus `section.key=value` overrides; a frozen config model goes out,
or one line per mistake.

    file -> parse_yaml -> plain dict -> apply_overrides -> validate -> Recipe
              |                            |                  |
              +---- `where`: path of a key -> its line -------+-> "recipe.yaml:7: optim.lr is ..."

Until `validate`, a recipe is plain data (dict, list, str, numbers): overrides and stages are merged
before any rule is checked, so that a rule sees only the final values. `overrides.py` applies
overrides, `mistakes.py` explains what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML

from headway.config.mistakes import Translate, explain, flatten, shortened
from headway.config.overrides import apply_override, apply_overrides, in_order
from headway.config.regular_file import regular_only
from headway.config.section import Section
from headway.config.shipped import find_recipe
from headway.config.yaml_reader import MAX_BYTES, Where, parse_yaml
from headway.errors import ConfigError

S = TypeVar("S", bound=Section)


def load(
    schema: type[S],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    say: Callable[[str], object] = str,
    translate: Translate | None = None,
) -> S:
    """Read a recipe file (or none), apply overrides and validate.

    `say` receives a line for each key of the file that an override removes; by default (`str`,
    whose result nobody uses) nothing is said. `translate` knows names of other systems.
    """
    where: Where = {}
    data: dict[str, Any] = {}
    if path is not None:
        data = read_yaml(find_recipe(path, say), where)
    for note in apply_overrides(schema, data, overrides, where):
        say(note)
    return validate(schema, data, where, translate)


def read_plain(path: Path | None, overrides: Sequence[str]) -> dict[str, Any]:
    """A recipe file with its overrides as plain data; imports none of the modules it names."""
    data = {}
    if path is not None:
        data = read_yaml(path)
    for override in in_order(overrides):
        apply_override(data, override, {})
    return data


def read_yaml(path: Path, where: Where | None = None) -> dict[str, Any]:
    """Parse one YAML 1.2 file, or a shipped recipe by its name, into plain Python; the line of
    every key goes into `where`.
    """
    path = find_recipe(path)
    try:
        with open(path, encoding="utf-8", opener=regular_only) as file:
            # One byte more than the limit, so that parse_yaml sees that the file is too large.
            text = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}.") from None

    tree = parse_yaml(text, str(path), where)
    if tree is None:
        return {}

    if not isinstance(tree, dict):
        raise ConfigError(
            f"{path}: a recipe is a mapping of sections, not a {type(tree).__name__}."
        )

    return cast(dict[str, Any], tree)


def validate(
    schema: type[S],
    data: Mapping[str, Any],
    where: Where | None = None,
    translate: Translate | None = None,
) -> S:
    """Validate plain data in JSON mode (lists become tuples, text becomes paths) or raise a
    ConfigError that lists every mistake.
    """
    try:
        return schema.model_validate_json(json.dumps(data, allow_nan=False))
    except ValidationError as error:
        lines = [
            shortened(explain(details, schema, where or {}, data, translate))
            for details in flatten(error.errors())
        ]
        # Two members of a union may report the same mistake.
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    except ValueError as error:
        # A number that JSON does not have, which json.dumps refuses.
        raise ConfigError(f"recipe: {error}.") from None


def dump_yaml(config: BaseModel | Mapping[str, Any], *, only_given: bool = False) -> str:
    """The resolved config as YAML, as printed by `config show` and stored in a run folder;
    `only_given` leaves out defaults.
    """
    out = StringIO()
    yaml = YAML()
    yaml.default_flow_style = None
    yaml.width = 120
    if isinstance(config, BaseModel):
        data = config.model_dump(mode="json", by_alias=True, exclude_unset=only_given)
    else:
        data = dict(config)

    yaml.dump(data, out)
    return out.getvalue()
