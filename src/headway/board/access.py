"""The token of a board, from the environment or made new. Who may ask is decided by `runtime/web_access.py`."""

from __future__ import annotations

import os
import secrets

from headway.runtime.web_access import Access, Refusal, check_token, is_loopback

__all__ = ["COOKIE", "Access", "Refusal", "choose_token"]

TOKEN_VARIABLE = "HEADWAY_BOARD_TOKEN"
COOKIE = "headway-board"


def choose_token(host: str) -> str | None:
    """The token of a board that listens on `host`: from the environment, or a new one; None where none is needed."""
    given = os.environ.get(TOKEN_VARIABLE, "").strip()
    if given:
        return check_token(given, TOKEN_VARIABLE)
    return None if is_loopback(host) else secrets.token_hex(24)
