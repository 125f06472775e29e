"""tokenizer_config.json and special_tokens_map.json, read with everything in them of the type that the rest of reading relies on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from headway.errors import DataError
from headway.runtime.json_file import read_object

CONFIG, MAP, TEMPLATE = "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"
ROLES = ("bos", "eos", "pad", "unk")
LARGEST_ID = 1 << 31


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, completed from special_tokens_map.json and chat_template.jinja."""
    config = _read(folder / CONFIG)
    for key, value in _read(folder / MAP).items():
        config.setdefault(key, value)
    path = folder / TEMPLATE
    if path.is_file():
        try:
            config["chat_template"] = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as problem:
            raise DataError(f"{path} cannot be read: {problem}.") from None
    return config


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = read_object(path, DataError)
    for role in ROLES:  # old Llama folders have empty ones
        if found.get(f"{role}_token") == "":
            del found[f"{role}_token"]
    for key, (fits, expected) in TYPES.items():
        if found.get(key) is not None and not fits(found[key]):
            raise DataError(f"{path}: {key} is {str(found[key])[:80]}; {expected} is expected.")
    return found


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and _encodes(value)


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_token(value: Any) -> bool:
    content = cast(dict[str, Any], value).get("content") if isinstance(value, dict) else value
    return _is_text(content) and content != ""


def _is_decoder(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    listed = cast(dict[str, Any], value).items()
    numbers = all(number.isascii() and number.isdigit() and len(number) < 11 and int(number) < LARGEST_ID for number, _ in listed)
    return numbers and all(isinstance(token, dict) and _is_token(token) for _, token in listed)


def _are_tokens(value: Any) -> bool:
    return isinstance(value, (list, dict)) and all(map(_is_token, value.values() if isinstance(value, dict) else value))


def _is_template(value: Any) -> bool:
    if isinstance(value, str):
        return _encodes(value)
    named = isinstance(value, list) and all(isinstance(one, dict) and {"name", "template"} <= one.keys() for one in value)
    return named and all(isinstance(one["name"], str) and isinstance(one["template"], str) and _encodes(one["template"]) for one in value)


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool)


TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **{f"{role}_token": (_is_token, "a token or a mapping with its content") for role in ROLES},
    "added_tokens_decoder": (_is_decoder, "a mapping from ids to tokens"),
    "additional_special_tokens": (_are_tokens, "a list of tokens"),
    "extra_special_tokens": (_are_tokens, "a list or mapping of tokens"),
    "tokenizer_class": (lambda value: isinstance(value, str), "a name"),
    "chat_template": (_is_template, "a template or a list of named templates"),
    "add_bos_token": (_is_switch, "true or false"),
    "add_eos_token": (_is_switch, "true or false"),
    "clean_up_tokenization_spaces": (_is_switch, "true or false"),
}
