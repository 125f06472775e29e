"""The answer to an option that a verb does not have: settings are written without dashes, and names
of other trainers are known.

    headway train lora --lr 1e-4          headway train has no option --lr; here it is optim.lr=0.0001
    headway train lora --optim.lr=1e-4    ... settings are written without dashes: optim.lr=1e-4
    headway chat --model_name_or_path X   ... give --model X
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headway.config.yaml_reader import parse_yaml
from headway.errors import ConfigError

RECIPE_NAMES = ("config", "config_file", "recipe", "cfg")
"""Options with which other trainers take their configuration file."""


def explain_option(error: Any, words: Sequence[str]) -> str | None:
    """A line for an unknown option, from click's error and the words of the command line; None
    where nothing better is known.
    """
    option = getattr(error, "option_name", None)
    context = getattr(error, "ctx", None)
    if option is None or context is None or not option.startswith("--"):
        return None

    name = option.removeprefix("--")
    value = _value_of(option, words)
    parameters = {
        flag: parameter for parameter in context.command.params for flag in parameter.opts
    }
    head = f"{context.command_path} has no option {option}"

    # Every verb that takes a recipe calls its parameter `arguments`.
    if "arguments" in parameters:
        return _as_setting(head, name, value, context.command_path)

    from headway.workflows.import_config.names import names_model

    if "--model" in parameters and names_model(name):
        return f"{head}; give --model {value or 'MODEL'}."
    return None


def _value_of(option: str, words: Sequence[str]) -> str | None:
    """The value that a person gave to an option: after =, or the next word."""
    for index, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.partition("=")[2]
        is_last = index + 1 == len(words)
        if word == option and not is_last and not words[index + 1].startswith("--"):
            return words[index + 1]
    return None


def _as_setting(head: str, name: str, value: str | None, verb: str) -> str | None:
    """The option of a verb that takes a recipe: a setting, another trainer's name for one, or the
    recipe itself.
    """
    from headway.workflows.import_config.names import translate
    from headway.workflows.import_config.rules import has_setting

    # Other tools write --batch-size and --batch_size for the same.
    path = name.replace("-", "_")
    if path in RECIPE_NAMES:
        return f"{head}; the recipe is an argument: {verb} {value or 'RECIPE'}."

    translated = translate(name, _parsed(value))
    if translated is not None:
        return f"{head}; {translated}"

    if has_setting(path):
        return f"{head}; settings are written without dashes: {path}={value or 'VALUE'}"
    return None


def _parsed(value: str | None) -> Any:
    """A value as a recipe would read it; a switch without one is on."""
    if value is None:
        return True
    try:
        return parse_yaml(value, "value")
    except ConfigError:
        return value
