"""Sizes as people write them: `100MB`, `4GiB`, `1500000`."""

import re

from headway.errors import ConfigError

_UNITS = {"": 1, "b": 1, **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)}}
_UNITS |= {f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)} | {k: 1000**p for p, k in enumerate("kmgt", 1)}


def parse_bytes(text: str, name: str) -> int:
    """The number of bytes a size stands for; `name` is the flag it came from."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].lower() not in _UNITS:
        raise ConfigError(f"{name} is {text!r}; write a size such as 500MB, 4GB or 2GiB.")
    size = int(float(found[1]) * _UNITS[found[2].lower()])
    if size <= 0:
        raise ConfigError(f"{name} is {text!r}; it must be more than nothing.")
    return size
