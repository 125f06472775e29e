"""Chinese text in simplified characters, by OpenCC (the extra `zh`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from headway.errors import ConfigError

TO_SIMPLIFIED = "t2s"
"""OpenCC's name for: traditional characters to simplified ones, words as they are."""


def simplifier(option: str) -> Callable[[str], str]:
    """What converts a text; where OpenCC is not installed, the option that needs it is refused."""
    try:
        opencc = importlib.import_module("opencc")
    except ImportError:
        raise ConfigError(f"{option} needs OpenCC, which is not installed. Run pip install 'headway[zh]', or leave it out.") from None
    return opencc.OpenCC(TO_SIMPLIFIED).convert
